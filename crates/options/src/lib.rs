//! Typed options: tables that describe them, and the reader that follows the tables.
//!
//! A thing that a user can name is a [`table::Field`]: its name, its kind, its default and its help text. Values come as
//! `key=value,…` text ([`keyval`]) or as JSON ([`json`]), with the syntax and the errors of qemu-storage-daemon (QSD). From
//! the [`shape`] of a table are made help texts, the schema and the reference.
//!
//! Everything here is pure: nothing is opened, and nothing runs.

#![forbid(unsafe_code)]

pub mod address;
pub mod error;
pub mod fd;
pub mod json;
pub mod keyval;
pub mod place;
mod row;
pub mod scalar;
pub mod shape;
pub mod table;
pub mod value;

pub use error::OptionError;
pub use fd::FdName;
pub use scalar::is_identifier;
pub use value::{Object, Value};
