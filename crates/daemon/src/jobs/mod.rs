//! Jobs: commands start them, workers run them, and their end changes the inventory.

mod chain;
mod create;
mod job;
mod options;
mod start;
mod worker;

use std::sync::Arc;

use block::graph::drain;
use block::job::{Backup, End, Failure, OnError, Report, Side};
use block::node::{BlockNode, NoWaiting};
use control::qmp::QmpError;
use control::qmp::events::{
    BLOCK_JOB_CANCELLED, BLOCK_JOB_COMPLETED, BLOCK_JOB_ERROR, BLOCK_JOB_PENDING, BLOCK_JOB_READY,
    EventRow,
};
use event_loop::oneshot;
use nix::errno::Errno;
use serde_json::{Value as Json, json};

pub(super) use self::chain::ChainOptions;
use self::job::{Copying, How, Job, Open, Parts, Status, Stopped, Why};
pub(super) use self::options::{
    BackupOptions, BitmapMode, CopyOptions, JobOptions, JobVerb, MirrorOptions, Perf, Sync,
};
use self::worker::Order;
use super::errno::strerror;
use super::statistics::JobStatistics;
use super::{Daemon, DaemonError};

/// How a job that copies is doing, with its serial number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    Runs {
        serial: u64,
    },
    /// An error has paused it.
    Paused {
        serial: u64,
    },
}

/// The jobs, in the order of their start.
#[derive(Default)]
pub(super) struct Jobs {
    jobs: Vec<Job>,
    next: u64,
}

impl Jobs {
    /// Returns an error if a job keeps the daemon from being replaced.
    pub(super) fn check_replaceable(&self) -> Result<(), String> {
        if self.jobs.iter().any(|job| job.status != Status::Concluded) {
            return Err("a job is running: wait for its end, or cancel it".into());
        }
        let Some(job) = self.jobs.first() else { return Ok(()) };
        Err(format!("job '{}' has ended: read its result, then send job-dismiss", job.options.id))
    }

    /// Describes all jobs as `query-jobs` does. As in QEMU, the newest is first.
    pub(super) fn info(&self) -> Json {
        self.jobs.iter().rev().map(Job::info).collect()
    }

    /// Describes the jobs that copy as `query-block-jobs` does. As in QEMU, the newest is first.
    pub(super) fn block_info(&self) -> Json {
        self.jobs.iter().rev().filter_map(Job::block_info).collect()
    }

    /// Returns the numbers of the jobs that copy.
    pub(super) fn statistics(&self) -> Vec<JobStatistics> {
        let copying = self.jobs.iter().filter(|job| job.copying().is_some());
        let numbers = copying.map(|job| {
            let (done_bytes, total_bytes) = job.progress();
            JobStatistics { id: job.options.id.clone(), kind: job.kind(), done_bytes, total_bytes }
        });
        numbers.collect()
    }

    /// Returns the parts of a job that copies each part once, and their bytes.
    pub(super) fn parts(&mut self, id: &str) -> Option<(Backup, u64)> {
        match &self.find(id)?.copying()?.how {
            How::Parts(_, backup, size) => Some((backup.clone(), *size)),
            How::Mirror { .. } => None,
        }
    }

    /// Returns how a job that copies is doing. `None`: there is no such job.
    pub(super) fn health(&mut self, id: &str) -> Option<Health> {
        let job = self.find(id)?;
        let copying = job.copying()?;
        Some(match copying.user_paused && copying.io_status != "ok" {
            true => Health::Paused { serial: job.serial },
            false => Health::Runs { serial: job.serial },
        })
    }

    fn find(&mut self, id: &str) -> Option<&mut Job> {
        self.jobs.iter_mut().find(|job| job.options.id == id)
    }

    fn take(&mut self, serial: u64) -> Option<Job> {
        let place = self.jobs.iter().position(|job| job.serial == serial)?;
        Some(self.jobs.remove(place))
    }

    /// Returns the serial numbers of the jobs that end together. As in QEMU, the newest is first.
    fn of_group(&self, group: u64) -> Vec<u64> {
        let members = self.jobs.iter().rev().filter(|job| job.group == Some(group));
        members.map(|job| job.serial).collect()
    }

