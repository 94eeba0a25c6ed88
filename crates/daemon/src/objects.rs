//! The objects that are not I/O threads: what TLS is served with, and whom.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use block::Credentials;
use control::{
    EncryptedBy, NbdServerOptions, ObjectOptions, SecretFormat, SecretOptions, SecretSource,
};
use crypto::Secret;
use crypto::secret::{self, SecretError};
use tls::{Acceptor, Authorization, X509};

use super::DaemonError;
use crate::errno::words;

/// What an object has become.
enum Made {
    Credentials(X509),
    Authorization(Arc<Authorization>),
    /// The nodes' credentials have it.
    Secret,
}

/// Reads a secret.
fn load(options: &SecretOptions, others: &Credentials) -> Result<Secret, DaemonError> {
    let refused = |error: SecretError| DaemonError::new(error);
    let given = match &options.source {
        SecretSource::Data(data) => Secret::new(data.as_bytes().to_vec()),
        SecretSource::File(path) => fs::read(path).map(Secret::new).map_err(|error| {
            DaemonError::new(format!("Unable to read {}: {}", path.display(), words(&error)))
        })?,
    };
    let decoded = match options.format {
        SecretFormat::Raw => given,
        SecretFormat::Base64 => secret::base64(&given).map_err(refused)?,
    };
    match &options.encrypted {
        None => Ok(decoded),
        Some(EncryptedBy { keyid, iv }) => {
            let key = others.secret(keyid)?;
            secret::decrypt(&decoded, &key, iv).map_err(refused)
        }
    }
}

/// The objects, by id.
#[derive(Default)]
pub(super) struct Objects(BTreeMap<String, (&'static str, Made)>);

impl Objects {
    /// Makes an object. TLS credentials are for nodes too.
    pub(super) fn add(
        &mut self,
        options: &ObjectOptions,
        for_nodes: &mut Credentials,
    ) -> Result<(), DaemonError> {
        let made = match options {
            ObjectOptions::TlsCreds(creds) => {
                let loaded = X509::load(&creds.files, None).map_err(DaemonError::new)?;
                for_nodes.add(&creds.id, loaded.clone());
                Made::Credentials(loaded)
            }
            ObjectOptions::Secret(secret) => {
                for_nodes.add_secret(&secret.id, load(secret, for_nodes)?);
                Made::Secret
            }
            ObjectOptions::Authz(authz) => {
                Made::Authorization(Arc::new(authz.authorization.clone()))
            }
            // Those have a place of their own.
            ObjectOptions::Iothread(_) | ObjectOptions::ThrottleGroup(_) => return Ok(()),
        };
        self.0.insert(options.id().to_owned(), (options.type_name(), made));
        Ok(())
    }

    /// Forgets an object, if there is one of that name.
    pub(super) fn remove(&mut self, id: &str) {
        self.0.remove(id);
    }

    /// The type of an object.
    pub(super) fn kind(&self, id: &str) -> Option<&'static str> {
        self.0.get(id).map(|(kind, _)| *kind)
    }

    /// What an NBD server takes its clients by TLS with; `None`: without.
    pub(super) fn acceptor(
        &self,
        server: &NbdServerOptions,
    ) -> Result<Option<Acceptor>, DaemonError> {
        let find = |id: &String| self.0.get(id).map(|(_, made)| made);
        let Some(creds) = &server.tls_creds else { return Ok(None) };
        let Some(Made::Credentials(credentials)) = find(creds) else {
            return Err(DaemonError::new(format!("No TLS credentials with id '{creds}'")));
        };
        let authorization = match server.tls_authz.as_ref() {
            None => None,
            Some(id) => match find(id) {
                Some(Made::Authorization(authorization)) => Some(authorization.clone()),
                _ => {
                    let message = format!("No authorization object with id '{id}'");
                    return Err(DaemonError::new(message));
                }
            },
        };
        Acceptor::new(credentials, authorization).map(Some).map_err(DaemonError::new)
    }
}
