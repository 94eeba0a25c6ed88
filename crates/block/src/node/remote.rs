//! A node's image on a server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a node knows of its image on a server.
pub trait RemoteImage: Send + Sync {
    /// Has requests fail that wait for a server to come back, and others not wait while the returned value exists.
    ///
    /// For a cancelled job, which would wait for its requests.
    fn stop_waiting(&self) -> Option<NoWaiting> {
        None
    }

    /// Returns what tells the content from others that its server may have under the same name. `None`: it is on no server, or
    /// may change.
    fn content(&self) -> Option<String> {
        None
    }

    /// Returns the content of the image behind this one: what a cache shows.
    fn content_behind(&self) -> Option<String> {
        None
    }

    /// Returns whether a format on top opens the files of this host that its header names.
    ///
    /// Not for an image of which a stranger may have chosen the bytes.
    fn may_name_files(&self) -> bool {
        true
    }
}

/// While it exists, requests do not wait for a server: [`RemoteImage::stop_waiting`].
#[derive(Debug)]
pub struct NoWaiting(Arc<AtomicUsize>);

impl NoWaiting {
    /// Adds one to the number of those that want requests not to wait, until it is dropped.
    pub(crate) fn new(number: Arc<AtomicUsize>) -> NoWaiting {
        number.fetch_add(1, Ordering::AcqRel);
        NoWaiting(number)
    }
}

impl Drop for NoWaiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
