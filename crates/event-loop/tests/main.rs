//! The loop's contract.

mod alloc;
mod common;
mod engines;
mod fairness;
mod foreign;
#[cfg(feature = "glib")]
mod glib;
mod ladder;
mod memory;
mod new_loops;
mod outside;
mod poll_policies;
mod polling;
mod properties;
mod ring;
mod sim;
mod simulation;
mod smoke;
mod sockets;
mod stop;
mod stress;
mod tasks;
#[cfg(feature = "tokio")]
mod tokio;
mod transfer;
mod wake;

/// Counts allocations, for the tests of the data path.
#[global_allocator]
static ALLOCATOR: event_loop::counting::CountingAllocator = event_loop::counting::CountingAllocator;
