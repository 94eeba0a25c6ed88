//! `blockdev-snapshot-sync` and `blockdev-snapshot`: insert an image between a node and its users.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::flush::flush_for_command;
use block::graph::{Edge, HeldEdges, drain};
use block::options::{
    Backing, BlockdevOptions, BlockdevRef, Discard, Driver, FileOptions, Locking, Qcow2Options,
};
use block::track::Tracking;
use block::{BitmapsAbove, CreateQcow2, GeneratedNames, OwnMounts, create_qcow2_beside};
use control::{Action, Inventory, Step};

use super::host::{Host, on_a_thread};
use super::{Daemon, DaemonError};
use crate::errno::words;
use crate::nodes::name_for_header;

/// The trackers of a node, with its name.
type Watched = (String, Arc<Tracking>);

/// A node that gets an overlay, as it was before.
#[derive(Debug)]
pub(crate) struct Below {
    pub(crate) node: String,
    pub(crate) read_only: bool,
    /// The node that it is defined in.
    pub(crate) owner: Option<String>,
}

/// The arguments of `blockdev-snapshot-sync`.
#[derive(Debug, Clone, Default)]
pub(crate) struct SnapshotSync {
    /// `device`: a device of QEMU, which the daemon lacks. Used in an error message only.
    pub(crate) device: String,
    /// `node-name`: the node that becomes the backing node.
    pub(crate) node_name: String,
    /// `snapshot-file`: the path of the new or existing image.
    pub(crate) snapshot_file: PathBuf,
    /// `snapshot-node-name`: the image's node.
    pub(crate) snapshot_node_name: Option<String>,
    /// `format`; `None`: qcow2.
    pub(crate) format: Option<String>,
    /// `mode=existing`: the image exists.
    pub(crate) existing: bool,
}

impl Daemon {
    /// `blockdev-snapshot-sync`.
    pub(super) async fn snapshot_sync(
        &mut self,
        snapshot: SnapshotSync,
    ) -> Result<(), DaemonError> {
        let SnapshotSync { node_name, snapshot_file, snapshot_node_name, .. } = snapshot;
        self.is_no_filter(&node_name)?;
        let node = self.nodes.node(&node_name).map_err(|_| {
            let device = &snapshot.device;
            DaemonError::new(format!("Cannot find device='{device}' nor node-name='{node_name}'"))
        })?;
        match snapshot.format.as_deref().unwrap_or("qcow2") {
            "qcow2" => {}
            known @ ("raw" | "file" | "host_device" | "nbd" | "null-co" | "null-aio") => {
                let message = format!("Backing file not supported for file format '{known}'");
                return Err(DaemonError::new(message));
            }
            other => return Err(DaemonError::new(format!("Unknown file format '{other}'"))),
        }
        let Some(name) = snapshot_node_name else {
            return Err(DaemonError::new("New overlay node-name missing"));
        };
        if self.nodes.is_filter(&name) || self.nodes.names().any(|other| other == name) {
            return Err(DaemonError::new("New overlay node-name already in use"));
        }
        self.inventory.can_get_overlay(&node_name)?;
        self.inventory.is_no_backing(&node_name)?;
        self.inventory.is_active(&node_name)?;
        let Some(below) = self.nodes.options(&node_name) else {
            return Err(DaemonError::new(format!("Node '{node_name}' is gone")));
        };
        let file =
            FileOptions { filename: snapshot_file.clone(), aio: None, locking: Locking::Auto };
        let file = BlockdevOptions {
            discard: Discard::Unmap,
            cache: below.cache,
            ..BlockdevOptions::new(None, Driver::of_kind(file, self.nodes.services().own_mounts()))
        };
        let overlay = BlockdevOptions {
            node_name: Some(name),
            discard: below.discard,
            driver: Driver::from(Qcow2Options {
                file: BlockdevRef::Inline(Box::new(file.clone())),
                backing: Backing::Node(BlockdevRef::Name(node_name.clone())),
                ..Qcow2Options::default()
            }),
            ..file
        };
        self.check_paths(&Action::Blockdev(overlay.clone()))?;
        if !snapshot.existing {
            let filename = name_for_header(&self.nodes, &node_name).map_err(DaemonError::new)?;
            let path = self.nodes.image_path(&node_name);
            // If a path alone does not describe the image, its name is the options, as JSON.
            let filename = match path.filter(|_| !filename.starts_with("json:")) {
                Some(path) => {
                    let path = std::path::absolute(path).map_err(DaemonError::new)?;
                    path.display().to_string()
                }
                None => filename,
            };
            let backing = (filename, Some(below.driver.kind().name.to_owned()));
            let size = node.geometry().size;
            drop(node);
            let create = CreateQcow2 { backing: Some(backing), ..CreateQcow2::new(size) };
            let mounts = self.nodes.services().own_mounts().clone();
            make(&*self.process.host, &snapshot_file, create, mounts).await?;
        }
        self.put_above(&node_name, &overlay, &[]).await
    }

