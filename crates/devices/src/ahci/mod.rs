//! An AHCI controller with SATA drives: what a driver without virtio talks to (AHCI 1.3.1, SATA 3.x,
//! ATA8-ACS).
//!
//! Unlike a queue that is kicked by an eventfd, a doorbell here is a register: the vCPU's thread
//! writes it under the machine lock and handles it inline. [`Ahci`] is that side: registers, the
//! reading of commands, the interrupt line; any thread may call it. [`Drive`] is the other side, on
//! the loop of the port's image: it begins commands, sends requests down the node's channel, and
//! publishes a batch of answers with one update of registers and line. What is queued for a drive
//! notifies its loop (contract E1), so no request waits for an unrelated wake-up.

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
mod regs;
mod trim;

pub use config::{AhciError, DriveConfig};
pub use controller::{Ahci, AhciStats};
pub use drive::Drive;
pub use regs::ABAR_SIZE;
