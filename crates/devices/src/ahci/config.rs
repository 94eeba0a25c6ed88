//! What a controller and its drives are made of.

use std::fmt;

use block::node::Geometry;

use super::ata::SECTOR;
use super::regs::MAX_PORTS;

/// What a drive is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveConfig {
    /// Of the node behind it.
    pub geometry: Geometry,
    /// Whether the guest may write.
    pub writable: bool,
    /// Whether the write cache is on after a reset. The guest may switch it.
    pub write_cache: bool,
    /// Serial number; the first 20 characters count, those outside ASCII show as `?`.
    pub serial: String,
    /// Model; the first 40 characters count.
    pub model: String,
}

/// A drive as its commands see it.
#[derive(Debug)]
pub(crate) struct DriveInfo {
    pub(crate) sectors: u64,
    pub(crate) physical_block_size: u32,
    pub(crate) read_only: bool,
    pub(crate) write_cache: bool,
    pub(crate) serial: String,
    pub(crate) model: String,
}

/// Sectors that 48-bit addresses reach.
const MAX_SECTORS: u64 = 1 << 48;

impl DriveInfo {
    pub(crate) fn new(config: DriveConfig) -> Self {
        let DriveConfig { geometry, writable, write_cache, serial, model } = config;
        DriveInfo {
            sectors: (geometry.size / SECTOR).min(MAX_SECTORS),
            physical_block_size: geometry.physical_block_size,
            read_only: geometry.read_only || !writable,
            write_cache,
            serial,
            model,
        }
    }
}

/// A controller that cannot be, or a drive that cannot be attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AhciError {
    /// A controller has 1 to 32 ports.
    Ports(usize),
    /// There is no port of this number.
    NoSuchPort(usize),
    /// The port of this number has a drive.
    PortInUse(usize),
}

impl fmt::Display for AhciError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AhciError::Ports(ports) => {
                write!(f, "an AHCI controller has 1 to {MAX_PORTS} ports, not {ports}")
            }
            AhciError::NoSuchPort(port) => write!(f, "the AHCI controller has no port {port}"),
            AhciError::PortInUse(port) => write!(f, "AHCI port {port} has a drive already"),
        }
    }
}

impl std::error::Error for AhciError {}
