//! What a node needs that takes its time, made before the node is opened.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ::options::FdName;
use crypto::Secret;
use event_loop::{EventLoop, LoopConfig};
use tls::X509;

use crate::error::OpenError;
use crate::options::{BlockdevOptions, BlockdevRef, Driver};
use crate::registry::NodeRegistry;

/// TLS credentials and secrets, by the `id` of their object.
#[derive(Clone, Default)]
pub struct Credentials {
    x509: BTreeMap<String, Arc<X509>>,
    secrets: BTreeMap<String, Arc<Secret>>,
}

impl fmt::Debug for Credentials {
    /// Without the secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.x509.keys()).entries(self.secrets.keys()).finish()
    }
}

impl Credentials {
    /// Adds the credentials of an object.
    pub fn add(&mut self, id: &str, credentials: X509) {
        self.x509.insert(id.to_owned(), Arc::new(credentials));
    }

    /// Adds the secret of an object.
    pub fn add_secret(&mut self, id: &str, secret: Secret) {
        self.secrets.insert(id.to_owned(), Arc::new(secret));
    }

    /// Removes the credentials or the secret of an object. Open nodes keep theirs.
    pub fn remove(&mut self, id: &str) {
        self.x509.remove(id);
        self.secrets.remove(id);
    }

    /// Returns the secret of an object.
    ///
    /// # Errors
    ///
    /// No secret object has that `id`.
    pub fn secret(&self, id: &str) -> Result<Arc<Secret>, OpenError> {
        let found = self.secrets.get(id).cloned();
        found.ok_or_else(|| OpenError::new(format!("No secret with id '{id}'")))
    }

    /// Returns the credentials of an object.
    ///
    /// # Errors
    ///
    /// No object of TLS credentials has that `id`.
    pub fn get(&self, id: &str) -> Result<&X509, OpenError> {
        let found = self.x509.get(id).map(|credentials| &**credentials);
        found.ok_or_else(|| OpenError::new(format!("No TLS credentials with id '{id}'")))
    }
}

/// The means by which a driver connects to a server.
pub struct ConnectContext<'a> {
    /// The loop that runs meanwhile.
    pub event_loop: &'a EventLoop,
    /// TLS credentials and secrets for options to refer to.
    pub credentials: &'a Credentials,
    /// The nodes that options refer to.
    pub nodes: &'a NodeRegistry,
    /// Takes a connected socket that the process has inherited, once.
    pub inherited: &'a dyn Fn(&FdName) -> Result<Arc<OwnedFd>, OpenError>,
}

/// Connections to the servers of nodes that are to be opened.
#[derive(Default)]
pub struct Connections(Vec<(Driver, Box<dyn Any + Send>)>);

impl Connections {
    /// Connects to the servers of all nodes among these options, nested ones included. `None`: there are none.
    ///
    /// Waits for the servers: for each `nbd` node at most 10 seconds, plus its `open-timeout`.
    /// The loop of `context` runs meanwhile.
    ///
    /// # Errors
    ///
    /// As of [`NodeRegistry::open`](crate::NodeRegistry::open).
    pub fn begin(
        context: &ConnectContext<'_>,
        options: &BlockdevOptions,
    ) -> Option<impl Future<Output = Result<Self, OpenError>> + use<>> {
        let mut begun = Vec::new();
        let mut unseen = vec![options];
        while let Some(BlockdevOptions { driver, .. }) = unseen.pop() {
            if let Some(connecting) = driver.connect(context) {
                begun.push((driver.clone(), connecting));
            }
            unseen.extend(driver.children().into_iter().filter_map(|child| match child.node {
                BlockdevRef::Inline(options) => Some(&**options),
                BlockdevRef::Name(_) => None,
            }));
        }
        (!begun.is_empty()).then_some(async move {
            let mut connections = Vec::new();
            for (driver, connecting) in begun {
                connections.push((driver, connecting.await?));
            }
            Ok(Connections(connections))
        })
    }

    /// Returns the prepared connection of a node with these options. If there is none, makes it on a
    /// temporary loop.
    pub(crate) fn take(
        &mut self,
        driver: &Driver,
        nodes: &NodeRegistry,
    ) -> Result<Box<dyn Any + Send>, OpenError> {
        if let Some(index) = self.0.iter().position(|(of, _)| of == driver) {
            return Ok(self.0.swap_remove(index).1);
        }
        let failed =
            |error: &dyn std::fmt::Display| OpenError::new(format!("connecting failed: {error}"));
        let event_loop = EventLoop::new(LoopConfig::default()).map_err(|error| failed(&error))?;
        let context = ConnectContext {
            event_loop: &event_loop,
            credentials: nodes.known_credentials(),
            nodes,
            // The options may come from an image.
            inherited: &|fd| {
                let why = format!("file descriptor {fd} is not for a node that an image names");
                Err(OpenError::new(why))
            },
        };
        let Some(connecting) = driver.connect(&context) else {
            return Err(OpenError::new("connecting failed: the driver makes no connections"));
        };
        event_loop.block_on(connecting).map_err(|error| failed(&error))?
    }
}
