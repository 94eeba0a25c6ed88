//! The server side: ciphers, certificates and the authorization of clients.

use std::fmt;
use std::sync::{Arc, OnceLock};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite, default_provider};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ResolvesServerCert, UnbufferedServerConnection,
    WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};

use crate::authorization::Authorization;
use crate::credentials::{Endpoint, X509};
use crate::error::{CredentialsError, SessionError};
use crate::name::distinguished_name;
use crate::session::Session;

/// Cipher suites, the preferred one first.
///
/// A key of AES-GCM is good for 2^24 records. TLS 1.3 then changes the key; TLS 1.2 would have to end the
/// connection. So TLS 1.2 prefers ChaCha20, which has no such limit.
pub(crate) fn provider() -> CryptoProvider {
    let cipher_suites = vec![
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        cipher_suite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
        cipher_suite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
        cipher_suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
        cipher_suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
        cipher_suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
        cipher_suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    ];
    CryptoProvider { cipher_suites, ..default_provider() }
}

/// Makes a session per client.
#[derive(Debug, Clone)]
pub struct Acceptor {
    provider: Arc<CryptoProvider>,
    identities: Arc<Identities>,
    /// `None`: clients need no certificate.
    verifier: Option<Arc<dyn ClientCertVerifier>>,
    /// Which clients with a valid certificate are allowed. `None`: all.
    authorization: Option<Arc<Authorization>>,
}

impl Acceptor {
    /// Returns an acceptor with these credentials.
    ///
    /// It accepts the clients that `authorization` allows.
    ///
    /// # Errors
    ///
    /// The credentials are for a client; or they have no CA to verify clients with; or an authorization is given
    /// while clients need no certificate.
    pub fn new(
        credentials: &X509,
        authorization: Option<Arc<Authorization>>,
    ) -> Result<Self, CredentialsError> {
        if credentials.endpoint() != Endpoint::Server {
            let message = "Expected TLS credentials for a server endpoint";
            return Err(CredentialsError(message.into()));
        }
        let verifier = match credentials.verify_peer {
            true => {
                let (roots, provider) = (credentials.roots.clone(), credentials.provider.clone());
                let builder = WebPkiClientVerifier::builder_with_provider(roots, provider);
                // A client that learns the accepted authorities withholds a certificate of another one,
                // and the log could not say what is wrong with that certificate.
                let builder = builder.clear_root_hint_subjects();
                let mut builder = builder.with_crls(credentials.revoked.iter().cloned());
                if !credentials.revoked.is_empty() {
                    // Revocation lists usually cover some of the authorities only.
                    builder = builder.allow_unknown_revocation_status();
                }
                let built = builder.build();
                Some(built.map_err(|error| CredentialsError(format!("verify-peer: {error}")))?)
            }
            false if authorization.is_some() => {
                let message = "Authorization needs credentials with verify-peer=on: without, clients \
                               have no certificates, so no names";
                return Err(CredentialsError(message.into()));
            }
            false => None,
        };
        let identities = Arc::new(Identities(credentials.identities.clone()));
        let provider = credentials.provider.clone();
        Ok(Acceptor { provider, identities, verifier, authorization })
    }

    /// Returns a session for a client whose next byte belongs to TLS.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers.
    pub fn session(&self) -> Result<Session, SessionError> {
        let refused = Arc::new(OnceLock::new());
        let builder = ServerConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_safe_default_protocol_versions()?;
        let builder = match &self.verifier {
            None => builder.with_no_client_auth(),
            Some(certificates) => builder.with_client_cert_verifier(Arc::new(Verifier {
                certificates: certificates.clone(),
                authorization: self.authorization.clone(),
                refused: refused.clone(),
            })),
        };
        let mut config = builder.with_cert_resolver(self.identities.clone());
        config.ignore_client_order = true;
        // A resumed session would skip the verification of the certificate.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Session::new(UnbufferedServerConnection::new(Arc::new(config))?, refused))
    }
}

/// The server's certificates.
#[derive(Debug)]
struct Identities(Vec<Arc<CertifiedKey>>);

impl ResolvesServerCert for Identities {
    /// Returns the first certificate whose signature scheme the client supports.
    fn resolve(&self, client: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let fits = |identity: &&Arc<CertifiedKey>| {
            identity.key.choose_scheme(client.signature_schemes()).is_some()
        };
        self.0.iter().find(fits).cloned()
    }
}

/// Verifies a client's certificate, then its name.
struct Verifier {
    certificates: Arc<dyn ClientCertVerifier>,
    authorization: Option<Arc<Authorization>>,
    /// Receives the name of a denied client.
    refused: Arc<OnceLock<String>>,
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.certificates.fmt(f)
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.certificates.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.certificates.verify_client_cert(end_entity, intermediates, now)?;
        if let Some(authorization) = &self.authorization {
            let name = distinguished_name(end_entity).ok_or(CertificateError::BadEncoding)?;
            if !authorization.allows(&name) {
                let _ = self.refused.set(name);
                // The client gets the alert "access denied".
                return Err(CertificateError::ApplicationVerificationFailure.into());
            }
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.certificates.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.certificates.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.certificates.supported_verify_schemes()
    }
}
