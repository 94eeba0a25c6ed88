//! Snapshots: a new image receives all later writes, and the image below no longer changes. Or the image itself keeps its
//! present state.

pub(super) mod blockdev_snapshot;
pub(super) mod blockdev_snapshot_delete_internal_sync;
pub(super) mod blockdev_snapshot_internal_sync;
pub(super) mod blockdev_snapshot_sync;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[
    &blockdev_snapshot_sync::COMMAND,
    &blockdev_snapshot::COMMAND,
    &blockdev_snapshot_internal_sync::COMMAND,
    &blockdev_snapshot_delete_internal_sync::COMMAND,
];