    /// Inserts a job at its place in the order of start.
    fn put(&mut self, job: Job) {
        let place = self.jobs.partition_point(|other| other.serial < job.serial);
        self.jobs.insert(place, job);
    }
}

impl Daemon {
    /// Sends an order to a job: `job-*`.
    pub(super) async fn tell_job(&mut self, id: &str, verb: JobVerb) -> Result<(), QmpError> {
        let Some(job) = self.jobs.find(id) else {
            return Err(QmpError::generic("Job not found"));
        };
        let serial = job.serial;
        self.tell_by_serial(serial, verb).await
    }

    /// Sends an order to a job that copies: `block-job-*`.
    pub(super) async fn tell_block_job(&mut self, id: &str, verb: JobVerb) -> Result<(), QmpError> {
        let found = self.jobs.find(id).filter(|job| job.copying().is_some());
        let Some(job) = found else { return Err(QmpError::block_job_not_found(id)) };
        let serial = job.serial;
        if let Some(copying) = job.copying()
            && copying.user_paused
            && verb == (JobVerb::Cancel { force: false })
        {
            let desc = format!("The block job for device '{id}' is currently paused");
            return Err(QmpError::generic(desc));
        }
        self.tell_by_serial(serial, verb).await
    }

    async fn tell_by_serial(&mut self, serial: u64, verb: JobVerb) -> Result<(), QmpError> {
        let Some(mut job) = self.jobs.take(serial) else { return Ok(()) };
        let told = self.tell_to(&mut job, verb).await;
        let group = job.group;
        if job.status != Status::Null {
            self.jobs.put(job);
        }
        if let (Ok(()), JobVerb::Finalize, Some(group)) = (&told, verb, group) {
            self.finalize_group(group).await;
        }
        told
    }

    async fn tell_to(&mut self, job: &mut Job, verb: JobVerb) -> Result<(), QmpError> {
        if verb == JobVerb::Resume && !job.copying().is_some_and(|copying| copying.user_paused) {
            return Err(QmpError::generic("Can't resume a job that was not paused"));
        }
        job.check(verb)?;
        match verb {
            JobVerb::Cancel { force } => {
                let at = job.status;
                if at == Status::Pending || at == Status::Waiting {
                    self.abort(job, None).await;
                    return Ok(());
                }
                if job.copying().is_some_and(|copying| copying.user_paused) {
                    self.set_paused(job, false);
                }
                if let Some(copying) = job.copying_mut() {
                    match &mut copying.how {
                        How::Mirror { replaces, .. } if at == Status::Ready && !force => {
                            *replaces = None;
                            copying.control.complete();
                        }
                        _ => self.cancel_copying(copying),
                    }
                }
            }
            JobVerb::Pause => {
                if job.copying().is_some_and(|copying| copying.user_paused) {
                    return Err(QmpError::generic("Job is already paused"));
                }
                self.set_paused(job, true);
            }
            JobVerb::Resume => self.set_paused(job, false),
            JobVerb::SetSpeed(speed) => {
                let Ok(bytes) = u64::try_from(speed) else {
                    return Err(start::negative_speed());
                };
                if let Some(copying) = job.copying_mut() {
                    copying.speed = speed;
                    copying.control.set_speed(bytes);
                }
            }
            JobVerb::Change { blocking } => {
                let how = job.copying().map(|copying| &copying.how);
                let Some(How::Mirror { turns, kind: "mirror", .. }) = how else {
                    return Err(QmpError::generic("Job type does not support change"));
                };
                match (blocking, turns.is_blocking()) {
                    (Some(true), false) => turns.set_blocking(),
                    (Some(false), true) => {
                        let why = "Change to copy mode 'background' is not implemented";
                        return Err(QmpError::generic(why));
                    }
                    (Some(_) | None, _) => {}
                }
            }
            JobVerb::Complete => {
                if let Some(copying) = job.copying() {
                    copying.control.complete();
                }
            }
            // The jobs of a group end after this one is back in the list.
            JobVerb::Finalize if job.group.is_some() => {}
            JobVerb::Finalize => self.finalize(job).await,
            JobVerb::Dismiss => job.enter(Status::Null, &self.clients),
        }
        Ok(())
    }

