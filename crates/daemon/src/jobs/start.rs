//! Starts jobs: checks the options and inserts the filter above the source.

use std::future::Future;
use std::sync::Arc;

use block::graph::{Edge, drain};
use block::job::{Backup, Bitmap, CHUNK, Control, CopiesTo, MirrorTop, Turns, WorkerConfig};
use block::node::{BlockNode, cluster_size};
use block::options::BlockdevRef;
use block::{Amendment, Connections, JobFilter, NewImage, OpenError};
use control::qmp::QmpError;
use control::{ChainUse, Inventory, SourceUse, Step};
use event_loop::mailbox;
use options::OptionError;

use super::super::bitmaps::check_parts;
use super::super::{Daemon, DaemonError, Message};
use super::job::{BitmapUse, Copying, How, Job, Open, Parts, Status, Work, tell_status};
use super::options::{
    BackupOptions, BitmapMode, CopyOptions, JobOptions, MirrorOptions, Perf, Sync,
};
use super::worker::{MirrorTask, Order};
use super::{create, worker};

/// Fewest bytes per part of a backup, stream or commit. A backup copies the whole part before a
/// write to the part.
pub(super) const CLUSTER: u64 = 64 << 10;
/// Most bytes of memory for the copies in flight of a backup, stream or commit.
pub(super) const BACKUP_BUF_SIZE: u64 = 16 << 20;

/// Smallest default of a mirror's granularity.
const MIN_GRANULARITY: u64 = 4 << 10;
/// The beginning of QSD's errors about the filters of backups and streams.
pub(super) const NOT_CREATED: &str = "Could not create node: ";
/// The depth of a node's backing image.
const BELOW_TOP: u32 = 2;

pub(super) fn negative_speed() -> QmpError {
    QmpError::generic("Parameter 'speed' expects a non-negative value")
}

/// Checks `x-perf`. Returns bytes per part, most bytes per copy, and bytes of memory.
///
/// Errors have QEMU's wording.
fn check_perf(perf: Perf) -> Result<(u64, u64, u64), QmpError> {
    let Perf { max_workers, max_chunk, min_cluster_size } = perf;
    let most = i64::from(i32::MAX);
    if !(1..=most).contains(&max_workers) {
        return Err(QmpError::generic(format!("max-workers must be between 1 and {most}")));
    }
    let Ok(max_chunk) = u64::try_from(max_chunk) else {
        let why = "max-chunk must be zero (which means no limit) or positive";
        return Err(QmpError::generic(why));
    };
    if min_cluster_size > 0 && !min_cluster_size.is_power_of_two() {
        let why = "Could not create node: Cannot create block-copy-state: min-cluster-size needs to \
                   be a power of 2";
        return Err(QmpError::generic(why));
    }
    let cluster = min_cluster_size.max(CLUSTER);
    if max_chunk > 0 && max_chunk < cluster {
        return Err(QmpError::generic(format!(
            "Required max-chunk ({max_chunk}) is less than backup cluster size ({cluster})"
        )));
    }
    let max_chunk = if max_chunk == 0 { CHUNK } else { max_chunk };
    let memory = max_workers.unsigned_abs().saturating_mul(CHUNK);
    Ok((cluster, max_chunk, memory.min(BACKUP_BUF_SIZE)))
}

/// Checks that a backup may discard parts of its source.
fn check_discard(source: &dyn BlockNode) -> Result<(), QmpError> {
    match source.geometry().read_only && !source.can_forget() {
        true => Err(QmpError::generic("Block node is read-only")),
        false => Ok(()),
    }
}

/// Checks that a target stores data compressed.
fn check_compress(target: &dyn BlockNode) -> Result<(), QmpError> {
    if !target.compresses() {
        // The space is QEMU's.
        return Err(QmpError::generic("Compression is not supported for this drive "));
    }
    Ok(())
}

/// The source and the target of a copy.
pub(super) struct Ends {
    pub(super) source: Arc<Edge>,
    pub(super) target: Arc<Edge>,
    /// All users of the source except the job, and the target if that is an overlay of the source. The filters of
    /// other backups are among them.
    pub(super) users: Vec<Arc<Edge>>,
    /// How the target reads its source, if it does so through filters of other backups.
    pub(super) detours: Vec<Arc<Edge>>,
    pub(super) size: u64,
}

