//! vhost-user: the back end's side of the protocol by which a VMM shares a guest's memory and
//! queues with a process that plays the device.
//!
//! From the socket inwards: [`wire`] makes typed messages of bytes, [`session`] knows what was
//! agreed on and says what is to be done, `backend` and `worker` do it on the I/O threads (`pinning`
//! and `pin` for memory that is to be pinned, `inflight` for the memory that outlives us), `server` ties them to sockets. What the device is, is
//! behind [`device::Device`]; `blk` and `scsi` put virtio-blk and virtio-scsi there, and make a
//! [`VhostUserExport`] of them.
//!
//! The server is a task on the control loop, not a thread per connection: a front end that sends
//! half a message is waited for, at the cost of a buffer. Only of what `descriptors` a message has
//! may have to be found out on a thread.

mod backend;
mod backend_channel;
pub(crate) mod blk;
mod connection;
pub(crate) mod descriptors;
pub mod device;
mod error;
mod eventfd;
pub(crate) mod export;
pub mod fd_passing;
pub mod handover;
pub(crate) mod inflight;
pub(crate) mod listener;
mod migration_log;
mod orders;
mod pin;
mod pinning;
mod scsi;
mod server;
pub mod session;
pub mod wire;
pub(crate) mod worker;

pub use error::{ExportError, SessionError};
pub use eventfd::{EventFd, NotEventfd};
pub use export::{VhostUserConfig, VhostUserExport};
pub use listener::{Listen, Listener};
pub use orders::{HandOver, TakenOver};
pub use scsi::MAX_REQUEST_QUEUES;
pub use server::{MAX_QUEUES, Server};
