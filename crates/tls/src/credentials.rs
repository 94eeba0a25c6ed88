//! `tls-creds-x509`: certificates and keys, from the files of a folder.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use rustls::sign::CertifiedKey;

use crate::error::CredentialsError;
use crate::{sanity, server};

/// The side of a connection that credentials are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// The side that connects.
    Client,
    /// The side that accepts.
    Server,
}

impl Endpoint {
    /// Returns the word in file names and messages.
    pub fn name(self) -> &'static str {
        match self {
            Endpoint::Client => "client",
            Endpoint::Server => "server",
        }
    }
}

/// The options of a `tls-creds-x509` object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct X509Files {
    /// `dir`: the folder of `ca-cert.pem`, `ca-crl.pem`, `server-cert.pem` and `server-key.pem`, or of
    /// `client-cert.pem` and `client-key.pem`. Further identities have an index from 0 to 3.
    pub dir: PathBuf,
    /// `endpoint`.
    pub endpoint: Endpoint,
    /// `verify-peer`: the other side needs a certificate of the CA.
    pub verify_peer: bool,
    /// `sanity-check`: refuses certificates at opening that every peer would reject.
    pub sanity_check: bool,
}

/// Credentials that were read and checked.
#[derive(Debug, Clone)]
pub struct X509 {
    pub(crate) provider: Arc<CryptoProvider>,
    endpoint: Endpoint,
    pub(crate) verify_peer: bool,
    pub(crate) roots: Arc<RootCertStore>,
    pub(crate) revoked: Vec<CertificateRevocationListDer<'static>>,
    /// Certificates with keys, the preferred one first.
    pub(crate) identities: Vec<Arc<CertifiedKey>>,
}

/// The most identities with an index.
const INDEXED: u32 = 4;

impl X509 {
    /// Reads the files. `password` decrypts encrypted keys.
    ///
    /// # Errors
    ///
    /// A file is missing or cannot be used; the error names the file.
    pub fn load(files: &X509Files, password: Option<&[u8]>) -> Result<Self, CredentialsError> {
        let provider = Arc::new(server::provider());
        let side = files.endpoint.name();
        let ca = files.dir.join("ca-cert.pem");
        let authorities = certificates(&ca)?;
        let mut roots = RootCertStore::empty();
        for certificate in &authorities {
            if files.sanity_check {
                sanity::check_authority(certificate, &ca)?;
            }
            let added = roots.add(certificate.clone());
            added.map_err(|error| fail("Unable to import CA certificate", &ca, error))?;
        }
        let crl = files.dir.join("ca-crl.pem");
        let revoked = match files.endpoint == Endpoint::Server && crl.exists() {
            true => revoked(&crl)?,
            false => Vec::new(),
        };
        let path = |what: &str, index: Option<u32>| {
            let index = index.map(|index| format!("-{index}")).unwrap_or_default();
            files.dir.join(format!("{side}-{what}{index}.pem"))
        };
        let mut identities = Vec::new();
        for index in std::iter::once(None).chain((0..INDEXED).map(Some)) {
            let (cert, key) = (path("cert", index), path("key", index));
            match (cert.exists(), key.exists()) {
                (true, true) => {
                    let chain = certificates(&cert)?;
                    if files.sanity_check {
                        sanity::check_identity(&provider, &chain, &roots, files.endpoint, &cert)?;
                    }
                    identities.push(Arc::new(identity(&provider, chain, &cert, &key, password)?));
                }
                (true, false) => {
                    let (cert, key) = (cert.display(), key.display());
                    let message = format!("Cert '{cert}' without corresponding key '{key}'");
                    return Err(CredentialsError(message));
                }
                (false, true) => {
                    let (cert, key) = (cert.display(), key.display());
                    let message = format!("Key '{key}' without corresponding cert '{cert}'");
                    return Err(CredentialsError(message));
                }
                (false, false) if index.is_none() => {}
                (false, false) => break,
            }
        }
        if identities.is_empty() && files.endpoint == Endpoint::Server {
            let (cert, key) = (path("cert", None), path("key", None));
            let (cert, key) = (cert.display(), key.display());
            return Err(CredentialsError(format!("Missing server cert '{cert}' & key '{key}'")));
        }
        Ok(X509 {
            provider,
            endpoint: files.endpoint,
            verify_peer: files.verify_peer,
            roots: Arc::new(roots),
            revoked,
            identities,
        })
    }

    /// Returns the side that the credentials are for.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// Returns whether the peer needs a certificate of the CA.
    pub fn verify_peer(&self) -> bool {
        self.verify_peer
    }
}

/// The certificates of a file, at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let text = read(path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match all {
        Ok(all) if all.is_empty() => {
            Err(fail("Unable to import certificate", path, "No certificate was found."))
        }
        Ok(all) => Ok(all),
        Err(error) => Err(fail("Unable to import certificate", path, error)),
    }
}

fn revoked(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, CredentialsError> {
    let text = read(path)?;
    let all: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&text).collect();
    match all {
        // An empty file is an error, not an empty revocation list.
        Ok(all) if all.is_empty() => Err(CredentialsError(format!(
            "Cannot load CRL '{}': no revocation list was found",
            path.display()
        ))),
        Ok(all) => Ok(all),
        Err(error) => {
            Err(CredentialsError(format!("Cannot load CRL '{}': {error}", path.display())))
        }
    }
}

fn identity(
    provider: &CryptoProvider,
    chain: Vec<CertificateDer<'static>>,
    cert: &Path,
    key: &Path,
    password: Option<&[u8]>,
) -> Result<CertifiedKey, CredentialsError> {
    let refused = |why: &dyn Display| {
        let (cert, key) = (cert.display(), key.display());
        CredentialsError(format!("Cannot set certificate '{cert}' & key '{key}': {why}"))
    };
    let text = read(key)?;
    let key = crate::key::read(&text, password).map_err(|error| refused(&error))?;
    let why_refused = crate::key::why_refused(&key);
    let key = provider.key_provider.load_private_key(key).map_err(|error| match why_refused {
        Some(why) => refused(&why),
        None => refused(&error),
    })?;
    let certified = CertifiedKey::new(chain, key);
    match certified.keys_match() {
        // Some kinds of keys do not give their public half. Clients then detect a mismatch.
        Ok(()) | Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => {
            Ok(certified)
        }
        Err(rustls::Error::InconsistentKeys(_)) => {
            Err(refused(&"The certificate and the given key do not match."))
        }
        Err(error) => Err(refused(&error)),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CredentialsError> {
    fs::read(path).map_err(|error| {
        let errno = error.to_string();
        // QEMU's message has no errno.
        let why = errno.split(" (os error").next().unwrap_or(&errno);
        fail("Unable to access credentials", path, why)
    })
}

fn fail(what: &str, path: &Path, why: impl Display) -> CredentialsError {
    CredentialsError(format!("{what} {}: {why}", path.display()))
}