impl Daemon {
    /// `blockdev-create`.
    pub(in super::super) async fn start_create(
        &mut self,
        job: JobOptions,
        mut image: Box<dyn NewImage>,
    ) -> Result<(), QmpError> {
        self.check_id(&job.id)?;
        let (mut own, mut users) = (Vec::new(), Vec::new());
        let made = match self.open_places(&mut *image, &mut own, &mut users).await {
            Ok(inventory) => {
                create::begin(&self.process.host, &self.control, &inventory, &self.nodes, image)
            }
            Err(error) => Err(error),
        };
        let serial = self.begin(job, Work::Image { kind: "create", done: false, own });
        self.await_image(serial, async move {
            let made = made?.await;
            drop(users);
            made
        });
        Ok(())
    }

    /// Opens the nodes that are defined in place for a new image. Their names are added to `own`, and what locks them
    /// to `users`.
    async fn open_places(
        &mut self,
        image: &mut dyn NewImage,
        own: &mut Vec<String>,
        users: &mut Vec<Arc<dyn BlockNode>>,
    ) -> Result<Inventory, OpenError> {
        let of_option = |error: OptionError| OpenError::new(error.to_string());
        let mut inventory = self.inventory.clone();
        for node in image.nodes() {
            let BlockdevRef::Inline(options) = node else { continue };
            let name = self.nodes.filter_name(options.node_name.as_deref())?;
            options.node_name = Some(name.clone());
            inventory = inventory.with(&Step::of_node((**options).clone())).map_err(of_option)?;
            let connections = match self.connect(options) {
                Some(connecting) => connecting.await?,
                None => Connections::default(),
            };
            self.nodes.open_for_a_job(&name, options, connections).await?;
            own.push(name.clone());
            users.push(self.nodes.get(&name)?);
        }
        Ok(inventory)
    }

    /// `x-blockdev-amend`.
    pub(in super::super) fn start_amend(
        &mut self,
        job: JobOptions,
        node: &str,
        driver: &str,
        amendment: Box<dyn Amendment>,
        force: bool,
    ) -> Result<(), QmpError> {
        let Some(info) = self.nodes.info(node) else { return Err(create::not_found(node)) };
        if info.options.driver.kind().name != driver {
            let why = "x-blockdev-amend doesn't support changing the block driver";
            return Err(QmpError::generic(why));
        }
        self.check_id(&job.id)?;
        let images = vec![node.to_owned()];
        let chain = ChainUse { own: images.clone(), images, ..ChainUse::default() };
        let inventory = self
            .inventory
            .with_chain_job(&job.id, "amend", node, chain, None)
            .map_err(DaemonError::from)?;
        let amending =
            create::begin_amend(&self.process.host, &self.nodes, amendment, node, force)?;
        self.inventory = inventory;
        let serial = self.begin(job, Work::Image { kind: "amend", done: false, own: Vec::new() });
        self.await_image(serial, amending);
        Ok(())
    }

    /// Has the job end when the work on its image has ended.
    fn await_image(
        &self,
        serial: u64,
        work: impl Future<Output = Result<(), OpenError>> + 'static,
    ) {
        let mailbox = self.agenda.mailbox.clone();
        self.control.spawn(async move {
            let done = work.await.map_err(|error| error.to_string());
            mailbox.push(Message::ImageDone(serial, done));
        });
    }

    /// Ends a job on an image with the result of its work.
    pub(in super::super) async fn image_done(&mut self, serial: u64, result: Result<(), String>) {
        let Some(mut job) = self.jobs.take(serial) else { return };
        if let Work::Image { done, own, .. } = &mut job.work {
            *done = true;
            // The last first: it may lie above an earlier one.
            while let Some(node) = own.pop() {
                if let Err(error) = self.nodes.remove(&node) {
                    log::warn!(
                        "node '{node}' stays open after the job that it was opened for: {error}"
                    );
                }
            }
        }
        match result {
            Ok(()) => {
                job.enter(Status::Waiting, &self.clients);
                job.enter(Status::Pending, &self.clients);
                self.conclude(&mut job, None).await;
            }
            Err(error) => self.abort(&mut job, Some(error.into())).await,
        }
        self.jobs.put(job);
    }

