//! `block-stream` and `block-commit`: jobs on chains of images.

use std::ops::Range;
use std::sync::Arc;

use block::driver::Layer;
use block::job::{Backup, Bitmap, MirrorTop};
use block::node::{BackingName, BlockNode};
use control::qmp::{ErrorClass, QmpError};
use control::{ChainUse, Steady};

use super::super::bitmaps::check_parts;
use super::super::{Daemon, DaemonError, nodes};
use super::job::{ChainEnd, Copying, How, Parts};
use super::options::{CopyOptions, JobOptions};
use super::start::{BACKUP_BUF_SIZE, CLUSTER, Ends, NOT_CREATED, negative_speed};
use super::worker::{self, MirrorTask};

/// A node of a chain, by either of the names that commands accept.
#[derive(Default)]
pub(in super::super) struct ImageName {
    /// The image's file name.
    pub(in super::super) file: Option<String>,
    /// The node name.
    pub(in super::super) node: Option<String>,
}

/// Options of `block-stream` and `block-commit`.
pub(in super::super) struct ChainOptions {
    /// Options of every copy. `device` is the topmost image of the chain.
    pub(in super::super) copy: CopyOptions,
    /// The image below the merged images. The chain keeps this image.
    pub(in super::super) base: ImageName,
    /// Stream only: the lowest image that is merged, by node name.
    pub(in super::super) bottom: Option<String>,
    /// Commit only: the topmost image that is committed.
    pub(in super::super) top: ImageName,
    /// The name of the base in the header of the image above.
    pub(in super::super) backing_file: Option<String>,
    /// `backing-mask-protocol`: the base has the format `raw` there if it has none.
    pub(in super::super) masks_protocol: bool,
}

impl Default for ChainOptions {
    fn default() -> Self {
        ChainOptions {
            copy: CopyOptions { job: JobOptions::default(), ..CopyOptions::default() },
            base: ImageName::default(),
            bottom: None,
            top: ImageName::default(),
            backing_file: None,
            masks_protocol: false,
        }
    }
}

fn refused(desc: impl Into<String>) -> QmpError {
    QmpError::generic(desc)
}

fn missing(device: &str, name: &str) -> QmpError {
    refused(format!("Cannot find device='{device}' nor node-name='{name}'"))
}

/// A depth below the last image of every chain.
const ALL: u32 = u32::MAX;

/// Returns the depth of the image at index `place` behind another image. The other image has depth
/// 1, index 0 has depth 2.
fn depth(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(ALL).saturating_add(2)
}

fn intermediate(node: &str, readable: bool) -> Steady<'_> {
    Steady { node, readable, role: Some("intermediate node") }
}

