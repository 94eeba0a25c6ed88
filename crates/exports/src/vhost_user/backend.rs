//! Carries out the actions of a session: maps memory here, runs rings on the I/O threads.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use devices::virtio::{CacheRecord, Held};
use event_loop::{Signal, oneshot};
use guest_memory::{GuestMemory, MappedRegion, Region};

use super::error::RequestError;
use super::eventfd::EventFd;
use super::handover::Saved;
use super::inflight::InflightArea;
use super::migration_log::MigrationLog;
use super::pinning::Pinning;
use super::session::{MAX_MEM_SLOTS, Reset, RingSetup};
use super::wire::{InflightDescription, RegionId, Request};
use super::worker::{RingSignals, Worker, WorkerHandle};

/// The workers of an export, one per I/O thread, and the state that one front end has set up on them.
pub(crate) struct Backend {
    /// The export's name in messages.
    id: String,
    pub(super) workers: Arc<Vec<WorkerHandle>>,
    /// Set if memory has to be pinned.
    pinning: Option<Arc<Pinning>>,
    pub(super) memory: Arc<GuestMemory>,
    /// Bytes that the front end may have mapped.
    max_memory: u64,
    /// The log of written pages, for a migration.
    pub(super) log: MigrationLog,
    /// The memory of the in-flight records.
    inflight: Option<InflightArea>,
    /// The log has a line about rings without a record.
    has_warned: bool,
    /// The running rings, and how they were started.
    pub(super) running: BTreeMap<u16, RingSetup>,
    /// Rings that could not continue in new memory, with their bases.
    lost: BTreeMap<u16, u16>,
    /// Rings that are stopped for a handover, and where they continue.
    paused: BTreeMap<u16, RingSetup>,
    /// Paused rings that still have requests in flight; each answers with its base.
    pausing: Vec<(u16, oneshot::Receiver<u16>)>,
}

impl Backend {
    pub(crate) fn new(
        id: String,
        workers: Arc<Vec<WorkerHandle>>,
        pinning: Option<Arc<Pinning>>,
        max_memory: u64,
    ) -> Self {
        Backend {
            id,
            workers,
            pinning,
            memory: Arc::new(GuestMemory::new()),
            max_memory,
            log: MigrationLog::default(),
            inflight: None,
            has_warned: false,
            running: BTreeMap::new(),
            lost: BTreeMap::new(),
            paused: BTreeMap::new(),
            pausing: Vec::new(),
        }
    }

    /// The export's name in messages.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The worker of a ring. Ring i runs on the export's I/O thread i, counted round.
    pub(super) fn worker(&self, index: u16) -> &WorkerHandle {
        &self.workers[usize::from(index) % self.workers.len()]
    }

    /// Replaces all memory. Running rings are stopped meanwhile. At the end nothing uses the old
    /// memory, and it is unmapped.
    pub(crate) async fn set_memory(&mut self, regions: Vec<Region>) -> Result<(), RequestError> {
        let sizes = regions.iter().map(|region| region.size).chain([self.log.size()]);
        self.may_map(sizes)?;
        let mapped: Result<Vec<_>, _> =
            regions.into_iter().map(|region| region.map().map(Arc::new)).collect();
        let memory = GuestMemory::from_regions(mapped?)?;
        self.tell_memory_on_disk(&memory);
        self.exchange_memory(memory).await
    }

    /// Warns that other exports of the I/O threads wait for a disk as the guest likes.
    fn tell_memory_on_disk(&self, memory: &GuestMemory) {
        if memory.regions().iter().any(|region| region.is_on_disk()) {
            log::warn!(
                "export {}: guest memory is in a file on a disk: its I/O threads wait for the disk; give the export threads \
                 of its own, or the guest a memfd, shared memory or huge pages",
                self.id
            );
        }
    }

    /// Adds memory; running rings continue.
    pub(crate) async fn add_region(&mut self, region: Region) -> Result<(), RequestError> {
        if self.memory.regions().len() >= MAX_MEM_SLOTS {
            return Err(RequestError::MemSlots);
        }
        self.may_map(self.mapped().chain([region.size, self.log.size()]))?;
        let memory = Arc::new(self.memory.with_region(Arc::new(region.map()?))?);
        self.tell_memory_on_disk(&memory);
        self.log.covers(&memory)?;
        let asked: Vec<_> = self
            .workers
            .iter()
            .map(|worker| {
                let memory = memory.clone();
                worker.ask(move |worker, answer| answer.send(worker.replace_memory(&memory)))
            })
            .collect();
        self.memory = memory;
        for answer in asked {
            answer.await?.map_err(|(index, error)| RequestError::Ring { index, error })?;
        }
        self.pin_memory();
        Ok(())
    }

