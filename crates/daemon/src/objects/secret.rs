//! `secret`.

use std::fs;
use std::sync::Arc;

use block::Credentials;
use control::{EncryptedBy, Property, SecretFormat, SecretOptions, SecretSource, Value};
use crypto::secret::{self, SecretError};
use tls::Authorization;

use super::{Made, no_property};
use crate::errno::words;
use crate::{Daemon, DaemonError};

/// A secret that nodes find by name.
pub(super) struct Secret {
    id: String,
}

/// Reads the secret.
pub(super) fn make(daemon: &mut Daemon, options: &SecretOptions) -> Result<Secret, DaemonError> {
    let known = daemon.nodes.credentials();
    let loaded = load(options, known)?;
    known.add_secret(&options.id, loaded);
    Ok(Secret { id: options.id.clone() })
}

fn load(options: &SecretOptions, others: &Credentials) -> Result<crypto::Secret, DaemonError> {
    let refused = |error: SecretError| DaemonError::new(error);
    let given = match &options.source {
        SecretSource::Data(data) => crypto::Secret::new(data.as_bytes().to_vec()),
        SecretSource::File(path) => fs::read(path).map(crypto::Secret::new).map_err(|error| {
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

impl Made for Secret {
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
