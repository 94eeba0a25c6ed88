//! Images of a Ceph cluster, by librbd and librados.
//!
//! The libraries are opened at run time, so that a program that uses no cluster needs neither. This crate has all the
//! unsafe code that they take.
//!
//! | Item | What it is |
//! |---|---|
//! | [`Library`] | the functions of the two libraries |
//! | [`Cluster`] | a connection, which any number of images share |
//! | [`Image`] | an open image: size, resize, extents, change notices |
//! | [`Encryption`], [`NewEncryption`] | with which an image is opened or made |
//! | [`Lane`] | reads and writes of one event loop to one image |
//!
//! All functions of `Cluster` and `Image` block, for as long as the cluster takes. Those of `Lane` do not.

mod cluster;
mod encryption;
mod error;
mod image;
mod lane;
mod library;

pub use cluster::{CONNECTING, Cluster, Config, Key};
pub use encryption::{Cipher, Encryption, Format, NewEncryption};
pub use error::Error;
pub use image::{Creation, Image, ImageName, Span};
pub use lane::{Done, Lane, LaneOp};
pub use library::{Library, LoadError, Loading};
