//! Split virtqueues.

mod allocations;
mod common;
mod hostile;
mod inflight;
mod notification;
mod oracle;
mod queue;
mod quirks;
mod speed;

/// Counts allocations, for the tests of the data path.
#[global_allocator]
static ALLOCATOR: event_loop::counting::CountingAllocator = event_loop::counting::CountingAllocator;
