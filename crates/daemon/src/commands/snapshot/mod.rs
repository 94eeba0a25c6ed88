//! Snapshots: a new image receives all later writes, and the image below no longer changes.

pub(super) mod blockdev_snapshot;
pub(super) mod blockdev_snapshot_sync;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] =
    &[&blockdev_snapshot_sync::COMMAND, &blockdev_snapshot::COMMAND];