    /// `blockdev-backup`.
    pub(in super::super) async fn start_backup(
        &mut self,
        options: BackupOptions,
    ) -> Result<(), QmpError> {
        let serial = self.prepare_backup(options).await?;
        self.run_job(serial);
        Ok(())
    }

    /// Prepares a backup, which copies nothing before [`run_job`](Self::run_job). Returns its serial number.
    ///
    /// The backup's moment is this call, while no request of a user is in flight.
    pub(in super::super) async fn prepare_backup(
        &mut self,
        options: BackupOptions,
    ) -> Result<u64, QmpError> {
        let BackupOptions { mut copy, on_cbw_error, bitmap, bitmap_mode, compress, perf } = options;
        let (mut cluster, max_chunk, buf_size) = check_perf(perf)?;
        let ends = self.ends(&copy, "backup", "Source and target cannot be the same")?;
        // The target's clusters are copied whole: its backing image may be left out, and could not fill them.
        cluster = cluster.max(cluster_size(&ends.target.node()).unwrap_or(0));
        if compress {
            check_compress(&*ends.target)?;
        }
        if copy.discard_source {
            check_discard(&*self.nodes.node(&copy.device).map_err(DaemonError::from)?)?;
        }
        check_parts(ends.size, cluster)?;
        let selects = matches!(copy.sync, Sync::Incremental | Sync::Bitmap);
        let used = match bitmap {
            Some(name) => {
                let bitmap = self.bitmap_for_backup(&copy.device, &name)?;
                let mode = bitmap_mode.unwrap_or(BitmapMode::OnSuccess);
                Some(BitmapUse::new(bitmap, mode, selects))
            }
            None => None,
        };
        let backup = match selects {
            true => Backup::of_nothing(ends.size, cluster, on_cbw_error),
            false => Backup::new(ends.size, cluster, on_cbw_error),
        };
        let backup = backup.with_max_chunk(max_chunk);
        let backup = if copy.sync == Sync::Top { backup.of_top() } else { backup };
        let backup = if compress { backup.compressed() } else { backup };
        let backup = if copy.discard_source { backup.discarding() } else { backup };
        let name = self.filter_name(&mut copy, NOT_CREATED)?;
        let below = self.nodes.edge_below_filter(&copy.device).map_err(DaemonError::from)?;
        let filter = backup.filter(name, below, ends.target.clone());
        let task = worker::Task::Backup(backup.clone(), copy.sync == Sync::None);
        let how = How::Parts(Parts::Backup(used), backup, ends.size);
        let inventory = self.inventory_with_copy(&copy, "backup")?;
        let filter: Arc<dyn BlockNode> = Arc::new(filter);
        self.prepare_copy(copy, ends, inventory, Some(filter), how, task, buf_size).await
    }

    /// Checks that a job may replace a node, or change the chain below it.
    ///
    /// # Errors
    ///
    /// Another node needs it as it is. As in QSD, a job's filter is a node above, too.
    pub(crate) fn check_root(&self, name: &str) -> Result<(), QmpError> {
        match self.nodes.is_root(name) {
            true => Ok(()),
            false => Err(QmpError::generic("Need a root block node")),
        }
    }

