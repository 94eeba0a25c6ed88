//! FUSE: a node as a regular file, mounted over a regular file.
//!
//! | module | contents |
//! |---|---|
//! | [`wire`] | messages of the kernel and answers, bytes to types; no I/O |
//! | `attributes` | size, mode and owner of the file, shared by all threads |
//! | `session` | the action for a request; no I/O |
//! | `connection` | a `/dev/fuse` descriptor on an I/O thread: requests down the node's channel, answers back |
//! | `export` | the control plane: threads, growth, stop, hand-over |
//! | [`mount`] | mounting and unmounting, for an unconfined process |
//!
//! Each I/O thread has its own descriptor (`FUSE_DEV_IOC_CLONE`). All read from the kernel's one queue.

mod attributes;
mod connection;
mod export;
pub mod mount;
pub mod session;
mod slots;
pub mod wire;

pub use attributes::FileAttributes;
pub use export::{FuseConfig, FuseExport, Resize};