    /// `blockdev-snapshot`.
    pub(super) async fn snapshot(&mut self, node: &str, overlay: &str) -> Result<(), DaemonError> {
        for name in [node, overlay] {
            self.is_no_filter(name)?;
            self.nodes.node(name)?;
        }
        self.inventory.can_get_overlay(node)?;
        self.inventory.is_no_backing(node)?;
        self.inventory.free_of_jobs(overlay)?;
        let no_overlay = || DaemonError::new("The overlay does not support backing images");
        let before = self.nodes.options(overlay).ok_or_else(no_overlay)?;
        let mut after = before.clone();
        if !after.driver.set_child("backing", BlockdevRef::Name(node.to_owned())) {
            return Err(no_overlay());
        }
        if !self.nodes.edges(overlay).is_empty() {
            return Err(DaemonError::new("The overlay is already in use"));
        }
        let children = self.nodes.info(overlay).map(|info| info.children).unwrap_or_default();
        if children.iter().any(|child| child.role == "backing") {
            return Err(DaemonError::new("The overlay already has a backing image")
                .with_hint("Open it with backing=null."));
        }
        // The overlay is opened again, with its backing node.
        let (watched, names) =
            (self.nodes.tracking_within(overlay), self.nodes.generated_names(overlay));
        self.delete_node(overlay)?.await;
        self.nodes.forget_removed();
        self.nodes.set_generated_names(names);
        let put = self.put_above(node, &after, &watched).await;
        if put.is_err()
            && let Err(error) = self.open_again(before, &watched).await
        {
            log::error!(
                "node '{overlay}' was closed for the snapshot and cannot be opened: {error}"
            );
        }
        self.nodes.set_generated_names(GeneratedNames::default());
        put
    }

    /// Opens an image that was closed to come above a node, without that node. `watched`: the trackers of its nodes.
    async fn open_again(
        &mut self,
        options: BlockdevOptions,
        watched: &[Watched],
    ) -> Result<(), DaemonError> {
        self.add(&Step::of_node(options)).await?;
        Ok(self.nodes.track_again(watched).await?)
    }

    /// Opens an image with `node` as its backing node, and moves the node's users to the image. `watched`: the trackers that
    /// the nodes of the image had before.
    async fn put_above(
        &mut self,
        node: &str,
        overlay: &BlockdevOptions,
        watched: &[Watched],
    ) -> Result<(), DaemonError> {
        let name = overlay.node_name.as_deref().unwrap_or_default();
        let step = Step::of_node(overlay.clone());
        let inventory = self.inventory.with(&step)?.with_overlay(node, name)?;
        // Listed before the image is opened: the image itself must not be among the users.
        let users = self.nodes.edges(node);
        // The image lies on the node itself, below the filters of backups.
        let filters = self.nodes.take_filters(node);
        if let Err(error) = self.open_node(overlay, None).await {
            self.nodes.set_filters(node, filters);
            return Err(error);
        }
        self.nodes.set_filters(name, filters);
        let inventory = self.with_generated_names(&inventory, overlay);
        let ready = async {
            self.nodes.track_again(watched).await?;
            self.sync_folder(name).await
        };
        let moved = match ready.await {
            Ok(()) => self.move_users(users, node, name, inventory).await,
            Err(error) => Err(error),
        };
        if let Err(error) = moved {
            let filters = self.nodes.take_filters(name);
            self.nodes.set_filters(node, filters);
            self.nodes.remove(name)?;
            return Err(error);
        }
        self.move_jobs(node, name);
        if let Err(error) = self.nodes.make_read_only(node).await {
            // No user of the node writes to it in any case.
            log::warn!("node {node}: stays open for writing behind '{name}': {error}");
        }
        Ok(())
    }

    /// Undoes a snapshot: moves the users of an image back to the node below. Nothing was written to the image.
    /// `is_new`: the image's node is removed. Otherwise it is opened as before.
    pub(super) async fn remove_overlay(
        &mut self,
        below: &Below,
        overlay: &str,
        is_new: bool,
    ) -> Result<(), DaemonError> {
        let Below { node, read_only, owner } = below;
        let before = self.nodes.options(overlay);
        let (watched, names) =
            (self.nodes.tracking_within(overlay), self.nodes.generated_names(overlay));
        if !read_only {
            self.nodes.make_writable(node).await?;
        }
        let inventory =
            self.inventory.without_overlay(node, overlay, *read_only, owner.as_deref())?;
        let below = self.nodes.node(node)?;
        // No bitmap has come into use since: users' requests are held, and the actions after this one are undone.
        let sizes = [&below, &self.nodes.node(overlay)?].map(|node| node.geometry().size);
        let above = match sizes[0] == sizes[1] {
            true => BitmapsAbove::default(),
            false => self.nodes.bitmaps_above(overlay),
        };
        let held = self.hold_for(&above).await;
        let users = drain(self.nodes.edges(overlay)).await.map_err(DaemonError::new)?;
        users.point_to(&below).await.map_err(DaemonError::new)?;
        above.resize();
        drop((users, held));
        let filters = self.nodes.take_filters(overlay);
        self.nodes.set_filters(node, filters);
        self.move_jobs(overlay, node);
        self.inventory = inventory;
        self.nodes.remove(overlay)?;
        let opened = match before.filter(|_| !is_new) {
            Some(mut options) => {
                options.driver.remove_child("backing");
                self.nodes.set_generated_names(names);
                self.open_again(options, &watched).await
            }
            None => Ok(()),
        };
        self.nodes.set_generated_names(GeneratedNames::default());
        self.record().await?;
        opened
    }

