//! `tls-creds-x509`.

use std::sync::Arc;

use control::{Property, TlsCredsOptions, Value};
use tls::{Authorization, X509};

use super::{Made, no_property};
use crate::{Daemon, DaemonError};

/// Credentials that nodes and the NBD server find by name.
pub(super) struct TlsCreds {
    id: String,
}

/// Loads the certificates and the key.
pub(super) fn make(
    daemon: &mut Daemon,
    options: &TlsCredsOptions,
) -> Result<TlsCreds, DaemonError> {
    let loaded = X509::load(&options.files, None).map_err(DaemonError::new)?;
    daemon.nodes.credentials().add(&options.id, loaded);
    Ok(TlsCreds { id: options.id.clone() })
}

impl Made for TlsCreds {
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
