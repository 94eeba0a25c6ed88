//! The name of a certificate's owner.

use x509_cert::Certificate;
use x509_cert::der::Decode;

/// The subject's distinguished name as QEMU has it: RFC 4514's strings, in the certificate's own order
/// (`C=GB,O=Example,CN=host1`). `None`: it cannot be read.
pub(crate) fn distinguished_name(certificate: &[u8]) -> Option<String> {
    let certificate = Certificate::from_der(certificate).ok()?;
    let parts = certificate.tbs_certificate.subject.0.iter().map(|part| part.to_string());
    Some(parts.collect::<Vec<_>>().join(","))
}
