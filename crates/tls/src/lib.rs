//! TLS with QEMU's credentials: from bytes to bytes, without I/O.
//!
//! - [`X509`]: the files of a `tls-creds-x509` object.
//! - [`Authorization`]: the clients that an `authz-*` object allows.
//! - [`Acceptor`]: makes a [`Session`] per client from both.
//! - [`Connector`]: makes a [`Session`] with a server.
//! - [`Session`]: converts between ciphertext and plaintext in both directions. Its memory is bounded.
//! - [`Secure`]: a session between the memory of a socket's operations and that of a protocol.
//!
//! rustls implements the protocol, with the cryptography of ring.

#![forbid(unsafe_code)]

mod authorization;
mod client;
mod credentials;
mod error;
mod key;
mod name;
mod sanity;
mod secure;
mod server;
mod session;

pub use authorization::{Authorization, Format, Policy, Rule};
pub use client::Connector;
pub use credentials::{Endpoint, X509, X509Files};
pub use error::{CredentialsError, SessionError};
pub use secure::{Secure, Sink};
pub use server::Acceptor;
pub use session::{Client, MAX_EXPANSION, MAX_PLAIN, Progress, Server, Session, Side};
