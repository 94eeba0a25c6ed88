//! The PCI face of a controller: its configuration space (PCI Local Bus 3.0, chapter 6), without I/O.
//!
//! A [`Description`] says what the function is. [`ConfigSpace`] is made of it: bytes, and which of their
//! bits software may change. The registers behind the BARs belong to the device model.

mod config_space;
mod description;

pub use config_space::{CONFIG_SPACE_SIZE, ConfigSpace};
pub use description::{
    BARS, Bar, Description, FunctionReset, Identity, InterruptPin, Msi, MsiX, VendorRegister,
};