    /// The sizes of the mapped regions.
    pub(super) fn mapped(&self) -> impl Iterator<Item = u64> {
        self.memory.regions().iter().map(|region| region.size())
    }

    /// Whether the front end may have memory of these sizes mapped.
    pub(super) fn may_map(&self, sizes: impl Iterator<Item = u64>) -> Result<(), RequestError> {
        let (needed, max) = (sizes.fold(0, u64::saturating_add), self.max_memory);
        if needed > max { Err(RequestError::MaxMemory { needed, max }) } else { Ok(()) }
    }

    /// Removes memory as [`set_memory`](Self::set_memory) does.
    pub(crate) async fn remove_region(&mut self, region: RegionId) -> Result<(), RequestError> {
        let RegionId { guest_addr, user_addr, size } = region;
        let memory = self.memory.without_region(guest_addr, user_addr, size)?;
        self.exchange_memory(memory).await
    }

    async fn exchange_memory(&mut self, memory: GuestMemory) -> Result<(), RequestError> {
        self.log.covers(&memory)?;
        let mut rings = std::mem::take(&mut self.running);
        let bases = self.stop(rings.keys().copied(), Held::Left).await?;
        self.memory = Arc::new(memory);
        self.unpin_other_memory().await?;
        let mut result = Ok(());
        for (index, base) in bases {
            if let Some(mut setup) = rings.remove(&index) {
                setup.continues_at(base);
                if let Err(error) = self.start(index, setup).await {
                    self.lost.insert(index, base);
                    result = Err(error);
                }
            }
        }
        self.pin_memory();
        result
    }

    /// Begins to pin new memory.
    fn pin_memory(&self) {
        let Some(pinning) = &self.pinning else { return };
        let populated = pinning.populate(&self.memory, self.workers.len());
        for (worker, populated) in self.workers.iter().zip(populated.into_iter().flatten()) {
            let memory = self.memory.clone();
            // The end of pinning is not awaited.
            drop(worker.ask(move |worker, answer| {
                worker.pin_memory(memory, populated);
                answer.send(());
            }));
        }
    }

    /// Unpins memory that was removed. No ring runs.
    async fn unpin_other_memory(&self) -> Result<(), RequestError> {
        if self.pinning.is_none() {
            return Ok(());
        }
        let ask = |worker: &WorkerHandle| {
            let memory = self.memory.clone();
            worker.ask(move |worker, answer| worker.unpin_all_but(memory, answer))
        };
        let asked: Vec<_> = self.workers.iter().map(ask).collect();
        for answer in asked {
            answer.await?;
        }
        Ok(())
    }

