//! The block layer: drivers, the graph, power cuts.

mod alloc;
mod apart;
mod blkdebug;
mod capabilities;
mod claims;
mod common;
mod faults;
mod file;
mod graph;
mod http;
mod inactive;
mod interrupted;
mod keep_raw;
mod locks;
mod merge;
mod model;
mod nbd;
mod nbd_reconnect;
mod policy;
mod power;
mod qcow2;
mod registry;
mod s3;
mod throttle;

/// Counts allocations, for the tests of the data path.
#[global_allocator]
static ALLOCATOR: event_loop::counting::CountingAllocator = event_loop::counting::CountingAllocator;
