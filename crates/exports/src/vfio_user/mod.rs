//! vfio-user: the server's side of the protocol by which a VMM has a PCI device emulated by another process.
//!
//! From the socket inwards: [`wire`] makes typed messages of bytes, [`session`] answers them or says what
//! is to be done, `server` does that and ties it to sockets. `memory` keeps the guest's memory, as the
//! client shares it; [`interrupts`] signals. What the device is, is behind [`device::Device`]; `ahci` and `nvme` put
//! controllers there, and [`VfioUserExport`] is one with its server.
//!
//! The server is a task on the control loop, as that of vhost-user is: registers are read and written there,
//! requests are carried out on the I/O threads.

mod ahci;
mod connection;
pub mod device;
mod error;
mod export;
mod hand_over;
pub mod interrupts;
pub mod memory;
mod nvme;
mod server;
pub mod session;
pub mod wire;

pub use devices::nvme::DoorbellMode;
pub use export::{VfioUserConfig, VfioUserExport};
pub use hand_over::SavedClient;
