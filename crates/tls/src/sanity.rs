//! `sanity-check`: refuses certificates at opening that every peer would reject.

use std::path::Path;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage};
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::BasicConstraints;

use crate::credentials::Endpoint;
use crate::error::CredentialsError;
use crate::name::distinguished_name;

/// Checks that a certificate is that of an authority, and valid now.
pub(crate) fn check_authority(
    certificate: &CertificateDer<'_>,
    path: &Path,
) -> Result<(), CredentialsError> {
    let path = path.display();
    let refused = |why: String| Err(CredentialsError(why));
    let parsed = match Certificate::from_der(certificate) {
        Ok(parsed) => parsed.tbs_certificate,
        Err(error) => return refused(format!("Unable to import CA certificate {path}: {error}")),
    };
    let now = UnixTime::now().as_secs();
    if parsed.validity.not_after.to_unix_duration().as_secs() < now {
        return refused(format!("The CA certificate {path} has expired"));
    }
    if parsed.validity.not_before.to_unix_duration().as_secs() > now {
        return refused(format!("The CA certificate {path} is not yet active"));
    }
    match parsed.get::<BasicConstraints>() {
        Ok(Some((_, constraints))) if constraints.ca => Ok(()),
        _ => refused(format!("The certificate {path} basic constraints do not show a CA")),
    }
}

/// Checks that the peer would accept a certificate now.
pub(crate) fn check_identity(
    provider: &CryptoProvider,
    chain: &[CertificateDer<'_>],
    roots: &RootCertStore,
    endpoint: Endpoint,
    path: &Path,
) -> Result<(), CredentialsError> {
    let Some((own, intermediates)) = chain.split_first() else { return Ok(()) };
    let usage = match endpoint {
        Endpoint::Client => KeyUsage::client_auth(),
        Endpoint::Server => KeyUsage::server_auth(),
    };
    let checked = EndEntityCert::try_from(own).and_then(|certificate| {
        let algorithms = provider.signature_verification_algorithms.all;
        let (roots, now) = (&roots.roots, UnixTime::now());
        let verified =
            certificate.verify_for_usage(algorithms, roots, intermediates, now, usage, None, None);
        verified.map(drop)
    });
    let (side, path) = (endpoint.name(), path.display());
    let why = match checked {
        Ok(()) => return Ok(()),
        Err(webpki::Error::CertExpired { .. }) => {
            format!("The {side} certificate {path} has expired")
        }
        Err(webpki::Error::CertNotValidYet { .. }) => {
            format!("The {side} certificate {path} is not yet active")
        }
        Err(webpki::Error::CaUsedAsEndEntity) => format!(
            "The certificate {path} basic constraints show a CA, but we need one for a {side}"
        ),
        Err(webpki::Error::UnknownIssuer) => {
            let name = distinguished_name(own).unwrap_or_default();
            format!("Cert '{name}' has no issuer in CA chain")
        }
        Err(webpki::Error::InvalidSignatureForPublicKey) => {
            format!("The {side} certificate {path} is not signed by ca-cert.pem")
        }
        Err(error) => format!("The {side} certificate {path} would not be taken: {error}"),
    };
    Err(CredentialsError(why))
}