impl Daemon {
    /// `block-stream`.
    pub(in super::super) async fn start_stream(
        &mut self,
        options: ChainOptions,
    ) -> Result<(), QmpError> {
        let ChainOptions { mut copy, base, bottom, backing_file, masks_protocol, .. } = options;
        for (left, right, words) in [
            (base.file.is_some(), base.node.is_some(), "'base' and 'base-node'"),
            (base.file.is_some(), bottom.is_some(), "'base' and 'bottom'"),
            (bottom.is_some(), base.node.is_some(), "'bottom' and 'base-node'"),
        ] {
            if left && right {
                return Err(refused(format!("{words} cannot be specified at the same time")));
            }
        }
        let top = copy.device.clone();
        self.is_no_filter(&top)?;
        self.nodes.node(&top).map_err(|_| missing(&top, &top))?;
        // A stream to a filter works on the image below the filter, and on that image's chain.
        let filters = self.nodes.filtered(&top);
        let device = filters.last().unwrap_or(&top).clone();
        let chain = self.nodes.chain(&device);
        let place = match (base.file, base.node, bottom) {
            (Some(file), ..) => Some(self.find_file(&chain, &file)?),
            (_, Some(name), _) => {
                self.nodes.node(&name).map_err(|_| missing("", &name))?;
                let place = chain.iter().position(|other| *other == name);
                let message = format!("Node '{name}' is not a backing image of '{device}'");
                Some(place.ok_or_else(|| refused(message))?)
            }
            (_, _, Some(name)) => {
                self.nodes.node(&name).map_err(|_| missing("", &name))?;
                let place = chain.iter().position(|other| *other == name).map(|place| place + 1);
                let place = place.or_else(|| (name == device).then_some(0));
                let message = format!("Node '{name}' is not in a chain starting from '{device}'");
                place.ok_or_else(|| refused(message)).map(Some)?
            }
            (None, None, None) => None,
        };
        let place = place.filter(|place| *place < chain.len());
        if backing_file.is_some() && place.is_none() {
            return Err(refused("backing file specified, but streaming the entire chain"));
        }
        let dropped = chain.get(..place.unwrap_or(chain.len())).unwrap_or_default().to_vec();
        let base = place.and_then(|place| chain.get(place)).cloned();
        self.check_chain_job(&copy)?;
        let used: Vec<_> = [&device].into_iter().chain(&chain).cloned().collect();
        let (id, filter) = (&copy.job.id, Some(copy.filter()));
        let own: Vec<_> = [&device].into_iter().chain(&dropped).cloned().collect();
        let chain_use = ChainUse {
            images: used.clone(),
            links: own.clone(),
            own,
            overlay: None,
            dropped: dropped.clone(),
            base: base.clone(),
            writes: Some(device.clone()),
        };
        let inventory = self.inventory.with_chain_job(id, "stream", &device, chain_use, filter);
        let mut inventory = inventory.map_err(DaemonError::from)?;
        let steady = filters.iter().chain(&dropped).map(|node| intermediate(node, true));
        self.check_steady(&copy, "stream", &used, &steady.collect::<Vec<_>>())?;
        let name = self.filter_name(&mut copy, NOT_CREATED)?;
        let size = self.nodes.node(&device).map_err(DaemonError::from)?.geometry().size;
        let size = if chain.is_empty() { 0 } else { size };
        check_parts(size, CLUSTER)?;
        let end = ChainEnd {
            name: base
                .as_deref()
                .map(|base| self.backing_name(base, backing_file, masks_protocol))
                .transpose()?,
            overlay: (!chain.is_empty()).then(|| device.clone()),
            base,
            dropped,
            read_only_again: self.make_writable(&device).await?,
        };
        if end.read_only_again.is_some() {
            inventory = inventory.with_writable(&device);
        }
        copy.device.clone_from(&device);
        copy.target.clone_from(&device);
        let backup = Backup::stream(size, CLUSTER, place.map_or(ALL, depth));
        let ends = self.chain_ends(&device, &device, size)?;
        let below = self.nodes.edge_below_filter(&device).map_err(DaemonError::from)?;
        let filter: Arc<dyn BlockNode> = Arc::new(backup.filter(name, below, ends.target.clone()));
        let task = worker::Task::Backup(backup.clone(), false);
        let how = How::Parts(Parts::Stream(end), backup, size);
        self.start_copy(copy, ends, inventory, Some(filter), how, task, BACKUP_BUF_SIZE).await
    }

