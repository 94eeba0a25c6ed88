//! The actions of a transaction, and how each is undone.

use std::sync::Arc;

use block::job::Bitmap;
use block::track::DirtyBitmap;
use control::Object;
use control::qmp::{QmpCommand, QmpError};
use options::OptionError;
use options::shape::Shape;
use options::table::{self, Context, Field};

use super::super::bitmap::arguments::{MERGE, NAME, NEW};
use super::super::job::blockdev_backup;
use super::super::snapshot::{
    blockdev_snapshot, blockdev_snapshot_internal_sync, blockdev_snapshot_sync,
};
use crate::bitmaps::{BitmapName, Merge, NewBitmap};
use crate::jobs::BackupOptions;
use crate::snapshot::{Below, SnapshotSync};
use crate::{Daemon, DaemonError};

/// An action with its arguments.
pub(super) enum Action {
    BitmapAdd(NewBitmap),
    BitmapRemove(BitmapName),
    BitmapClear(BitmapName),
    BitmapEnable(BitmapName, bool),
    BitmapMerge(Merge),
    Backup(Box<BackupOptions>),
    Snapshot(blockdev_snapshot::Arguments),
    SnapshotSync(Box<SnapshotSync>),
    SnapshotInternal(blockdev_snapshot_internal_sync::Arguments),
    /// Fails.
    Abort,
}

/// The undo of an action.
pub(super) enum Undo {
    RemoveBitmap(BitmapName),
    AddBitmap(String, Arc<DirtyBitmap>, usize),
    // By name: an image that a snapshot puts above a node is opened again, with its stored bitmaps.
    SetBits(BitmapName, Bitmap),
    SetRecording(BitmapName, bool),
    /// A job that does not run yet.
    CancelJob(u64),
    /// The name of a node, and the id of a snapshot in its image.
    DeleteSnapshot(String, String),
    RemoveOverlay {
        below: Below,
        overlay: String,
        is_new: bool,
    },
}

/// A kind of action.
pub(super) struct Kind {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) arguments: fn() -> Shape,
    pub(super) read: fn(Object, &Context) -> Result<Action, OptionError>,
}

fn read<A: Default>(
    fields: &'static [Field<A>],
    mut object: Object,
    at: &Context,
    whom: &str,
) -> Result<A, OptionError> {
    let mut into = A::default();
    table::read(fields, &mut into, &mut object, at)?;
    table::refuse_rest(&object, at, whom, table::names(fields))?;
    Ok(into)
}

fn name(object: Object, at: &Context) -> Result<BitmapName, OptionError> {
    read(NAME, object, at, "an action about a bitmap")
}

fn name_shape() -> Shape {
    Shape::Object(table::members(NAME))
}

/// All kinds of actions.
pub(super) static KINDS: &[Kind] = &[
    Kind {
        name: "abort",
        help: "fails, so that nothing is done: for tests",
        arguments: || Shape::Object(Vec::new()),
        read: |object, at| read(NOTHING, object, at, "abort").map(|()| Action::Abort),
    },
    Kind {
        name: "block-dirty-bitmap-add",
        help: "create a bitmap",
        arguments: || Shape::Object(table::members(NEW)),
        read: |object, at| Ok(Action::BitmapAdd(read(NEW, object, at, "block-dirty-bitmap-add")?)),
    },
    Kind {
        name: "block-dirty-bitmap-remove",
        help: "remove a bitmap",
        arguments: name_shape,
        read: |object, at| Ok(Action::BitmapRemove(name(object, at)?)),
    },
    Kind {
        name: "block-dirty-bitmap-clear",
        help: "clear a bitmap",
        arguments: name_shape,
        read: |object, at| Ok(Action::BitmapClear(name(object, at)?)),
    },
    Kind {
        name: "block-dirty-bitmap-enable",
        help: "let a bitmap record writes",
        arguments: name_shape,
        read: |object, at| Ok(Action::BitmapEnable(name(object, at)?, true)),
    },
    Kind {
        name: "block-dirty-bitmap-disable",
        help: "stop a bitmap from recording writes",
        arguments: name_shape,
        read: |object, at| Ok(Action::BitmapEnable(name(object, at)?, false)),
    },
    Kind {
        name: "block-dirty-bitmap-merge",
        help: "add the bits of several bitmaps to another one",
        arguments: || Shape::Object(table::members(MERGE)),
        read: |object, at| {
            Ok(Action::BitmapMerge(read(MERGE, object, at, "block-dirty-bitmap-merge")?))
        },
    },
    Kind {
        name: "blockdev-backup",
        help: "begin a backup",
        arguments: || blockdev_backup::COMMAND.arguments(),
        read: |object, at| {
            let options = blockdev_backup::COMMAND.parse_at(object, at)?;
            blockdev_backup::check(&options)?;
            Ok(Action::Backup(Box::new(options)))
        },
    },
    Kind {
        name: "blockdev-snapshot",
        help: "put an image above a node",
        arguments: || blockdev_snapshot::COMMAND.arguments(),
        read: |object, at| Ok(Action::Snapshot(blockdev_snapshot::COMMAND.parse_at(object, at)?)),
    },
    Kind {
        name: "blockdev-snapshot-internal-sync",
        help: "make a snapshot inside an image",
        arguments: || blockdev_snapshot_internal_sync::COMMAND.arguments(),
        read: |object, at| {
            Ok(Action::SnapshotInternal(
                blockdev_snapshot_internal_sync::COMMAND.parse_at(object, at)?,
            ))
        },
    },
    Kind {
        name: "blockdev-snapshot-sync",
        help: "create an image above a node",
        arguments: || blockdev_snapshot_sync::COMMAND.arguments(),
        read: |object, at| {
            Ok(Action::SnapshotSync(Box::new(
                blockdev_snapshot_sync::COMMAND.parse_at(object, at)?,
            )))
        },
    },
];

