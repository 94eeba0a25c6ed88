//! NBD: the server's side of the network block device protocol.
//!
//! From the socket inwards: [`wire`], a crate shared with the client, makes typed messages of bytes,
//! [`session`] knows what was agreed on and says what a request means, both without I/O. `server` and
//! `handshake` are tasks on the control loop; once a client has chosen an export its socket goes to
//! one of the export's I/O threads, where `connection` carries requests from the socket's receives
//! down the node's channel and the replies back; `secure` decrypts and encrypts them where TLS was begun. `state`, `slots` and `arena` are what it keeps for
//! that: all of a connection's memory, which is bounded.

#![forbid(unsafe_code)]

mod arena;
mod connection;
mod extents;
mod handshake;
mod holes;
mod listener;
mod origins;
mod probes;
mod server;
pub mod session;
mod slots;
mod state;
mod turns;
mod worker;

pub use connection::SavedClient;
pub use listener::NbdListen;
pub use nbd_wire as wire;
pub use server::{NbdExport, NbdExportConfig, NbdServer, NbdServerConfig};
