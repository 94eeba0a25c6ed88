//! LUKS version 1: a header with up to eight passwords for one key.
//!
//! Source: "LUKS1 On-Disk Format Specification", version 1.2.3.

mod hash;
mod header;
mod keys;
mod stripes;

pub use hash::Hash;
pub use header::{HEADER_LEN, Header, HeaderError, SLOTS, Slot};
pub use keys::{AddError, NewVolume, VolumeKey, iterations_for};
pub use stripes::STRIPES;
