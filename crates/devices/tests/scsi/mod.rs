//! virtio-scsi with a driver of ours at the other end: what each command returns, byte by byte, and
//! what it does.

mod answers;
mod durability;
mod model;
mod requests;
pub(crate) mod rig;
mod tasks;
