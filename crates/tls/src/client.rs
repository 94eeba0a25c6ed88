//! The client side: the server's certificate and name are verified, the client's certificate is shown.

use std::fmt;
use std::sync::{Arc, OnceLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    ResolvesClientCert, Resumption, UnbufferedClientConnection, WebPkiServerVerifier,
    verify_server_cert_signed_by_trust_anchor,
};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::credentials::{Endpoint, X509};
use crate::error::{CredentialsError, SessionError};
use crate::session::{Client, Session};

/// The name for rustls where no name is verified.
const NO_NAME: &str = "localhost";

/// Makes sessions with a server.
#[derive(Debug, Clone)]
pub struct Connector {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Connector {
    /// Returns a connector with these credentials, for a server of that name.
    ///
    /// `name` is a DNS name or an IP address, which the server's certificate must have as a subject alternative
    /// name. `None`: any certificate of the CA is accepted.
    ///
    /// # Errors
    ///
    /// The credentials are for a server, or the name is neither a DNS name nor an address.
    pub fn new(credentials: &X509, name: Option<&str>) -> Result<Self, CredentialsError> {
        if credentials.endpoint() != Endpoint::Client {
            let message = "Expected TLS credentials for a client endpoint";
            return Err(CredentialsError(message.into()));
        }
        let fail = |error: &dyn fmt::Display| CredentialsError(error.to_string());
        let parsed = ServerName::try_from(name.unwrap_or(NO_NAME).to_owned()).map_err(|error| {
            CredentialsError(format!("TLS hostname '{}': {error}", name.unwrap_or_default()))
        })?;
        let verifier = Verifier {
            certificates: match (credentials.verify_peer, name) {
                (false, _) => Certificates::Any,
                (true, None) => Certificates::OfAuthority(credentials.roots.clone()),
                (true, Some(_)) => {
                    let (roots, provider) =
                        (credentials.roots.clone(), credentials.provider.clone());
                    let built =
                        WebPkiServerVerifier::builder_with_provider(roots, provider).build();
                    Certificates::Named(built.map_err(|error| fail(&error))?)
                }
            },
            provider: credentials.provider.clone(),
        };
        let builder = ClientConfig::builder_with_provider(credentials.provider.clone());
        let builder =
            builder.with_safe_default_protocol_versions().map_err(|error| fail(&error))?;
        let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        let identities = Identities(credentials.identities.clone());
        let mut config = builder.with_client_cert_resolver(Arc::new(identities));
        // A resumed session would skip the verification of the certificate.
        config.resumption = Resumption::disabled();
        config.enable_sni = name.is_some();
        Ok(Connector { config: Arc::new(config), name: parsed })
    }

    /// Returns a session with a server that expects TLS from the next byte on.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers.
    pub fn session(&self) -> Result<Session<Client>, SessionError> {
        let connection = UnbufferedClientConnection::new(self.config.clone(), self.name.clone())?;
        Ok(Session::new(connection, Arc::new(OnceLock::new())))
    }
}

/// The client's certificates.
#[derive(Debug)]
struct Identities(Vec<Arc<CertifiedKey>>);

impl ResolvesClientCert for Identities {
    /// Returns the first certificate whose signature scheme the server supports.
    fn resolve(
        &self,
        _authorities: &[&[u8]],
        schemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        let fits = |identity: &&Arc<CertifiedKey>| identity.key.choose_scheme(schemes).is_some();
        self.0.iter().find(fits).cloned()
    }

    fn has_certs(&self) -> bool {
        !self.0.is_empty()
    }
}

/// Which certificates of a server are accepted.
#[derive(Debug)]
enum Certificates {
    /// `verify-peer=off`.
    Any,
    /// Those of the CA, whatever their name.
    OfAuthority(Arc<RootCertStore>),
    /// Those of the CA with the server's name.
    Named(Arc<WebPkiServerVerifier>),
}

#[derive(Debug)]
struct Verifier {
    certificates: Certificates,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match &self.certificates {
            Certificates::Any => Ok(ServerCertVerified::assertion()),
            Certificates::OfAuthority(roots) => {
                let certificate = ParsedCertificate::try_from(end_entity)?;
                let algorithms = self.provider.signature_verification_algorithms.all;
                verify_server_cert_signed_by_trust_anchor(
                    &certificate,
                    roots,
                    intermediates,
                    now,
                    algorithms,
                )?;
                Ok(ServerCertVerified::assertion())
            }
            Certificates::Named(verifier) => {
                verifier.verify_server_cert(end_entity, intermediates, name, ocsp, now)
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
