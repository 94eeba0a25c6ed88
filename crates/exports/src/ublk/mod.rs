//! ublk: a node as a block device of the host, `/dev/ublkbN`, by commands of io_uring.
//!
//! [`wire`]: the layouts of `linux/ublk_cmd.h`. `commands`: what the rings have to know of the commands. [`control`]: the
//! commands to `/dev/ublk-control`. `queue`: a queue of the device on its I/O thread. `export`: the control plane's side.

#![deny(unsafe_code)]

mod commands;
pub mod control;
mod export;
mod queue;
pub mod wire;

pub use export::{UblkConfig, UblkError, UblkExport};