    /// `block-commit`.
    pub(in super::super) async fn start_commit(
        &mut self,
        options: ChainOptions,
    ) -> Result<(), QmpError> {
        let ChainOptions { mut copy, base, top, backing_file, masks_protocol, .. } = options;
        let device = copy.device.clone();
        if self.nodes.node(&device).is_err() && !self.nodes.is_filter(&device) {
            let desc = format!("Device '{device}' not found");
            return Err(QmpError { class: ErrorClass::DeviceNotFound, desc });
        }
        self.check_root(&device)?;
        let chain = self.nodes.chain(&device);
        let whole: Vec<String> = [&device].into_iter().chain(&chain).cloned().collect();
        let top = match (top.node, top.file) {
            (Some(_), Some(_)) => {
                return Err(refused("'top-node' and 'top' are mutually exclusive"));
            }
            (Some(name), None) => {
                self.nodes.node(&name).map_err(|_| missing("", &name))?;
                let place = whole.iter().position(|other| *other == name);
                place
                    .ok_or_else(|| refused(format!("'{name}' is not in this backing file chain")))?
            }
            (None, Some(file)) if nodes::is_filename(&self.nodes, &device, &file) => 0,
            (None, Some(file)) => {
                let place = self.find_file(&chain, &file);
                place.map_err(|_| refused(format!("Top image file {file} not found")))? + 1
            }
            (None, None) => 0,
        };
        let base = match (base.node, base.file) {
            (Some(_), Some(_)) => {
                return Err(refused("'base-node' and 'base' are mutually exclusive"));
            }
            (Some(name), None) => {
                self.nodes.node(&name).map_err(|_| missing("", &name))?;
                let place = whole.iter().position(|other| *other == name);
                place
                    .ok_or_else(|| refused(format!("'{name}' is not in this backing file chain")))?
            }
            (None, Some(file)) => {
                let below = chain.get(top..).unwrap_or_default();
                self.find_file(below, &file)? + top + 1
            }
            (None, None) => whole.len() - 1,
        };
        if base == top {
            return Err(refused("cannot commit an image into itself"));
        }
        let (top_name, base_name) = (whole[top].clone(), whole[base].clone());
        if base < top {
            return Err(refused(format!("'{base_name}' is not in this backing file chain")));
        }
        if backing_file.is_some() && top == 0 {
            return Err(refused("'backing-file' specified, but 'top' is the active layer"));
        }
        // The device's users would move to a node that options cannot refer to.
        let has_users = !self.nodes.edges(&device).is_empty();
        if top == 0 && has_users && base_name.starts_with('#') {
            return Err(refused(format!(
                "'{device}' cannot be replaced by an image without a node name: define the image by \
                 blockdev-add, and refer to it in the option 'backing'"
            )));
        }
        self.check_chain_job(&copy)?;
        let id = &copy.job.id;
        let filter = (top == 0).then(|| copy.filter());
        let part = |images: Range<usize>| whole.get(images).unwrap_or_default().to_vec();
        let overlay = top.checked_sub(1).and_then(|above| whole.get(above));
        let chain_use = ChainUse {
            images: whole.clone(),
            // As in QSD, another job may not have the topmost image, either.
            own: whole[top..=base].iter().chain([&device]).cloned().collect(),
            overlay: overlay.cloned(),
            dropped: part(top..base),
            base: None,
            links: part(top.saturating_sub(1)..base),
            writes: Some(base_name.clone()),
        };
        let inventory = self.inventory.with_chain_job(id, "commit", &top_name, chain_use, filter);
        let mut inventory = inventory.map_err(DaemonError::from)?;
        // The base changes below these images.
        let between = whole.get(top.max(1)..base).unwrap_or_default();
        let mut steady: Vec<_> = between.iter().map(|node| intermediate(node, false)).collect();
        // As in QEMU, other users may write to the base during an active commit.
        if top > 0 {
            steady.push(Steady { node: &base_name, readable: true, role: None });
        }
        self.check_steady(&copy, "commit", &whole, &steady)?;
        let sizes = [&top_name, &base_name].map(|name| self.nodes.node(name));
        let [size, base_size] = sizes.map(|node| node.map_or(0, |node| node.geometry().size));
        check_parts(size, CLUSTER)?;
        if base_size < size {
            let checked = self.inventory.check_growth(&base_name, &whole);
            checked.map_err(|error| self.refused_late(&copy.job.id, DaemonError::from(error)))?;
        }
        if let Some(overlay) = overlay {
            let above = self.nodes.node(overlay).map_or(0, |node| node.geometry().size);
            if size < above.min(base_size) {
                return Err(refused(format!(
                    "'{top_name}' hides what '{base_name}' has beyond its end from '{overlay}', which is \
                     longer: use block-stream"
                )));
            }
        }
        // As in QSD, the name has to be free even if there is no filter.
        let name = self.filter_name(&mut copy, "")?;
        let named = (top > 0).then(|| self.backing_name(&base_name, backing_file, masks_protocol));
        let named = named.transpose()?;
        let read_only_again = self.make_writable(&base_name).await?;
        if base_size < size {
            let resized = self.nodes.resize(&base_name, size, &self.control);
            resized.map_err(DaemonError::from)?.await.map_err(DaemonError::new)?;
        }
        copy.device.clone_from(&top_name);
        copy.target.clone_from(&base_name);
        // The depth counts from the topmost committed image.
        let base_depth = depth(base - top - 1);
        let ends = self.chain_ends(&top_name, &base_name, size)?;
        if top > 0 {
            let end = ChainEnd {
                overlay: overlay.cloned(),
                name: named,
                base: Some(base_name),
                dropped: part(top..base),
                read_only_again,
            };
            let backup = Backup::commit(size, CLUSTER, base_depth);
            let task = worker::Task::Backup(backup.clone(), false);
            let how = How::Parts(Parts::Commit(end), backup, size);
            return self.start_copy(copy, ends, inventory, None, how, task, BACKUP_BUF_SIZE).await;
        }
        inventory = inventory.with_writable(&base_name);
        let dirty = Arc::new(Bitmap::new(size, CLUSTER, false));
        let below = self.nodes.edge_below_filter(&device).map_err(DaemonError::from)?;
        let filter: Arc<dyn BlockNode> = Arc::new(MirrorTop::new(name, below, dirty.clone()));
        let turns = Arc::default();
        let (dirty_too, above) = (dirty.clone(), Some(base_depth));
        let task = MirrorTask { dirty: dirty_too, turns: Arc::clone(&turns), zero: None, above };
        let task = worker::Task::Mirror(task);
        let how = How::Mirror { dirty, turns, kind: "commit", replaces: Some(device) };
        self.start_copy(copy, ends, inventory, Some(filter), how, task, BACKUP_BUF_SIZE).await
    }

