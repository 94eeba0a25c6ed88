//! Errors of credentials and sessions.

use std::fmt;

use rustls::{CertificateError, Error};

/// Credentials that cannot be used: which file, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialsError(pub(crate) String);

impl fmt::Display for CredentialsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CredentialsError {}

/// Why a session has failed.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionError {
    /// The client has a valid certificate, but the authorization denies its name.
    NotAuthorized {
        /// The name of the client.
        name: String,
    },
    /// A handshake message exceeds the limit of its length.
    TooLong,
    /// The peer violated the protocol, or its certificate is invalid.
    Protocol(Error),
    /// The keys have reached their limit, and TLS 1.2 cannot change them.
    KeysExhausted,
}

impl fmt::Display for SessionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SessionError::NotAuthorized { name } => write!(f, "client '{name}' is not authorized"),
            SessionError::TooLong => f.write_str("a handshake message is too long"),
            SessionError::Protocol(Error::NoCertificatesPresented) => {
                f.write_str("the peer has shown no certificate")
            }
            SessionError::Protocol(Error::InvalidCertificate(why)) => match why {
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    f.write_str("the peer's certificate has expired")
                }
                CertificateError::UnknownIssuer => {
                    f.write_str("the peer's certificate is of no CA that is known")
                }
                CertificateError::Revoked => f.write_str("the peer's certificate is revoked"),
                why => write!(f, "the peer's certificate is bad: {why}"),
            },
            SessionError::Protocol(error) => write!(f, "{error}"),
            SessionError::KeysExhausted => {
                f.write_str("as much was sent as may be with one key; TLS 1.3 would take a new one")
            }
        }
    }
}

impl std::error::Error for SessionError {}

impl SessionError {
    /// Returns a fixed text for the error.
    pub fn reason(&self) -> &'static str {
        match self {
            SessionError::NotAuthorized { .. } => "the client is not authorized",
            SessionError::TooLong => "a handshake message is too long",
            SessionError::KeysExhausted => "as much was sent as may be with one key in TLS 1.2",
            SessionError::Protocol(Error::DecryptError) => "a record could not be decrypted",
            SessionError::Protocol(Error::AlertReceived(_)) => {
                "the peer ended the session by an alert"
            }
            SessionError::Protocol(Error::PeerSentOversizedRecord) => "a record is too long",
            SessionError::Protocol(_) => "the peer broke its rules",
        }
    }
}

impl From<Error> for SessionError {
    fn from(error: Error) -> Self {
        SessionError::Protocol(error)
    }
}
