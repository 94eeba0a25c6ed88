//! Snapshots: an image that takes what is written from now on, above one that stays as it is.

pub(super) mod blockdev_snapshot;
pub(super) mod blockdev_snapshot_sync;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] =
    &[&blockdev_snapshot_sync::COMMAND, &blockdev_snapshot::COMMAND];
