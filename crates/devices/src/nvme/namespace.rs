//! What a controller and its namespaces are made of.

use std::sync::atomic::{AtomicU64, Ordering};

use block::node::Geometry;

use super::bits::BLOCK;

/// What a controller is made of.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Serial number; the first 20 characters count, those outside ASCII show as `?`.
    pub serial: String,
    /// Model; the first 40 characters count.
    pub model: String,
    /// What tells its subsystem and its namespaces from all others: a hash of it is in their identifiers.
    pub identity: String,
    /// I/O queues that a driver can have, 1 to [`MAX_IO_QUEUES`](super::MAX_IO_QUEUES).
    pub num_queues: u16,
    /// How the driver announces commands.
    pub doorbells: DoorbellMode,
    /// Whether the write cache is on after a reset. The guest may switch it.
    pub write_cache: bool,
    /// The namespaces, from number 1 on. At least one.
    pub namespaces: Vec<NamespaceConfig>,
}

/// How a driver announces commands to a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DoorbellMode {
    /// By register, or in memory where the driver tells of shadow doorbells.
    #[default]
    Auto,
    /// By register alone: shadow doorbells are not offered.
    Trapped,
    /// In a page of memory in the registers' place, which is not offered shadow doorbells either.
    Mapped,
}

/// What a namespace is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceConfig {
    /// Of the node behind it.
    pub geometry: Geometry,
    /// Whether the guest may write.
    pub writable: bool,
}

/// A namespace as its commands see it, from any thread.
#[derive(Debug)]
pub(crate) struct Namespace {
    /// Its size, bytes.
    size: AtomicU64,
    pub(crate) read_only: bool,
    pub(crate) physical_block_size: u32,
    pub(crate) discard_granularity: u32,
    pub(crate) has_discard: bool,
    pub(crate) has_write_cache: bool,
}

impl Namespace {
    pub(crate) fn new(config: &NamespaceConfig) -> Self {
        let NamespaceConfig { geometry, writable } = config;
        Namespace {
            size: AtomicU64::new(geometry.size),
            read_only: geometry.read_only || !writable,
            physical_block_size: geometry.physical_block_size,
            discard_granularity: geometry.discard_granularity,
            has_discard: geometry.discard,
            has_write_cache: geometry.write_cache,
        }
    }

    /// Its size in blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.size.load(Ordering::Relaxed) / BLOCK
    }

    /// Gives it another size, in bytes. `false`: it has that size.
    pub(crate) fn resize(&self, size: u64) -> bool {
        self.size.swap(size, Ordering::Relaxed) / BLOCK != size / BLOCK
    }
}
