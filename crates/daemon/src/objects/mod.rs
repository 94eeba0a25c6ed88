//! Existing objects, with one file per object type. [`Daemon::make_object`] lists the types.

mod authz;
mod iothread;
mod secret;
mod throttle_group;
mod tls_creds;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use block::Credentials;
use control::{NbdServerOptions, ObjectOptions, Property, Value};
use tls::{Acceptor, Authorization};

use super::{Daemon, DaemonError};

/// An object.
pub(super) struct Object {
    /// The name, unique among all objects.
    pub(super) id: String,
    /// `qom-type`.
    pub(super) type_name: &'static str,
    pub(super) made: Box<dyn Made>,
}

/// A created object. No method has a default, because each type must clean up after itself:
/// leftover state would be visible to a later object of the same name.
pub(super) trait Made {
    /// Returns the object's properties with their current values.
    fn properties(&self, daemon: &Daemon) -> Vec<Property>;

    /// Changes one of the [`properties`](Self::properties).
    ///
    /// # Errors
    ///
    /// The property cannot change, or the value is invalid.
    fn set(&self, daemon: &mut Daemon, name: &str, value: Value) -> Result<(), DaemonError>;

    /// Returns the rules that admit TLS clients. `None`: the object is not an authorization.
    fn authorization(&self) -> Option<Arc<Authorization>>;

    /// Removes the entries by which nodes, exports and servers find the object.
    fn remove(&self, daemon: &mut Daemon);
}

/// The objects, by id.
#[derive(Default)]
pub(super) struct Objects(BTreeMap<String, Rc<Object>>);

impl Objects {
    /// Returns the object of that name.
    pub(super) fn get(&self, id: &str) -> Option<Rc<Object>> {
        self.0.get(id).cloned()
    }
}

/// The error of [`Made::set`] for an object without properties.
fn no_property(name: &str) -> DaemonError {
    DaemonError::new(format!("Property '{name}' not found"))
}

/// Adds a secret or TLS credentials to those of nodes, for a program that is no daemon. Other objects do nothing there.
///
/// # Errors
///
/// The secret or the certificates cannot be read.
pub fn add_credentials(
    credentials: &mut Credentials,
    options: &ObjectOptions,
) -> Result<(), DaemonError> {
    match options {
        ObjectOptions::Secret(own) => {
            let secret = secret::load(own, credentials)?;
            credentials.add_secret(&own.id, secret);
        }
        ObjectOptions::TlsCreds(own) => {
            let loaded = tls::X509::load(&own.files, None).map_err(DaemonError::new)?;
            credentials.add(&own.id, loaded);
        }
        ObjectOptions::Iothread(_) | ObjectOptions::ThrottleGroup(_) | ObjectOptions::Authz(_) => {}
    }
    Ok(())
}

impl Daemon {
    /// Creates an object.
    pub(super) fn make_object(&mut self, options: &ObjectOptions) -> Result<(), DaemonError> {
        let made: Box<dyn Made> = match options {
            ObjectOptions::Iothread(own) => Box::new(iothread::make(self, own)?),
            ObjectOptions::ThrottleGroup(own) => Box::new(throttle_group::make(self, own)?),
            ObjectOptions::TlsCreds(own) => Box::new(tls_creds::make(self, own)?),
            ObjectOptions::Secret(own) => Box::new(secret::make(self, own)?),
            ObjectOptions::Authz(own) => Box::new(authz::make(own)),
        };
        let id = options.id().to_owned();
        let object = Object { id: id.clone(), type_name: options.type_name(), made };
        self.objects.0.insert(id, Rc::new(object));
        Ok(())
    }

    /// `object-del`.
    pub(super) fn delete_object(&mut self, id: &str) -> Result<(), DaemonError> {
        let inventory = self.inventory.without_object(id)?;
        if let Some(object) = self.objects.0.remove(id) {
            object.made.remove(self);
        }
        self.inventory = inventory;
        Ok(())
    }

    /// Returns the TLS acceptor of an NBD server. `None`: the server's clients do not use TLS.
    pub(super) fn acceptor(
        &mut self,
        server: &NbdServerOptions,
    ) -> Result<Option<Acceptor>, DaemonError> {
        let Some(creds) = &server.tls_creds else { return Ok(None) };
        let credentials = self.nodes.credentials().get(creds)?;
        let authorization = match &server.tls_authz {
            None => None,
            Some(id) => {
                let found = self.objects.get(id).and_then(|object| object.made.authorization());
                let none = || DaemonError::new(format!("No authorization object with id '{id}'"));
                Some(found.ok_or_else(none)?)
            }
        };
        Acceptor::new(credentials, authorization).map(Some).map_err(DaemonError::new)
    }
}
