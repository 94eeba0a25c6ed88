//! Secrets, LUKS headers and keys, encryption of disk sectors, signatures of requests. No I/O.

#![forbid(unsafe_code)]

pub mod cipher;
pub mod luks;
pub mod secret;
pub mod sigv4;

pub use zeroize::Zeroizing;

/// Bytes that are erased when they are dropped.
pub type Secret = Zeroizing<Vec<u8>>;
