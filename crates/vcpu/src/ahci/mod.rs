//! An AHCI controller on the machine's I/O threads, and the driver's side of its ports.
//!
//! The driver runs on the thread that plays the vCPU: its register accesses are calls of the device
//! model, as they are in a VMM.

pub mod ata;
mod device;
mod driver;
mod layout;
pub mod reg;

pub use device::{AhciDevice, Controller, Line};
pub use driver::{Failure, PortDriver, Registers};
pub use layout::{Command, LBA, PortArea};
