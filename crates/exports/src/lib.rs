//! Export protocols: how a block node is offered to virtual machines.
//!
//! [`vhost_user`]: virtio-blk over a unix socket, the guest's memory shared. [`nbd`]: network block
//! devices over unix and TCP sockets. [`fuse`]: files. [`ublk`] and [`vduse`]: block devices of the host.
//! [`vfio_user`]: PCI devices over a unix socket.
//!
//! [`serve`] has a node served by one call.

pub mod fuse;
mod message_socket;
pub mod nbd;
mod orders;
pub mod serve;
pub mod ublk;
pub mod vduse;
pub mod vfio_user;
pub mod vhost_user;
