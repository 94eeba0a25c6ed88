//! QMP, the protocol by which programs control the daemon: JSON objects, one to a line.
//!
//! ```text
//! bytes ── lexer ── parser ── request ── commands ── Command ── (the daemon)
//!                                session ◄────────── Result  ◄──┘
//! ```
//!
//! [`Session`] is one client's conversation. It is pure: the owner of the socket passes received text to it and sends
//! what it returns. Input is bounded in length and depth, and any input gets an answer.

pub(crate) mod commands;
mod error;
pub mod events;
mod lexer;
mod parser;
mod print;
mod reply;
mod request;
mod schema;
mod session;

pub(crate) use commands::all as commands;
pub use commands::{
    AddError, Command, DeleteMode, LatencyBoundaries, QmpCommand, SnapshotSync, add, arguments_of,
    read_command,
};
pub use error::{ErrorClass, QmpError};
pub(crate) use events::EVENTS;
pub use parser::{MAX_DEPTH, MAX_VALUE, Parser};
pub use reply::{Member, Reply, Returns};
pub use session::{Capabilities, Event, Session, Step, Ticket};
