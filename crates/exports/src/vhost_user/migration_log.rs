//! The log of a migration: which pages of the guest's memory the rings have written (vhost-user,
//! "Migration"). The front end hands over memory for it (SET_LOG_BASE), and switches logging on and
//! off by a feature bit (VHOST_F_LOG_ALL), while rings run.

#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_memory::{DirtyLog, GuestMemory};

use super::backend::{Backend, signal_to};
use super::error::RequestError;
use super::eventfd::EventFd;
use super::wire::LogDescription;
use super::worker::WorkerHandle;

/// What a front end has said of a log. Memory for it may come before it is switched on, or after.
#[derive(Debug, Clone, Default)]
pub(crate) struct MigrationLog {
    on: bool,
    log: Option<Arc<DirtyLog>>,
    /// To be signalled when something was logged.
    notify: Option<EventFd>,
}

impl MigrationLog {
    /// The log that writes go to.
    fn in_use(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref().filter(|_| self.on)
    }

    /// Whether a guest is being migrated, or was: the front end has given memory for the log. Logging that is on without
    /// memory begins in the process that gets the memory.
    pub(crate) fn has_memory(&self) -> bool {
        self.log.is_some()
    }

    /// Bytes of its memory.
    pub(super) fn size(&self) -> u64 {
        self.log.as_ref().map_or(0, |log| log.size())
    }

    /// Whether writes are logged.
    pub(crate) fn is_on(&self) -> bool {
        self.in_use().is_some()
    }

    /// Whether there are bits for all guest addresses below `end`, if writes are logged.
    fn reaches(&self, needed: u64) -> Result<(), RequestError> {
        match self.in_use() {
            Some(log) if log.end() < needed => {
                Err(RequestError::LogSize { end: log.end(), needed })
            }
            _ => Ok(()),
        }
    }

    /// Whether there is a bit for each page of `memory`, if writes are logged.
    pub(crate) fn covers(&self, memory: &GuestMemory) -> Result<(), RequestError> {
        // Regions are in the order of their addresses, and their ends fit (`Region::map`).
        let last = memory.regions().last();
        self.reaches(last.map_or(0, |region| region.guest_addr() + region.size()))
    }

    /// Whether there is a bit for each page of a used ring that is logged at `addr`.
    pub(crate) fn covers_used(&self, addr: Option<u64>, size: u16) -> Result<(), RequestError> {
        let Some(addr) = addr else { return Ok(()) };
        self.reaches(addr.saturating_add(queue::used_ring_len(size)))
    }
}

impl Backend {
    /// Has the log in this memory from now on.
    pub(crate) async fn set_log_base(
        &mut self,
        description: LogDescription,
        fd: OwnedFd,
    ) -> Result<(), RequestError> {
        let LogDescription { mmap_size, mmap_offset } = description;
        self.may_map(self.mapped().chain([mmap_size]))?;
        let log = DirtyLog::map(fd, mmap_offset, mmap_size).map_err(RequestError::LogMemory)?;
        self.change_log(MigrationLog { log: Some(Arc::new(log)), ..self.log.clone() }).await
    }

    /// Has `notify` signalled when something was logged.
    pub(crate) async fn set_log_fd(&mut self, notify: EventFd) -> Result<(), RequestError> {
        self.change_log(MigrationLog { notify: Some(notify), ..self.log.clone() }).await
    }

    /// Switches logging on or off.
    pub(crate) async fn set_logging(&mut self, on: bool) -> Result<(), RequestError> {
        self.change_log(MigrationLog { on, ..self.log.clone() }).await
    }

    /// When this is done all rings log as `log` says; after an error, as before.
    pub(super) async fn change_log(&mut self, log: MigrationLog) -> Result<(), RequestError> {
        log.covers(&self.memory)?;
        for setup in self.running.values() {
            log.covers_used(setup.used_log, setup.config.size)?;
        }
        self.log = log;
        let ask = |worker: &WorkerHandle| {
            let (to, notify) = (self.log.in_use().cloned(), signal_to(&self.log.notify));
            worker.ask(move |worker, answer| {
                worker.set_log(to, notify);
                answer.send(());
            })
        };
        let asked: Vec<_> = self.workers.iter().map(ask).collect();
        for answer in asked {
            answer.await?;
        }
        Ok(())
    }

    /// Sets where a ring that runs logs writes to its used ring.
    pub(crate) async fn set_used_log(
        &mut self,
        index: u16,
        addr: Option<u64>,
    ) -> Result<(), RequestError> {
        if let Some(setup) = self.running.get_mut(&index) {
            self.log.covers_used(addr, setup.config.size)?;
            setup.used_log = addr;
        }
        let answer = self.worker(index).ask(move |worker, answer| {
            worker.set_used_log(index, addr);
            answer.send(());
        });
        Ok(answer.await?)
    }
}
