//! TLS with QEMU's credentials: from bytes to bytes, without I/O.
//!
//! - [`X509`]: the files of a `tls-creds-x509` object.
//! - [`Authorization`]: the clients that an `authz-*` object allows.
//! - [`Acceptor`]: makes a [`Session`] per client from both.
//! - [`Session`]: ciphertext in, plaintext out, and the other way round. Its memory is bounded.
//!
//! rustls implements the protocol, with the cryptography of ring.

#![forbid(unsafe_code)]

mod authorization;
mod credentials;
mod error;
mod key;
mod name;
mod sanity;
mod server;
mod session;

pub use authorization::{Authorization, Format, Policy, Rule};
pub use credentials::{Endpoint, X509, X509Files};
pub use error::{CredentialsError, SessionError};
pub use server::Acceptor;
pub use session::{MAX_EXPANSION, MAX_PLAIN, Progress, Session};
