//! `iothread`.

use std::sync::Arc;

use control::{IothreadOptions, Property, Value};
use tls::Authorization;

use super::Made;
use crate::{Daemon, DaemonError};

/// A thread of [`IoThreads`](crate::threads::IoThreads).
pub(super) struct Iothread {
    id: String,
}

/// Starts the thread.
pub(super) fn make(
    daemon: &mut Daemon,
    options: &IothreadOptions,
) -> Result<Iothread, DaemonError> {
    daemon.threads.add(options)?;
    Ok(Iothread { id: options.id.clone() })
}

impl Made for Iothread {
    fn properties(&self, daemon: &Daemon) -> Vec<Property> {
        let thread = daemon.threads.get(&self.id);
        thread.map(|thread| thread.options.properties(thread.poll_max_ns())).unwrap_or_default()
    }

    fn set(&self, daemon: &mut Daemon, name: &str, value: Value) -> Result<(), DaemonError> {
        daemon.threads.set(&self.id, name, value)
    }

    fn authorization(&self) -> Option<Arc<Authorization>> {
        None
    }

    fn remove(&self, daemon: &mut Daemon) {
        daemon.threads.remove(&self.id);
    }
}