    /// `blockdev-mirror`.
    pub(in super::super) async fn start_mirror(
        &mut self,
        options: MirrorOptions,
    ) -> Result<(), QmpError> {
        let MirrorOptions { mut copy, replaces, granularity, buf_size, blocking, target_is_zero } =
            options;
        self.check_root(&copy.device)?;
        let ends = self.ends(&copy, "mirror", "Can't mirror node into itself")?;
        if ends.size != ends.target.geometry().size {
            self.fail_mirror(copy).await;
            return Ok(());
        }
        let replaces = replaces.unwrap_or_else(|| copy.device.clone());
        if self.nodes.node(&replaces).is_err() {
            let desc = format!("Failed to find node with node-name='{replaces}'");
            return Err(QmpError::generic(desc));
        }
        // The contents of a node other than the source would change abruptly for its users.
        if replaces != copy.device {
            return Err(QmpError::generic(format!(
                "Cannot replace '{replaces}' by a node mirrored from '{}': only '{}' itself",
                copy.device, copy.device
            )));
        }
        let target_cluster = cluster_size(&ends.target.node());
        let granularity = match (granularity, target_cluster) {
            (0, Some(cluster)) => cluster.clamp(MIN_GRANULARITY, CLUSTER),
            (0, None) => CLUSTER,
            (given, _) => given,
        };
        // As in a backup. A full copy fills all clusters anyway.
        let (granularity, is_full) = match copy.sync {
            Sync::None | Sync::Top => (granularity.max(target_cluster.unwrap_or(0)), false),
            Sync::Full | Sync::Incremental | Sync::Bitmap => (granularity, true),
        };
        check_parts(ends.size, granularity)?;
        let bits = |set| Arc::new(Bitmap::new(ends.size, granularity, set));
        let (dirty, zero) = (bits(is_full), target_is_zero.then(|| bits(true)));
        let name = self.filter_name(&mut copy, "")?;
        let below = self.nodes.edge_below_filter(&copy.device).map_err(DaemonError::from)?;
        let turns = Arc::new(Turns::default());
        if blocking {
            turns.set_blocking();
        }
        let filter = MirrorTop::new(name, below, dirty.clone());
        let to = CopiesTo {
            target: ends.target.clone(),
            turns: turns.clone(),
            whole: !is_full,
            zero: zero.clone(),
        };
        let filter: Arc<dyn BlockNode> = Arc::new(filter.copying_to(to));
        let above = (copy.sync == Sync::Top).then_some(BELOW_TOP);
        let task = MirrorTask { dirty: dirty.clone(), turns: turns.clone(), zero, above };
        let task = worker::Task::Mirror(task);
        let how = How::Mirror { dirty, turns, kind: "mirror", replaces: Some(replaces) };
        let inventory = self.inventory_with_copy(&copy, "mirror")?;
        self.start_copy(copy, ends, inventory, Some(filter), how, task, buf_size).await
    }

    /// Reports different sizes by a failed job. The command succeeds, as in QSD.
    async fn fail_mirror(&mut self, copy: CopyOptions) {
        let dirty = Arc::new(Bitmap::new(0, CLUSTER, false));
        let how = How::Mirror { dirty, turns: Arc::default(), kind: "mirror", replaces: None };
        let serial = self.begin(copy.job.clone(), Work::Copy(Box::new(Copying::new(copy, how))));
        let Some(mut job) = self.jobs.take(serial) else { return };
        let error = "Source and target image have different sizes".to_owned();
        self.abort(&mut job, Some(error.into())).await;
        if job.status != Status::Null {
            self.jobs.put(job);
        }
    }

    fn inventory_with_copy(
        &self,
        copy: &CopyOptions,
        kind: &'static str,
    ) -> Result<Inventory, QmpError> {
        let CopyOptions { job, device, target, discard_source, .. } = copy;
        let (inventory, filter) = (&self.inventory, copy.filter());
        let source_use = SourceUse { discards: *discard_source, of_top: copy.sync == Sync::Top };
        let inventory = inventory.with_job(&job.id, kind, device, target, &filter, source_use);
        Ok(inventory.map_err(DaemonError::from)?)
    }

    pub(super) fn check_id(&mut self, id: &str) -> Result<(), QmpError> {
        if !control::is_identifier(id) {
            return Err(QmpError::generic(format!("Invalid job ID '{id}'")));
        }
        match self.jobs.find(id) {
            Some(_) => Err(QmpError::generic(format!("Job ID '{id}' already in use"))),
            None => Ok(()),
        }
    }

    /// Reports a job that is refused after QEMU would have created it, and returns the error.
    pub(super) fn refused_late(&self, id: &str, error: impl Into<QmpError>) -> QmpError {
        for status in [Status::Created, Status::Null] {
            tell_status(id, status, &self.clients);
        }
        error.into()
    }

