//! The subject of a certificate.

use x509_cert::Certificate;
use x509_cert::der::Decode;

/// Returns the subject's distinguished name as QEMU formats it: strings of RFC 4514, in the order of the
/// certificate (`C=GB,O=Example,CN=host1`). `None`: the certificate cannot be parsed.
pub(crate) fn distinguished_name(certificate: &[u8]) -> Option<String> {
    let certificate = Certificate::from_der(certificate).ok()?;
    let parts = certificate.tbs_certificate.subject.0.iter().map(|part| part.to_string());
    Some(parts.collect::<Vec<_>>().join(","))
}
