//! Guests without an operating system.

mod ahci;
mod ahci_cost;
mod ahci_image;
mod ahci_trace;
mod common;
mod kvm;
mod nvme;
mod virtio_blk;
mod wake_ups;

/// Counts allocations, for the tests of the data path.
#[global_allocator]
static ALLOCATOR: event_loop::counting::CountingAllocator = event_loop::counting::CountingAllocator;