    /// Returns the name of a job's filter: the given one, or a generated one, which is in `copy` from then on.
    ///
    /// `of`: what QSD's error begins with.
    pub(super) fn filter_name(
        &mut self,
        copy: &mut CopyOptions,
        of: &str,
    ) -> Result<String, QmpError> {
        let name = self.nodes.filter_name(copy.filter_node_name.as_deref());
        let name = name.map_err(|error| QmpError::generic(format!("{of}{error}")))?;
        copy.filter_node_name = Some(name.clone());
        Ok(name)
    }

    /// Checks the options that backup and mirror share, and opens source and target.
    fn ends(
        &mut self,
        copy: &CopyOptions,
        kind: &'static str,
        same: &str,
    ) -> Result<Ends, QmpError> {
        for name in [&copy.device, &copy.target] {
            // Below, the filter of a job is refused as in use.
            if !self.nodes.is_filter(name) {
                self.nodes.node(name).map_err(DaemonError::from)?;
            }
        }
        if copy.device == copy.target {
            return Err(QmpError::generic(same));
        }
        self.check_id(&copy.job.id)?;
        if copy.speed < 0 {
            return Err(self.refused_late(&copy.job.id, negative_speed()));
        }
        self.inventory_with_copy(copy, kind)?;
        let size = |name| self.nodes.node(name).map(|node| node.geometry().size);
        let sizes = [size(&copy.device), size(&copy.target)];
        if kind == "backup" && matches!(&sizes, [Ok(source), Ok(target)] if source != target) {
            return Err(QmpError::generic("Source and target image have different sizes"));
        }
        // The permissions decide on other users of a backup's target. A mirror's replaces the source at the end.
        if kind == "mirror" && !self.nodes.edges(&copy.target).is_empty() {
            return Err(QmpError::generic(format!(
                "Node '{}' is busy: it is used by an export or by another node",
                copy.target
            )));
        }
        let mut users = self.nodes.edges(&copy.device);
        let below_target = self.nodes.backing_edges(&copy.target);
        users.retain(|user| !below_target.iter().any(|edge| Arc::ptr_eq(edge, user)));
        let filters = self.nodes.filters(&copy.device);
        let is_detour = |edge: &Arc<Edge>| {
            let below = edge.node();
            filters.iter().any(|filter| filter.name() == below.name())
        };
        let detours = below_target.into_iter().filter(is_detour).collect();
        let target = self.nodes.edge_below_filter(&copy.target).map_err(DaemonError::from)?;
        if target.geometry().read_only {
            let error = QmpError::generic(format!("Block node '{}' is read-only", copy.target));
            return Err(match kind {
                "mirror" => self.refused_late(&copy.job.id, error),
                _ => error,
            });
        }
        let source = self.nodes.edge_below_filter(&copy.device).map_err(DaemonError::from)?;
        let size = source.geometry().size;
        Ok(Ends { source, target, users, detours, size })
    }

    /// Adds a job in status `running` and returns its serial number.
    fn begin(&mut self, options: JobOptions, work: Work) -> u64 {
        let serial = self.create(options, work);
        self.run_job(serial);
        serial
    }

    /// Runs a job that was created.
    pub(in super::super) fn run_job(&mut self, serial: u64) {
        let Some(job) = self.jobs.jobs.iter_mut().find(|job| job.serial == serial) else { return };
        job.enter(Status::Running, &self.clients);
        if let Some(open) = job.copying().and_then(|copying| copying.open.as_ref()) {
            // Fails only if the loop has stopped, as at the daemon's end.
            let _ = open.orders.send(Order::Begin);
        }
    }

    /// Adds a job in status `created` and returns its serial number.
    fn create(&mut self, options: JobOptions, work: Work) -> u64 {
        let serial = self.jobs.next;
        self.jobs.next += 1;
        let status = Status::Created;
        let mut job =
            Job { serial, options, status, error: None, cancelled: false, group: None, work };
        job.enter(Status::Created, &self.clients);
        self.jobs.put(job);
        serial
    }

