//! Device models: what a guest's driver talks to, between a queue and a block node.
#![forbid(unsafe_code)]

pub mod ahci;
pub mod nvme;
pub mod pci;
pub mod saved;
pub mod virtio;
pub mod virtio_blk;
pub mod virtio_scsi;

/// A device's name in trace points, without what a zero byte cuts off.
fn trace_name(mut name: String) -> std::ffi::CString {
    name.truncate(name.find('\0').unwrap_or(name.len()));
    std::ffi::CString::new(name).unwrap_or_default()
}
