//! The harness of the integration tests: it runs the storage daemon as its users do, and attaches to it
//! what they attach, a Linux guest in QEMU ([`Guest`]) or a vhost-user front end ([`BlkClient`]).
//!
//! The daemon is the workspace's `ringmill`. `RINGMILL_BIN` names another: a program of the name
//! `qemu-storage-daemon` takes the same options, so that the tests themselves can be tested.
//!
//! What the tests need beside Rust is installed by `scripts/setup-tests.sh`. A test that misses
//! something fails and says so.

mod blk_client;
mod ceph;
mod deny;
mod firmware;
mod fuse;
mod guest;
mod image;
mod initramfs;
mod loop_device;
mod mounted;
pub mod nbd;
pub mod pattern;
mod port;
mod program;
mod qemu_faults;
mod qmp;
mod qsd;
pub mod schema;
mod scratch;
mod server;
mod terminal;
pub mod tls;
mod wait;
pub mod walkthrough;
pub mod wire;

pub use blk_client::{BlkClient, Completion, MEMORY_AT, Reply, Request, Segment, request};
pub use ceph::{Ceph, ObjectStore};
pub use deny::{run_program, run_without};
pub use firmware::{Firmware, boot_disk};
pub use fuse::can_mount;
pub use guest::{Boot, Guest};
pub use image::Image;
pub use initramfs::Initramfs;
pub use loop_device::{LoopDevice, LoopDevices};
pub use mounted::Mounted;
pub use port::Port;
pub use program::{
    client, daemon, install, preloaded, python, repository, tied_command, tool, words,
};
pub use qmp::{Qmp, merged};
pub use qsd::start_qsd;
pub use scratch::Scratch;
pub use server::{Server, ServerCommand};
pub use terminal::Terminal;
pub use wait::{PATIENCE, eventually};