    /// Starts a job that copies. `inventory` contains the job. `filter` is inserted above the source.
    #[expect(clippy::too_many_arguments, reason = "what jobs differ in")]
    pub(super) async fn start_copy(
        &mut self,
        copy: CopyOptions,
        ends: Ends,
        inventory: Inventory,
        filter: Option<Arc<dyn BlockNode>>,
        how: How,
        task: worker::Task,
        buf_size: u64,
    ) -> Result<(), QmpError> {
        let prepared = self.prepare_copy(copy, ends, inventory, filter, how, task, buf_size);
        let serial = prepared.await?;
        self.run_job(serial);
        Ok(())
    }

    /// As [`start_copy`](Self::start_copy), but nothing is copied before [`run_job`](Self::run_job). Returns the
    /// job's serial number.
    #[expect(clippy::too_many_arguments, reason = "what jobs differ in")]
    async fn prepare_copy(
        &mut self,
        copy: CopyOptions,
        ends: Ends,
        inventory: Inventory,
        filter: Option<Arc<dyn BlockNode>>,
        mut how: How,
        task: worker::Task,
        buf_size: u64,
    ) -> Result<u64, QmpError> {
        let control = Arc::new(Control::new(copy.speed.unsigned_abs()));
        if let Some(filter) = &filter {
            // The filter's target must not lead to the filter. These edges lie above those of other filters.
            let detours = drain(ends.detours).await.map_err(DaemonError::new)?;
            let drained = drain(ends.users).await.map_err(DaemonError::new)?;
            let source = self.nodes.node(&copy.device).map_err(DaemonError::from)?;
            detours.point_to(&source).await.map_err(DaemonError::new)?;
            drop(detours);
            drained.point_to(filter).await.map_err(DaemonError::new)?;
            if let How::Parts(Parts::Backup(Some(used)), backup, size) = &mut how {
                used.begin(backup);
                *size = backup.left();
            }
            let filter = listed(filter.clone(), &how, &copy.target);
            self.nodes.add_filter(&copy.device, filter);
        }
        self.inventory = inventory;
        let (reports, from_worker) = mailbox::channel();
        let config = WorkerConfig {
            source: ends.source,
            target: ends.target,
            control: control.clone(),
            reports,
            on_source_error: copy.on_source_error,
            on_target_error: copy.on_target_error,
            buf_size,
        };
        let serial = self.jobs.next;
        let closed =
            worker::listen(&self.control, serial, from_worker, self.agenda.mailbox.clone());
        let started = match self.threads.handles(&[]) {
            Ok(threads) => match threads.first() {
                Some(thread) => worker::start(thread, config, task).await,
                None => Err(DaemonError::new("there is no I/O thread")),
            },
            Err(error) => Err(error),
        };
        let id = copy.job.id.clone();
        let job = copy.job.clone();
        let mut copying = Copying { control, ..Copying::new(copy, how) };
        match started {
            Ok(orders) => {
                copying.open = Some(Open { filter, orders, closed });
                Ok(self.create(job, Work::Copy(Box::new(copying))))
            }
            Err(error) => {
                let (orders, _) = mailbox::channel();
                copying.open = Some(Open { filter, orders, closed });
                self.take_filter_out(&copying).await?;
                if let How::Parts(Parts::Backup(Some(used)), backup, _) = &mut copying.how {
                    used.end(backup, false);
                }
                self.inventory = self.inventory.without_job(&id);
                Err(error.into())
            }
        }
    }
}

/// Returns a job's filter as `query-named-block-nodes` lists it: by the driver that it has in QEMU.
fn listed(node: Arc<dyn BlockNode>, how: &How, target: &str) -> JobFilter {
    let (driver, role, target) = match how {
        How::Parts(Parts::Backup(_), ..) => ("copy-before-write", "file", Some(target.to_owned())),
        How::Parts(Parts::Stream(_), ..) => ("copy-on-read", "file", None),
        How::Parts(Parts::Commit(_), ..) => ("commit_top", "backing", None),
        How::Mirror { .. } => ("mirror_top", "backing", None),
    };
    JobFilter { node, driver, role, target }
}
