//! What a daemon gives its block drivers beside the options of a node.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use event_loop::{ThreadBirth, oneshot};

use crate::error::OpenError;
use crate::own_mounts::OwnMounts;

/// Services of a daemon for the block drivers of all nodes.
#[derive(Default)]
pub struct DriverServices {
    library_birth: ThreadBirth,
    is_sealed: bool,
    own_mounts: OwnMounts,
    /// Images of nodes that are gone, which threads close.
    closing: Mutex<Vec<oneshot::Receiver<()>>>,
    /// What nodes of one driver share, by type.
    shared: Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
}

impl DriverServices {
    /// Returns the services of a daemon.
    ///
    /// Threads that drivers start for foreign libraries call `library_birth` first. `is_sealed`: the process maps no
    /// code any more, so that drivers use only libraries that are loaded.
    #[must_use]
    pub fn new(library_birth: ThreadBirth, is_sealed: bool) -> DriverServices {
        DriverServices { library_birth, is_sealed, ..DriverServices::default() }
    }

    /// Returns what a foreign library's thread calls first.
    #[must_use]
    pub fn library_birth(&self) -> &ThreadBirth {
        &self.library_birth
    }

    /// Returns whether the process maps no code any more.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.is_sealed
    }

    /// Returns the mounts of the daemon's own FUSE exports, on which drivers open nothing.
    #[must_use]
    pub fn own_mounts(&self) -> &OwnMounts {
        &self.own_mounts
    }

    /// Makes [`closed`](Self::closed) wait for an image that another thread closes.
    pub(crate) fn closes(&self, image: oneshot::Receiver<()>) {
        lock(&self.closing).push(image);
    }

    /// Waits until the images of nodes that are gone are closed. `None`: all are.
    pub fn closed(&self) -> Option<impl Future<Output = ()> + use<>> {
        let closing = std::mem::take(&mut *lock(&self.closing));
        (!closing.is_empty()).then_some(async move { drop(oneshot::all(closing).await) })
    }

    /// Returns the value that the nodes of a driver share. The first caller makes it.
    ///
    /// # Errors
    ///
    /// Those of `make`.
    pub fn shared<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce() -> Result<T, OpenError>,
    ) -> Result<Arc<T>, OpenError> {
        let mut shared = lock(&self.shared);
        let found = shared.get(&TypeId::of::<T>()).cloned();
        if let Some(Ok(found)) = found.map(Arc::downcast) {
            return Ok(found);
        }
        let made = Arc::new(make()?);
        shared.insert(TypeId::of::<T>(), made.clone());
        Ok(made)
    }
}