    fn set_paused(&self, job: &mut Job, paused: bool) {
        let status = match (job.status, paused) {
            (Status::Running, true) => Status::Paused,
            (Status::Ready, true) => Status::Standby,
            (Status::Paused, false) => Status::Running,
            (Status::Standby, false) => Status::Ready,
            (other, _) => other,
        };
        let Some(copying) = job.copying_mut() else { return };
        copying.user_paused = paused;
        copying.control.set_paused(paused);
        if !paused {
            copying.io_status = "ok";
        }
        if status != job.status {
            job.enter(status, &self.clients);
        }
    }

    /// Handles a report of a job's worker.
    pub(super) async fn job_reports(&mut self, serial: u64, report: Report) {
        // Ignore late reports of a dismissed job.
        let Some(mut job) = self.jobs.take(serial) else { return };
        match report {
            Report::Ready => {
                let paused = job.copying().is_some_and(|copying| copying.user_paused);
                let status = if paused { Status::Standby } else { Status::Ready };
                job.enter(status, &self.clients);
                job.tell(&BLOCK_JOB_READY, &self.clients);
            }
            Report::Error(failure, action) => self.tell_of_error(&mut job, failure, action),
            Report::Ended(_) if matches!(job.status, Status::Aborting | Status::Concluded) => {}
            Report::Ended(Ok(End::Cancelled)) => self.abort(&mut job, None).await,
            // The last part may have been copied meanwhile, and what was in flight may have failed.
            Report::Ended(_) if job.is_cancelled() => self.abort(&mut job, None).await,
            Report::Ended(Ok(End::Copied)) => match self.finish_mirror(&mut job).await {
                Ok(true) => {
                    job.enter(Status::Waiting, &self.clients);
                    if job.group.is_none() {
                        self.enter_pending(&mut job);
                        if job.options.auto_finalize {
                            self.finalize(&mut job).await;
                        }
                    }
                    if let Some(copying) = job.copying_mut() {
                        // Users do not wait for `job-finalize`.
                        copying.stopped = None;
                    }
                }
                Ok(false) => {}
                Err(why) => self.abort(&mut job, Some(why)).await,
            },
            Report::Ended(Err(failure)) => {
                let why = failure.map_or_else(|| strerror(Errno::EIO).into(), Why::from);
                self.abort(&mut job, Some(why)).await;
            }
        }
        let waiting = job.group.filter(|_| job.status == Status::Waiting);
        if job.status != Status::Null {
            self.jobs.put(job);
        }
        if let Some(group) = waiting {
            self.end_group(group).await;
        }
    }

    /// Enters the status in which a client may end the job.
    fn enter_pending(&self, job: &mut Job) {
        job.enter(Status::Pending, &self.clients);
        if !job.options.auto_finalize {
            let data = json!({"type": job.kind(), "id": job.options.id});
            self.clients.tell(&BLOCK_JOB_PENDING, data);
        }
    }

    /// Makes the jobs of a transaction end together. Called before they run.
    pub(super) fn group_jobs(&mut self, serials: &[u64]) {
        let group = serials.first().copied();
        self.jobs.jobs.iter_mut().filter(|job| serials.contains(&job.serial)).for_each(|job| {
            job.group = group;
        });
    }

    /// Ends the jobs of a group, if all have copied what they have to copy.
    ///
    /// As in QEMU, all wait for `job-finalize` if one of them does.
    async fn end_group(&mut self, group: u64) {
        let members = || self.jobs.jobs.iter().filter(|job| job.group == Some(group));
        if members().any(|job| job.status != Status::Waiting) {
            return;
        }
        let is_automatic = members().all(|job| job.options.auto_finalize);
        for serial in self.jobs.of_group(group) {
            let Some(mut job) = self.jobs.take(serial) else { continue };
            self.enter_pending(&mut job);
            self.jobs.put(job);
        }
        if is_automatic {
            self.finalize_group(group).await;
        }
    }

    async fn finalize_group(&mut self, group: u64) {
        // A job that fails at its end takes the rest out of the group.
        while let Some(&serial) = self.jobs.of_group(group).first() {
            let Some(mut job) = self.jobs.take(serial) else { return };
            self.finalize(&mut job).await;
            if job.status != Status::Null {
                self.jobs.put(job);
            }
        }
    }

