//! `blockdev-snapshot-internal-sync` and `blockdev-snapshot-delete-internal-sync`: snapshots inside an image.

use std::sync::Arc;

use block::node::{BlockNode, InternalSnapshot, SnapshotChange, SnapshotError};
use control::qmp::QmpError;
use nix::errno::Errno;
use serde_json::{Value as Json, json};

use super::Daemon;

fn no_list() -> QmpError {
    QmpError::generic("Failed to get a snapshot list: Operation not supported")
}

impl Daemon {
    /// The node with the image.
    fn root_of_snapshots(&self, device: &str) -> Result<Arc<dyn BlockNode>, QmpError> {
        let node = self.nodes.node(device).map_err(|_| {
            let desc = format!("Cannot find device='{device}' nor node-name='{device}'");
            QmpError::generic(desc)
        })?;
        self.check_root(device)?;
        Ok(node)
    }

    /// `blockdev-snapshot-internal-sync`. Returns the snapshot.
    pub(super) async fn make_internal_snapshot(
        &self,
        device: &str,
        name: &str,
    ) -> Result<InternalSnapshot, QmpError> {
        let node = self.root_of_snapshots(device)?;
        self.inventory.free_of_jobs(device)?;
        let options = self.nodes.options(device);
        let driver = options.map_or("", |options| options.driver.kind().name);
        let is_active = self.inventory.is_active(device).is_ok();
        if node.geometry().read_only && is_active {
            return Err(QmpError::generic(format!("Device '{device}' is read only")));
        }
        let is_possible = node.clone().internal_snapshots().is_some() && is_active;
        if !is_possible {
            let what = "does not support internal snapshots";
            let desc = format!("Block format '{driver}' used by device '{device}' {what}");
            return Err(QmpError::generic(desc));
        }
        if name.is_empty() {
            return Err(QmpError::generic("Name is empty"));
        }
        let before = node.snapshots().ok_or_else(no_list)?;
        if before.iter().any(|snapshot| snapshot.name == name) {
            let desc = format!("Snapshot with name '{name}' already exists on device '{device}'");
            return Err(QmpError::generic(desc));
        }
        let change = SnapshotChange::Make(name.to_owned());
        let failed = |why: SnapshotError| {
            let what = format!("Failed to create snapshot '{name}' on device '{device}'");
            let hint = match why {
                SnapshotError::Os(Errno::EINVAL) => ": its reference counts have too few bits",
                _ => "",
            };
            log::error!("{what}: {why}{hint}");
            QmpError::generic(format!("{what}: {why}"))
        };
        let _moving = self.agenda.moving();
        node.clone().change_snapshots(change, &self.control).await.map_err(failed)?;
        let made = node.snapshots().and_then(|mut all| all.pop());
        made.ok_or_else(no_list)
    }

    /// `blockdev-snapshot-delete-internal-sync`. Returns what the snapshot was.
    pub(super) async fn delete_internal_snapshot(
        &self,
        device: &str,
        id: Option<&str>,
        name: Option<&str>,
    ) -> Result<InternalSnapshot, QmpError> {
        let node = self.root_of_snapshots(device)?;
        if (id, name) == (None, None) {
            return Err(QmpError::generic("Name or id must be provided"));
        }
        let is_it = |snapshot: &InternalSnapshot| {
            id.is_none_or(|id| snapshot.id == id) && name.is_none_or(|name| snapshot.name == name)
        };
        self.inventory.free_of_jobs(device)?;
        // Another process may have its image.
        self.inventory.is_active(device)?;
        let all = node.snapshots().ok_or_else(no_list)?;
        let Some(snapshot) = all.into_iter().find(is_it) else {
            let (id, name) = (id.unwrap_or("null"), name.unwrap_or("null"));
            return Err(QmpError::generic(format!(
                "Snapshot with id '{id}' and name '{name}' does not exist on device '{device}'"
            )));
        };
        if node.geometry().read_only {
            return Err(delete_failed(&SnapshotError::Os(Errno::EPERM)));
        }
        let change = SnapshotChange::Delete(snapshot.id.clone());
        let _moving = self.agenda.moving();
        let deleted = node.change_snapshots(change, &self.control).await;
        deleted.map_err(|why| {
            log::error!("deleting snapshot '{}' of node '{device}': {why}", snapshot.name);
            delete_failed(&why)
        })?;
        Ok(snapshot)
    }
}

fn delete_failed(why: &SnapshotError) -> QmpError {
    QmpError::generic(format!("Failed to remove snapshot from snapshot list: {why}"))
}

/// QEMU's `SnapshotInfo`.
pub(super) fn info(snapshot: &InternalSnapshot) -> Json {
    let InternalSnapshot { id, name, vm_state_size, date, vm_clock, icount } = snapshot;
    let mut info = json!({
        "id": id,
        "name": name,
        "vm-state-size": vm_state_size,
        "date-sec": date.as_secs(),
        "date-nsec": date.subsec_nanos(),
        "vm-clock-sec": vm_clock.as_secs(),
        "vm-clock-nsec": vm_clock.subsec_nanos(),
    });
    if let Some(icount) = icount {
        info["icount"] = (*icount).into();
    }
    info
}
