//! TLS with QEMU's credentials: from bytes to bytes, without I/O.
//!
//! [`X509`] is what a `tls-creds-x509` object has read from its folder, [`Authorization`] whom an
//! `authz-*` object lets in. Of both an [`Acceptor`] makes a [`Session`] for each client: ciphertext
//! goes in and plaintext comes out, and the other way round. All of a session's memory is bounded.
//! The protocol is rustls', with ring's cryptography.

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
