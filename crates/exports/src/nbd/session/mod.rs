//! What client and server have agreed on, and what follows from it: pure, without I/O.

pub mod handshake;
pub mod transmission;