static NOTHING: &[Field<()>] = &[];

impl Daemon {
    /// Executes an action and returns its undo.
    pub(super) async fn act(&mut self, action: Action) -> Result<Undo, QmpError> {
        Ok(match action {
            Action::Abort => {
                return Err(QmpError::generic("Transaction aborted using Abort action"));
            }
            Action::BitmapAdd(new) => {
                let name = new.bitmap.clone();
                self.add_bitmap(new).await?;
                Undo::RemoveBitmap(name)
            }
            Action::BitmapRemove(name) => {
                let (bitmap, place) = self.remove_bitmap(&name).await?;
                Undo::AddBitmap(name.node, bitmap, place)
            }
            Action::BitmapClear(name) => {
                let bits = self.clear_bitmap(&name)?;
                Undo::SetBits(name, bits)
            }
            Action::BitmapEnable(name, on) => {
                let before = self.set_recording(&name, on)?;
                Undo::SetRecording(name, before)
            }
            Action::BitmapMerge(merge) => {
                let target = BitmapName { node: merge.node.clone(), name: merge.target.clone() };
                let bits = self.merge_bitmaps(merge)?;
                Undo::SetBits(target, bits)
            }
            Action::Backup(options) => Undo::CancelJob(self.prepare_backup(*options).await?),
            Action::Snapshot(blockdev_snapshot::Arguments { node, overlay }) => {
                let read_only = self.inventory.is_read_only(&node);
                let owner = self.inventory.owner(&node).map(str::to_owned);
                self.snapshot(&node, &overlay).await?;
                let below = Below { node, read_only, owner };
                Undo::RemoveOverlay { below, overlay, is_new: false }
            }
            Action::SnapshotInternal(blockdev_snapshot_internal_sync::Arguments {
                device,
                name,
            }) => {
                let made = self.make_internal_snapshot(&device, &name).await?;
                Undo::DeleteSnapshot(device, made.id)
            }
            Action::SnapshotSync(snapshot) => {
                let node = snapshot.node_name.clone();
                let overlay = snapshot.snapshot_node_name.clone().unwrap_or_default();
                let read_only = self.inventory.is_read_only(&node);
                let owner = self.inventory.owner(&node).map(str::to_owned);
                self.snapshot_sync(*snapshot).await?;
                let below = Below { node, read_only, owner };
                Undo::RemoveOverlay { below, overlay, is_new: true }
            }
        })
    }

    /// Runs the job of an action, after all actions have succeeded.
    pub(super) fn commit(&mut self, undo: &Undo) {
        if let Undo::CancelJob(serial) = undo {
            self.run_job(*serial);
        }
    }

    /// Undoes an action. Users' requests have been held since the action.
    pub(super) async fn undo(&mut self, undo: Undo) {
        match undo {
            Undo::RemoveBitmap(name) => drop(self.remove_bitmap(&name).await),
            Undo::AddBitmap(node, bitmap, place) => {
                // An image that a snapshot was put above may not be watched any more.
                match self.nodes.track(&node).await {
                    Ok(tracking) => tracking.restore_bitmap(place, bitmap),
                    Err(error) => {
                        log::error!("transaction: bitmap '{}' is lost: {error}", bitmap.name());
                    }
                }
            }
            Undo::SetBits(BitmapName { node, name }, bits) => {
                if let Ok(bitmap) = self.bitmap(&node, &name) {
                    bitmap.bits().restore(&bits);
                }
            }
            Undo::SetRecording(BitmapName { node, name }, before) => {
                if let Ok(bitmap) = self.bitmap(&node, &name) {
                    bitmap.set_recording(before);
                }
            }
            Undo::CancelJob(serial) => self.cancel_job(serial).await,
            Undo::DeleteSnapshot(device, id) => {
                if let Err(error) = self.delete_internal_snapshot(&device, Some(&id), None).await {
                    let QmpError { desc, .. } = error;
                    log::error!("transaction: snapshot {id} of node '{device}' stays: {desc}");
                }
            }
            Undo::RemoveOverlay { below, overlay, is_new } => {
                let removed = self.remove_overlay(&below, &overlay, is_new).await;
                if let Err(error) = removed {
                    let error: DaemonError = error;
                    let node = below.node;
                    log::error!("transaction: '{overlay}' stays above '{node}': {error}");
                }
            }
        }
    }
}