    /// Ends the jobs of a group, one of which has failed or was cancelled. The copying of all of them was cancelled before:
    /// the report of a worker that still runs ends its job.
    async fn cancel_group(&mut self, group: u64) {
        for serial in self.jobs.of_group(group) {
            let Some(mut job) = self.jobs.take(serial) else { continue };
            if matches!(job.status, Status::Waiting | Status::Pending) {
                job.group = None;
                self.abort(&mut job, None).await;
            } else if job.copying().is_some_and(|copying| copying.user_paused) {
                self.set_paused(&mut job, false);
            }
            if job.status != Status::Null {
                self.jobs.put(job);
            }
        }
    }

    /// Ends the copying. Users' requests do not wait for it. Requests to the target that wait for a server, which may take
    /// long, fail now.
    fn cancel_copying(&self, copying: &mut Copying) {
        copying.control.cancel();
        match &copying.how {
            How::Parts(Parts::Backup(_), backup, _) => backup.give_up(),
            How::Mirror { turns, .. } => turns.give_up(),
            How::Parts(Parts::Stream(_) | Parts::Commit(_), ..) => return,
        }
        if let Ok(target) = self.nodes.node(&copying.target) {
            copying.no_waiting = target.remote_image().and_then(|image| image.stop_waiting());
        }
    }

    fn tell_of_error(&self, job: &mut Job, failure: Failure, action: OnError) {
        let operation = match failure.side {
            Side::Source => "read",
            Side::Target => "write",
        };
        let action_name = match action {
            OnError::Report | OnError::Enospc => "report",
            OnError::Ignore => "ignore",
            OnError::Stop => "stop",
        };
        let data = json!({
            "device": job.options.id,
            "operation": operation,
            "action": action_name,
        });
        self.clients.tell(&BLOCK_JOB_ERROR, data);
        if action == OnError::Stop {
            self.set_paused(job, true);
            if let Some(copying) = job.copying_mut() {
                copying.io_status =
                    if failure.errno == Errno::ENOSPC { "nospace" } else { "failed" };
            }
        }
    }

    /// Applies the job's changes to the inventory and ends the job.
    async fn finalize(&mut self, job: &mut Job) {
        let Some(copying) = job.copying() else { return self.conclude(job, None).await };
        let changed = match &copying.how {
            How::Parts(parts, ..) => {
                let changed = match parts {
                    Parts::Backup(_) => self.take_filter_out(copying).await,
                    Parts::Stream(end) | Parts::Commit(end) => {
                        self.end_chain_job(copying, end).await
                    }
                };
                changed.map_err(Why::from)
            }
            How::Mirror { .. } => match self.finish_mirror(job).await {
                Ok(_) => self.end_mirror(job).await.map_err(Why::from),
                Err(why) => Err(why),
            },
        };
        match changed {
            Ok(()) => self.conclude(job, Some(&BLOCK_JOB_COMPLETED)).await,
            Err(why) => self.abort(job, Some(why)).await,
        }
    }

    /// Drains a mirror's users and lets the worker copy the rest. Other jobs have no rest.
    ///
    /// Returns false if that failed, and the mirror continues: its error policy says so, and it is not pending. Then its users
    /// continue, too.
    async fn finish_mirror(&mut self, job: &mut Job) -> Result<bool, Why> {
        let is_pending = job.status == Status::Pending;
        let Some(copying) = job.copying_mut().filter(|copying| copying.stopped.is_none()) else {
            return Ok(true);
        };
        let (How::Mirror { replaces, .. }, Some(open)) = (&copying.how, &copying.open) else {
            return Ok(true);
        };
        let Some(filter) = &open.filter else { return Ok(true) };
        let busy = DaemonError::new;
        // A replaced node other than the source lies above the source, so its users drain first.
        let elsewhere = match replaces.as_deref().filter(|&name| name != copying.source) {
            Some(name) => Some(drain(self.nodes.edges(name)).await.map_err(busy)?),
            None => None,
        };
        let users = drain(self.nodes.edges(filter.name())).await.map_err(busy)?;
        let (done, is_done) = oneshot::channel();
        open.orders.send(Order::Finish(done)).map_err(DaemonError::new)?;
        let Err((failure, action)) = is_done.await.map_err(DaemonError::new)? else {
            copying.stopped = Some(Stopped { users, elsewhere });
            return Ok(true);
        };
        drop((users, elsewhere));
        let action = if is_pending { OnError::Report } else { action };
        self.tell_of_error(job, failure, action);
        match action {
            OnError::Ignore | OnError::Stop => Ok(false),
            OnError::Report | OnError::Enospc => Err(failure.into()),
        }
    }

