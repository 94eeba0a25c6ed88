//! Device models: what a guest's driver talks to, between a queue and a block node.
#![forbid(unsafe_code)]

pub mod ahci;
pub mod virtio;
pub mod virtio_blk;
pub mod virtio_scsi;
