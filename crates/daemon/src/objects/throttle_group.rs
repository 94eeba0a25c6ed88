//! `throttle-group`.

use std::sync::Arc;

use block::throttle::ThrottleGroup;
use control::{Property, ThrottleGroupOptions, Value};
use tls::Authorization;

use super::Made;
use crate::{Daemon, DaemonError};

/// A group that nodes opened from now on can join.
pub(super) struct Group {
    id: String,
    group: Arc<ThrottleGroup>,
}

/// Registers the group for nodes.
pub(super) fn make(
    daemon: &mut Daemon,
    options: &ThrottleGroupOptions,
) -> Result<Group, DaemonError> {
    let group = ThrottleGroup::new(options.limits).map_err(DaemonError::new)?;
    daemon.nodes.add_throttle_group(&options.id, group.clone());
    Ok(Group { id: options.id.clone(), group })
}

impl Group {
    /// Returns options with the group's current limits.
    fn options(&self) -> ThrottleGroupOptions {
        ThrottleGroupOptions { id: self.id.clone(), limits: self.group.limits() }
    }
}

impl Made for Group {
    fn properties(&self, _: &Daemon) -> Vec<Property> {
        self.options().properties()
    }

    fn set(&self, _: &mut Daemon, name: &str, value: Value) -> Result<(), DaemonError> {
        let changed = self.options().with_property(name, value)?;
        self.group.set_limits(changed.limits).map_err(DaemonError::new)
    }

    fn authorization(&self) -> Option<Arc<Authorization>> {
        None
    }

    fn remove(&self, daemon: &mut Daemon) {
        daemon.nodes.remove_throttle_group(&self.id);
    }
}