    /// The messages for memory and the in-flight record, for a handover.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(crate) fn save(&self) -> io::Result<Vec<Saved>> {
        let region = |region: &Arc<MappedRegion>| {
            let (guest_addr, user_addr) = (region.guest_addr(), region.user_addr());
            let fields = [0, guest_addr, region.size(), user_addr, region.mmap_offset()];
            Ok(Saved::fields(Request::AddMemReg, &fields, vec![region.file().try_clone()?]))
        };
        let memory = self.memory.regions().iter().map(region);
        memory.chain(self.inflight.iter().map(InflightArea::save)).collect()
    }

    /// Stops all rings for a handover. Returns the messages that start them in the other process, once
    /// nothing is in flight. After success, failure or a drop, the rings can [resume](Self::resume).
    pub(crate) async fn pause(&mut self) -> Result<Vec<Saved>, RequestError> {
        for (index, setup) in std::mem::take(&mut self.running) {
            self.pausing.push((index, self.ask_to_stop(index, Held::Left)));
            self.paused.insert(index, setup);
        }
        while let Some(stopped) = self.next_paused().await {
            stopped?;
        }
        let mut saved = Vec::new();
        // The control queue of virtio-scsi, queue 0, starts last. Before the others have started, a task management
        // function would miss their tasks.
        for (&index, setup) in self.paused.iter().rev() {
            let base = setup.config.next_avail;
            saved.push(Saved::ring(Request::SetVringBase, index, base.into()));
            let kick = Saved::ring_fd(Request::SetVringKick, index, setup.kick.as_ref());
            saved.push(kick.map_err(RequestError::HandOver)?);
        }
        // The front end starts these again once their memory is there.
        let lost = self.lost.iter();
        saved.extend(lost.map(|(&i, &base)| Saved::ring(Request::SetVringBase, i, base.into())));
        Ok(saved)
    }

    /// Waits for the next pausing ring to stop.
    async fn next_paused(&mut self) -> Option<Result<(), RequestError>> {
        let (index, stopped) = poll_fn(|cx| {
            for i in 0..self.pausing.len() {
                let Some((index, answer)) = self.pausing.get_mut(i) else { break };
                if let Poll::Ready(stopped) = Pin::new(answer).poll(cx) {
                    let index = *index;
                    self.pausing.swap_remove(i);
                    return Poll::Ready(Some((index, stopped)));
                }
            }
            if self.pausing.is_empty() { Poll::Ready(None) } else { Poll::Pending }
        })
        .await?;
        Some(match (stopped, self.paused.get_mut(&index)) {
            (Ok(base), Some(setup)) => {
                setup.continues_at(base);
                Ok(())
            }
            // Its thread has ended.
            (stopped, _) => {
                self.paused.remove(&index);
                stopped.map(drop).map_err(RequestError::from)
            }
        })
    }

    /// Continues all rings after a failed handover. A ring that has not stopped yet continues at once, except
    /// one whose held requests stay for the next process: that one continues after its stop.
    pub(crate) async fn resume(&mut self) -> Result<(), RequestError> {
        let mut result = Ok(());
        let mut pausing = std::mem::take(&mut self.pausing);
        // As in `pause`: the control queue last.
        pausing.sort_unstable_by_key(|&(index, _)| Reverse(index));
        let called: Vec<_> = pausing
            .into_iter()
            .map(|(index, stopped)| {
                let enabled = self.paused.get(&index).is_some_and(|setup| setup.enabled);
                let call = move |worker: &Worker, answer: oneshot::Sender<bool>| {
                    answer.send(worker.call_back(index, enabled));
                };
                (index, stopped, self.worker(index).ask(call))
            })
            .collect();
        for (index, stopped, is_back) in called {
            let is_back = is_back.await;
            let Some(setup) = self.paused.remove(&index) else { continue };
            match is_back {
                Ok(true) => {
                    self.running.insert(index, setup);
                }
                Ok(false) => {
                    self.pausing.push((index, stopped));
                    self.paused.insert(index, setup);
                }
                Err(gone) => result = Err(gone.into()),
            }
        }
        loop {
            let waits = |index| self.pausing.iter().any(|(pausing, _)| *pausing == index);
            let stopped: Vec<u16> =
                self.paused.keys().rev().copied().filter(|&index| !waits(index)).collect();
            for index in stopped {
                let Some(setup) = self.paused.remove(&index) else { continue };
                let base = setup.config.next_avail;
                if let Err(error) = self.start(index, setup).await {
                    self.lost.insert(index, base);
                    result = Err(error);
                }
            }
            match self.next_paused().await {
                Some(stopped) => result = result.and(stopped),
                None => return result,
            }
        }
    }

    /// Stops all rings and unmaps all memory.
    pub(crate) async fn end(mut self) -> Result<(), RequestError> {
        self.stop_rings(Held::Left).await?;
        self.change_log(MigrationLog::default()).await?;
        self.memory = Arc::default();
        if let Some(pinning) = &self.pinning {
            pinning.forget_failure();
        }
        self.unpin_other_memory().await
    }

    /// Starts a ring. A running ring is stopped and continues where it was.
    pub(crate) async fn start_ring(
        &mut self,
        index: u16,
        mut setup: RingSetup,
    ) -> Result<(), RequestError> {
        if let Some(base) = self.stop_ring(index, Held::Left).await? {
            setup.continues_at(base);
            self.lost.insert(index, base);
        }
        self.start(index, setup).await?;
        self.lost.remove(&index);
        Ok(())
    }

    async fn start(&mut self, index: u16, setup: RingSetup) -> Result<(), RequestError> {
        self.log.covers_used(setup.used_log, setup.config.size)?;
        let (memory, inflight) = (self.memory.clone(), self.inflight_of(index, setup.config.size));
        let signals = RingSignals { call: signal_to(&setup.call), err: signal_to(&setup.err) };
        let copy = setup.clone();
        self.worker(index)
            .ask(move |worker, answer| {
                answer.send(worker.start(index, copy, signals, memory, inflight));
            })
            .await?
            .map_err(|error| RequestError::Ring { index, error })?;
        self.running.insert(index, setup);
        Ok(())
    }

    /// The memory with the record of a ring. A ring for which the record has no room runs without one: the guest has its
    /// disk, and loses requests only if this process is killed.
    fn inflight_of(&mut self, index: u16, size: u16) -> Option<InflightArea> {
        let served = self.inflight.as_ref()?.serves(index, size);
        if let Err(why) = &served
            && !std::mem::replace(&mut self.has_warned, true)
        {
            log::warn!(
                "export {}: ring {index} keeps no record of requests in flight, which a kill of this process would \
                 lose: {why}",
                self.id
            );
        }
        self.inflight.clone().filter(|_| served.is_ok())
    }

    /// Sets the memory of in-flight records for rings that start from now on. Returns its record of the
    /// write cache mode.
    pub(crate) fn set_inflight(
        &mut self,
        description: InflightDescription,
        fd: OwnedFd,
    ) -> Result<Option<CacheRecord>, RequestError> {
        let area = self.inflight.insert(InflightArea::map(description, fd)?);
        self.has_warned = false;
        Ok(area.of_write_cache())
    }

    /// Stops a ring for the front end (GET_VRING_BASE). Returns its base once nothing is in flight; `None`: the
    /// ring did not run.
    pub(crate) async fn end_ring(&mut self, index: u16) -> Result<Option<u16>, RequestError> {
        self.stop_ring(index, self.held_at_the_end()).await
    }

    /// After a migration, the guest does not continue here. In all other cases the record keeps held requests.
    fn held_at_the_end(&self) -> Held {
        if self.log.is_on() { Held::Failed } else { Held::Left }
    }

    async fn stop_ring(&mut self, index: u16, held: Held) -> Result<Option<u16>, RequestError> {
        if self.running.remove(&index).is_none() {
            return Ok(self.lost.remove(&index));
        }
        Ok(Some(self.ask_to_stop(index, held).await?))
    }

    /// Stops all rings for a reset of the device. Returns their bases.
    ///
    /// Rings that are started later repeat nothing from the in-flight record. A front end that continues with the record
    /// hands the record over again. QEMU before 8.0 sets status 0 to stop its guest, before it stops the rings: held
    /// requests stay in the record, as in [`end_ring`](Self::end_ring).
    pub(crate) async fn reset_rings(
        &mut self,
        reset: Reset,
    ) -> Result<Vec<(u16, u16)>, RequestError> {
        self.inflight = None;
        let held = match reset {
            Reset::Status => self.held_at_the_end(),
            Reset::Device => Held::Failed,
        };
        self.stop_rings(held).await
    }

    /// Stops all rings. Returns their bases.
    async fn stop_rings(&mut self, held: Held) -> Result<Vec<(u16, u16)>, RequestError> {
        let lost = std::mem::take(&mut self.lost);
        let rings = std::mem::take(&mut self.running);
        let mut bases = self.stop(rings.keys().copied(), held).await?;
        bases.extend(lost);
        Ok(bases)
    }

    /// Stops rings, all at the same time. Returns their bases.
    async fn stop(
        &self,
        rings: impl Iterator<Item = u16>,
        held: Held,
    ) -> Result<Vec<(u16, u16)>, RequestError> {
        let asked: Vec<_> = rings.map(|index| (index, self.ask_to_stop(index, held))).collect();
        let mut bases = Vec::with_capacity(asked.len());
        for (index, answer) in asked {
            bases.push((index, answer.await?));
        }
        Ok(bases)
    }

    fn ask_to_stop(&self, index: u16, held: Held) -> oneshot::Receiver<u16> {
        self.worker(index).ask(move |worker, answer| worker.stop(index, held, answer))
    }

    /// Sets a ring's call eventfd and signals it once.
    pub(crate) async fn set_call(
        &mut self,
        index: u16,
        call: Option<EventFd>,
    ) -> Result<(), RequestError> {
        if let Some(setup) = self.running.get_mut(&index) {
            setup.call = call.clone();
        }
        let call = signal_to(&call);
        let answer = self.worker(index).ask(move |worker, answer| {
            worker.set_call(index, call);
            answer.send(());
        });
        Ok(answer.await?)
    }

    /// Sets a ring's err eventfd.
    pub(crate) async fn set_err(
        &mut self,
        index: u16,
        err: Option<EventFd>,
    ) -> Result<(), RequestError> {
        if let Some(setup) = self.running.get_mut(&index) {
            setup.err = err.clone();
        }
        let err = signal_to(&err);
        let answer = self.worker(index).ask(move |worker, answer| {
            worker.set_err(index, err);
            answer.send(());
        });
        Ok(answer.await?)
    }

    /// Enables or disables a ring that runs.
    pub(crate) async fn set_enabled(
        &mut self,
        index: u16,
        enabled: bool,
    ) -> Result<(), RequestError> {
        if let Some(setup) = self.running.get_mut(&index) {
            setup.enabled = enabled;
        }
        let answer = self.worker(index).ask(move |worker, answer| {
            worker.set_enabled(index, enabled);
            answer.send(());
        });
        Ok(answer.await?)
    }
}

/// Prepares signals to an eventfd. That may create a ring, which I/O threads must not do.
pub(super) fn signal_to(eventfd: &Option<EventFd>) -> Option<Signal> {
    eventfd.as_ref().map(|eventfd| Signal::new(eventfd.fd().clone()))
}
