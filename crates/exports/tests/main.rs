//! The protocols' servers.

mod common;
mod descriptors;
mod dirty_log;
mod front_end;
mod fuse;
mod hand_over;
mod max_memory;
mod nbd_session;
mod nbd_transmission;
mod nbd_turns;
mod qemu_versions;
mod reconnect;
mod recordings;
mod resets;
mod resize;
mod server;
mod session;
mod vfio_user;
mod wire;

/// Counts allocations, for the tests of the data path.
#[global_allocator]
static ALLOCATOR: event_loop::counting::CountingAllocator = event_loop::counting::CountingAllocator;