    /// Ends a mirror. Its users continue: at the target if they are users of the replaced node, otherwise at the source.
    async fn end_mirror(&mut self, job: &mut Job) -> Result<(), DaemonError> {
        let Some(copying) = job.copying_mut() else { return Ok(()) };
        let Some(Stopped { users, elsewhere }) = copying.stopped.take() else { return Ok(()) };
        let How::Mirror { replaces, .. } = &copying.how else { return Ok(()) };
        let replaces = replaces.as_deref();
        let Some(filter) = copying.open.as_ref().and_then(|open| open.filter.as_ref()) else {
            return Ok(());
        };
        let source = self.nodes.node(&copying.source)?;
        let target = self.nodes.node(&copying.target)?;
        let failed = |error| DaemonError::new(error).of(&copying.target);
        let _moving = self.agenda.moving();
        match (&elsewhere, replaces) {
            (Some(elsewhere), _) => {
                elsewhere.point_to(&target).await.map_err(failed)?;
                users.point_to(&source).await.map_err(failed)?;
            }
            (None, Some(_)) => users.point_to(&target).await.map_err(failed)?,
            (None, None) => users.point_to(&source).await.map_err(failed)?,
        }
        self.nodes.remove_filter(&copying.source, filter.name());
        let Some(replaced) = replaces else { return Ok(()) };
        let inventory = self.inventory.with_replaced(replaced, &copying.target);
        let before = std::mem::replace(&mut self.inventory, inventory);
        // The state file must name the target before the target gets writes that the source lacks.
        if let Err(error) = self.record().await {
            self.inventory = before;
            if let Some(elsewhere) = elsewhere {
                elsewhere.point_to(&self.nodes.node(replaced)?).await.map_err(failed)?;
            }
            users.point_to(&source).await.map_err(failed)?;
            // The new file may be in place, if only the fsync of its folder failed.
            let _ = self.record().await;
            return Err(error);
        }
        Ok(())
    }

    /// Removes the job's filter: users of the filter access what lies below, which is the source or the filter of another
    /// backup.
    async fn take_filter_out(&mut self, copying: &Copying) -> Result<(), DaemonError> {
        let filter = copying.open.as_ref().and_then(|open| open.filter.as_ref());
        let Some(filter) = filter else { return Ok(()) };
        let below = self.nodes.below_filter_of(&copying.source, filter.name())?;
        let users = drain(self.nodes.edges(filter.name())).await.map_err(DaemonError::new)?;
        users.point_to(&below).await.map_err(DaemonError::new)?;
        self.nodes.remove_filter(&copying.source, filter.name());
        Ok(())
    }

    /// Has jobs that copy node `old` copy `new`: their edges have moved.
    pub(super) fn move_jobs(&mut self, old: &str, new: &str) {
        let copyings = self.jobs.jobs.iter_mut().filter_map(Job::copying_mut);
        for copying in copyings.filter(|copying| copying.source == old) {
            new.clone_into(&mut copying.source);
        }
    }

    /// Ends a job that failed (`why`, which is logged) or was cancelled.
    ///
    /// As in QEMU, a job that never ran is dismissed and sends no `BLOCK_JOB_*` event.
    async fn abort(&mut self, job: &mut Job, why: Option<Why>) {
        let group = job.group.take();
        let event = self.begin_abort(job, why);
        // Guests' requests may wait for copies of the other jobs of the group, too.
        for serial in group.map(|group| self.jobs.of_group(group)).unwrap_or_default() {
            let Some(mut other) = self.jobs.take(serial) else { continue };
            if let Some(copying) = other.copying_mut() {
                self.cancel_copying(copying);
            }
            self.jobs.put(other);
        }
        if let Some(copying) = job.copying() {
            self.reset_chain(copying).await;
            if let Err(error) = self.take_filter_out(copying).await {
                // No request is lost: requests continue through the filter.
                log::error!("job {}: its filter stays: {error}", job.options.id);
            }
        }
        self.conclude(job, event).await;
        if let Some(group) = group {
            // In a box, as the end of each of these jobs comes here.
            Box::pin(self.cancel_group(group)).await;
        }
    }

