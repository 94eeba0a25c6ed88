//! `secret`.

use std::fs;
use std::sync::Arc;

use block::Credentials;
use control::{EncryptedBy, Property, SecretFormat, SecretOptions, SecretSource, Value};
use crypto::Secret;
use crypto::secret::{base64, decrypt};
use tls::Authorization;

use super::{Made, no_property};
use crate::errno::words;
use crate::{Daemon, DaemonError};

/// A secret that nodes find by name.
pub(super) struct SecretObject {
    id: String,
}

/// Reads the secret.
pub(super) fn make(
    daemon: &mut Daemon,
    options: &SecretOptions,
) -> Result<SecretObject, DaemonError> {
    if options.is_told() && daemon.origin.keeping.is_some() {
        return Err(DaemonError::new(format!(
            "secret '{}' would be written to the state file: with --state, give file=, or encrypted data with \
             keyid=",
            options.id
        )));
    }
    let secrets = daemon.nodes.credentials();
    secrets.add_secret(&options.id, load(options, secrets)?);
    Ok(SecretObject { id: options.id.clone() })
}

pub(super) fn load(options: &SecretOptions, others: &Credentials) -> Result<Secret, DaemonError> {
    let given = match &options.source {
        SecretSource::Data(data) => Secret::new(data.as_bytes().to_vec()),
        SecretSource::File(path) => fs::read(path).map(Secret::new).map_err(|error| {
            DaemonError::new(format!("Unable to read {}: {}", path.display(), words(&error)))
        })?,
    };
    let decoded = match options.format {
        SecretFormat::Raw => given,
        SecretFormat::Base64 => base64(&given).map_err(DaemonError::new)?,
    };
    match &options.encrypted {
        None => Ok(decoded),
        Some(EncryptedBy { keyid, iv }) => {
            decrypt(&decoded, &others.secret(keyid)?, iv).map_err(DaemonError::new)
        }
    }
}

impl Made for SecretObject {
    fn properties(&self, _: &Daemon) -> Vec<Property> {
        Vec::new()
    }

    fn set(&self, _: &mut Daemon, name: &str, _: Value) -> Result<(), DaemonError> {
        Err(no_property(name))
    }

    fn authorization(&self) -> Option<Arc<Authorization>> {
        None
    }

    fn remove(&self, daemon: &mut Daemon) {
        daemon.nodes.credentials().remove(&self.id);
    }
}
