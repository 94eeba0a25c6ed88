//! The AHCI controller, at both ends: the driver is `vcpu::ahci`, the disk the test's own.

mod commands;
mod durability;
mod errors;
mod interrupts;
mod model;
mod order;
mod registers;
mod resets;
mod rig;
mod saved;
mod threads;
