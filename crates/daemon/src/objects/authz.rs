//! `authz-simple` and `authz-list`.

use std::sync::Arc;

use control::{AuthzOptions, Property, Value};
use tls::Authorization;

use super::{Made, no_property};
use crate::{Daemon, DaemonError};

/// The rules that admit TLS clients.
pub(super) struct Authz(Arc<Authorization>);

/// Creates the authorization.
pub(super) fn make(options: &AuthzOptions) -> Authz {
    Authz(Arc::new(options.authorization.clone()))
}

impl Made for Authz {
    fn properties(&self, _: &Daemon) -> Vec<Property> {
        Vec::new()
    }

    fn set(&self, _: &mut Daemon, name: &str, _: Value) -> Result<(), DaemonError> {
        Err(no_property(name))
    }

    fn authorization(&self) -> Option<Arc<Authorization>> {
        Some(self.0.clone())
    }

    /// Does nothing: servers keep the authorization that they already use.
    fn remove(&self, _: &mut Daemon) {}
}
