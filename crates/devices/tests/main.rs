//! The device models.

mod durability;
mod ended_loop;
mod hot_path;
mod lost_memory;
mod nvme;
mod nvme_hot_path;
mod nvme_trace;
mod requests;
mod rig;
mod scsi;
mod scsi_hot_path;
mod scsi_trace;

/// Counts allocations, for the tests of the data path.
#[global_allocator]
static ALLOCATOR: event_loop::counting::CountingAllocator = event_loop::counting::CountingAllocator;