    /// Syncs the folder of a node's image. Otherwise a power cut may remove a new image, with all that was
    /// written to it since, although the state file names the image.
    async fn sync_folder(&self, name: &str) -> Result<(), DaemonError> {
        let Some(image) = self.nodes.image_path(name) else { return Ok(()) };
        let path = image.display().to_string();
        let Err((what, error)) =
            on_a_thread(&*self.process.host, "create", move || sync_folder(&image))
                .await
                .map_err(DaemonError::new)?
        else {
            return Ok(());
        };
        let why = format!("{what} the folder of '{path}' failed: {}", words(&error));
        if error.kind() == ErrorKind::PermissionDenied {
            // The folder can be written to, and cannot be read.
            log::warn!("node {name}: {why}: a power cut may remove a new image");
            return Ok(());
        }
        Err(DaemonError::new(why))
    }

    /// Moves the users of `from` to `to`, as in the new `inventory`. Writes are held until the users have moved and the state
    /// file names `to`.
    async fn move_users(
        &mut self,
        users: Vec<Arc<Edge>>,
        from: &str,
        to: &str,
        inventory: Inventory,
    ) -> Result<(), DaemonError> {
        let target = self.nodes.node(to)?;
        // A growable export may be giving the node another size.
        self.nodes.resized_of(from)?.await;
        let below = self.nodes.node(from)?;
        let sizes = || (below.geometry().size, target.geometry().size);
        let (size, new) = sizes();
        let above = match size == new {
            true => BitmapsAbove::default(),
            false => self.can_grow(from, size, new).map_err(|why| {
                DaemonError::new(format!("'{to}' has {new} bytes, and '{from}' has {size}{why}"))
            })?,
        };
        let held = self.hold_for(&above).await;
        let users = drain(users).await.map_err(DaemonError::new)?;
        if sizes() != (size, new) {
            return Err(DaemonError::new(format!("'{from}' has been given another size")));
        }
        // After the move, a flush by the users reaches only the image above.
        let node = self.nodes.node(from)?;
        if !node.geometry().read_only {
            let channel = node.open_channel(&self.control).map_err(DaemonError::new)?;
            flush_for_command(&channel).await.map_err(|errno| {
                DaemonError::new(format!("flush of '{from}' failed: {}", errno.desc()))
            })?;
        }
        let _moving = self.agenda.moving();
        users.point_to(&target).await.map_err(DaemonError::new)?;
        above.resize();
        let before = std::mem::replace(&mut self.inventory, inventory);
        let recorded = self.record().await;
        if recorded.is_err() {
            self.inventory = before;
            let node = self.nodes.node(from)?;
            users.point_to(&node).await.map_err(DaemonError::new)?;
            above.resize();
            // The new file may be in place, if only the fsync of its folder failed.
            let _ = self.record().await;
        }
        drop(held);
        recorded
    }

    /// Checks that an overlay of another size can be put above a node. Returns the bitmaps of the nodes above that get its
    /// size. An error follows the two sizes; it is empty if the overlay is smaller.
    fn can_grow(&self, node: &str, size: u64, new: u64) -> Result<BitmapsAbove, String> {
        if new < size {
            return Err(String::new());
        }
        self.inventory.check_new_size(node).map_err(|error| format!(": {}", error.message))?;
        let above = self.nodes.bitmaps_above(node);
        above.check(new).map_err(|error| format!(": {error}"))?;
        Ok(above)
    }

    /// Holds the requests of all users, if there are bitmaps to resize.
    async fn hold_for(&self, above: &BitmapsAbove) -> Option<HeldEdges> {
        match above.is_empty() {
            true => None,
            false => Some(self.nodes.hold_all().await),
        }
    }
}

/// Makes an image.
async fn make(
    host: &dyn Host,
    path: &Path,
    create: CreateQcow2,
    mounts: OwnMounts,
) -> Result<(), DaemonError> {
    let path = path.to_owned();
    let work = move || create_qcow2_beside(&path, &create, &mounts);
    let made = on_a_thread(host, "create", work).await;
    Ok(made.map_err(DaemonError::new)??)
}

/// Syncs the folder of the file. An error has the name of the failed call.
fn sync_folder(file: &Path) -> Result<(), (&'static str, io::Error)> {
    let open = || {
        // The file may be a link.
        let file = fs::canonicalize(file)?;
        File::open(file.parent().unwrap_or(Path::new("/")))
    };
    open().map_err(|error| ("opening", error))?.sync_all().map_err(|error| ("fsync of", error))
}
