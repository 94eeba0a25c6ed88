//! An AHCI controller with SATA drives, for guests without virtio drivers (AHCI 1.3.1, SATA 3.x, ATA8-ACS).
//!
//! A virtqueue's kick is an eventfd; an AHCI doorbell is a register. The vCPU's thread writes it under the
//! machine lock and handles the write inline. [`Ahci`] is that side: registers, reading of commands, the
//! interrupt line. Any thread may call it. [`Drive`] is the other side, on the loop of the port's image. It
//! begins commands, sends requests down the node's channel, and publishes a batch of answers with one update of
//! registers and line. Queueing a command notifies the drive's loop (wake-up contract), so no request waits for an
//! unrelated wake-up.

mod ata;
mod command;
mod config;
mod controller;
mod drive;
mod finish;
mod fis;
mod identify;
mod line;
mod port;
mod probes;
mod regs;
mod saved;
mod trim;

pub use config::{AhciError, DriveConfig};
pub use controller::{Ahci, AhciStats};
pub use drive::Drive;
pub use regs::{ABAR_SIZE, MAX_PORTS};
pub use saved::Restored;
