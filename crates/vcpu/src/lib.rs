//! Guests without an operating system, for tests and benchmarks: device models run on an I/O thread
//! as they do in the daemon, and a driver of ours plays the guest at the other end.
//!
//! - [`machine`]: guest memory, I/O threads and a block node, in this process;
//! - [`virtio_blk`]: a virtio-blk device on the I/O threads, and its driver;
//! - [`ahci`]: an AHCI controller on the I/O threads, and the driver of a port;
//! - [`load`]: that driver under load, queue depth N, one or more queues.

pub mod ahci;
pub mod load;
pub mod machine;
pub mod virtio_blk;