    /// Checks that other users of a chain's nodes can bear a job on them.
    fn check_steady(
        &self,
        copy: &CopyOptions,
        kind: &str,
        chain: &[String],
        steady: &[Steady<'_>],
    ) -> Result<(), QmpError> {
        let id = &copy.job.id;
        let checked = self.inventory.check_steady(kind, id, chain, steady);
        checked.map_err(|error| self.refused_late(id, DaemonError::from(error)))
    }

    fn check_chain_job(&mut self, copy: &CopyOptions) -> Result<(), QmpError> {
        self.check_id(&copy.job.id)?;
        match copy.speed < 0 {
            true => Err(self.refused_late(&copy.job.id, negative_speed())),
            false => Ok(()),
        }
    }

    /// Returns the index in a chain of the image with this file name.
    fn find_file(&self, chain: &[String], file: &str) -> Result<usize, QmpError> {
        let is_it = |name: &String| nodes::is_filename(&self.nodes, name, file);
        let place = chain.iter().position(is_it);
        place.ok_or_else(|| refused(format!("Can't find '{file}' in the backing chain")))
    }

    /// Returns the name of `base` for another image's header: `given`, or the file name.
    /// `masks_protocol`: the bytes of a base that has no format are named as `raw`.
    pub(crate) fn backing_name(
        &self,
        base: &str,
        given: Option<String>,
        masks_protocol: bool,
    ) -> Result<BackingName, QmpError> {
        let format = self.nodes.options(base).map(|options| {
            let is_masked = masks_protocol && options.driver.layer() == Layer::Storage;
            if is_masked { "raw" } else { options.driver.kind().name }.to_owned()
        });
        let filename = match given {
            Some(given) => given,
            None => nodes::name_for_header(&self.nodes, base).map_err(refused)?,
        };
        Ok(BackingName { filename, format })
    }

    /// Reopens a node for writing. Returns the node's name if its options say read-only.
    pub(crate) async fn make_writable(&mut self, name: &str) -> Result<Option<String>, QmpError> {
        let was_read_only = self.nodes.options(name).is_some_and(|options| options.read_only);
        self.inventory.check_writable(name).map_err(DaemonError::from)?;
        self.nodes.make_writable(name).await.map_err(DaemonError::from)?;
        if let Some(tracking) = self.nodes.tracking(name) {
            tracking.secure(name, &self.control).await;
        }
        Ok(was_read_only.then(|| name.to_owned()))
    }

    fn chain_ends(&self, source: &str, target: &str, size: u64) -> Result<Ends, QmpError> {
        let users = self.nodes.edges(source);
        let edge = |name| self.nodes.edge_below_filter(name).map_err(DaemonError::from);
        let (source, target) = (edge(source)?, edge(target)?);
        if target.geometry().read_only {
            return Err(refused(format!("Block node '{}' is read-only", target.node().name())));
        }
        Ok(Ends { source, target, users, detours: Vec::new(), size })
    }

    /// Attaches the base to the overlay after all data is copied, and drops the images between.
    ///
    /// The overlay's header changes first: the base that the header names is complete by then. A
    /// crash between the steps leaves either the longer or the shorter chain, and both are valid.
    pub(super) async fn end_chain_job(
        &mut self,
        copying: &Copying,
        end: &ChainEnd,
    ) -> Result<(), DaemonError> {
        let ChainEnd { overlay, base, dropped, name, .. } = end;
        if let Some(overlay) = overlay {
            let _moving = self.agenda.moving();
            let made_writable = self.make_writable(overlay).await;
            let made_writable = made_writable.map_err(|error| DaemonError::new(error.desc))?;
            let named = self.set_backing_name(overlay, name.clone()).await;
            named.map_err(|errno| {
                let why =
                    format!("Could not change the backing file of '{overlay}': {}", errno.desc());
                DaemonError::new(why)
            })?;
            self.nodes.set_backing(overlay, base.as_deref()).await?;
            self.inventory = self.inventory.with_backing(overlay, dropped, base.as_deref());
            if let Some(name) = made_writable {
                self.make_read_only(&name).await;
            }
        }
        self.reset_chain(copying).await;
        self.take_filter_out(copying).await
    }

    /// Makes a node read-only again that the job reopened for writing.
    pub(super) async fn reset_chain(&mut self, copying: &Copying) {
        if let How::Parts(Parts::Stream(end) | Parts::Commit(end), ..) = &copying.how
            && let Some(name) = &end.read_only_again
        {
            self.make_read_only(name).await;
        }
    }

    pub(crate) async fn make_read_only(&mut self, name: &str) {
        self.inventory = self.inventory.with_read_only(name, true);
        if let Err(error) = self.nodes.make_read_only(name).await {
            // The node may stay open for writing: its users do not write.
            log::warn!("node {name}: stays open for writing: {error}");
        }
    }
}