    /// Begins to end a job that failed or was cancelled. Returns the event of its end.
    fn begin_abort(&self, job: &mut Job, why: Option<Why>) -> Option<&'static EventRow> {
        if let Some(why) = &why {
            job.warn(why);
        }
        let has_run = job.status != Status::Created;
        job.options.auto_dismiss |= !has_run;
        job.enter(Status::Aborting, &self.clients);
        let event = match why {
            Some(_) => &BLOCK_JOB_COMPLETED,
            None => &BLOCK_JOB_CANCELLED,
        };
        (job.cancelled, job.error) = (why.is_none(), why.map(|why| why.error));
        if let Some(Copying { how: How::Parts(Parts::Backup(Some(used)), ..), .. }) =
            job.copying_mut()
            && !has_run
        {
            used.undo();
        }
        if let Some(copying) = job.copying_mut() {
            self.cancel_copying(copying);
        }
        has_run.then_some(event)
    }

    /// Ends a job and releases its nodes.
    async fn conclude(&mut self, job: &mut Job, event: Option<&'static EventRow>) {
        if let Some(leaving) = self.release(job) {
            leaving.closed().await;
        }
        self.is_concluded(job, event);
    }

    /// Ends a job's work. Returns what is left of its worker. Every job ends here.
    fn release(&self, job: &mut Job) -> Option<Leaving> {
        let succeeded = job.status != Status::Aborting;
        job.group = None;
        if let Some(Copying { how: How::Parts(Parts::Backup(Some(used)), backup, _), .. }) =
            job.copying_mut()
        {
            used.end(backup, succeeded);
        }
        let id = job.options.id.clone();
        let copying = job.copying_mut()?;
        let Open { filter, orders, closed } = copying.open.take()?;
        let names = [copying.source.clone(), copying.target.clone()];
        // A node that has left the graph is closed by this thread: the worker's thread may not open files.
        let ends = names.each_ref().map(|name| self.nodes.node(name).ok());
        drop((filter, orders));
        Some(Leaving { id, names, ends, closed, no_waiting: copying.no_waiting.take() })
    }

    fn is_concluded(&mut self, job: &mut Job, event: Option<&'static EventRow>) {
        self.inventory = self.inventory.without_job(&job.options.id);
        if let Some(event) = event {
            job.tell(event, &self.clients);
        }
        job.enter(Status::Concluded, &self.clients);
        if job.options.auto_dismiss {
            job.enter(Status::Null, &self.clients);
        }
    }

    /// Aborts a job as the undo of a transaction's action.
    pub(super) async fn cancel_job(&mut self, serial: u64) {
        let Some(mut job) = self.jobs.take(serial) else { return };
        self.abort(&mut job, None).await;
        if job.status != Status::Null {
            self.jobs.put(job);
        }
    }

    /// Aborts and removes all jobs when the daemon ends, without a wait. Returns the workers that have requests to finish.
    ///
    /// Filters stay until their users have gone, and images that a job opened for writing stay as they are.
    pub(super) fn end_jobs(&mut self) -> Vec<Leaving> {
        let mut left = Vec::new();
        while let Some(mut job) = self.jobs.jobs.pop() {
            if job.status != Status::Concluded {
                let event = self.begin_abort(&mut job, None);
                left.extend(self.release(&mut job));
                self.is_concluded(&mut job, event);
            }
            if job.status != Status::Null {
                job.enter(Status::Null, &self.clients);
            }
        }
        left
    }
}

/// The worker of a job that has ended, and the nodes that it still has.
pub(super) struct Leaving {
    /// The job's name.
    pub(super) id: String,
    /// The source and the target.
    pub(super) names: [String; 2],
    ends: [Option<Arc<dyn BlockNode>>; 2],
    closed: oneshot::Receiver<()>,
    no_waiting: Option<NoWaiting>,
}

impl Leaving {
    /// Waits until the worker has closed its nodes.
    pub(super) async fn closed(self) {
        let Leaving { ends, closed, no_waiting, .. } = self;
        // The wait fails only if the loop has stopped: then no node is left to close.
        let _ = closed.await;
        drop((ends, no_waiting));
    }
}
