//! Hand-over of a server and its exports to another process.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::{Client, NbdExport, NbdServer, WorkerHandle};
use crate::nbd::connection::SavedClient;
use crate::nbd::session::transmission::{Agreed, Contexts};

impl NbdServer {
    /// Stops accepting clients, and admitting waiting clients to exports.
    ///
    /// [`resume`](Self::resume) ends this.
    ///
    /// Returns the listening sockets, each with the path of the socket file to be removed in the end, if
    /// there is one.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub fn hand_over(&self) -> io::Result<Vec<(OwnedFd, Option<PathBuf>)>> {
        self.shared.held.set(true);
        self.shared.changed.tell();
        self.listener.hand_over()
    }

    /// Accepts and serves clients again.
    pub fn resume(&self) {
        self.shared.held.set(false);
        self.shared.changed.tell();
    }
}

impl NbdExport {
    /// Stops taking requests until [`resume`](Self::resume).
    ///
    /// With `flush`, makes written data durable.
    ///
    /// Completes when no request is in flight, with the clients that can be handed over: those without TLS.
    ///
    /// # Errors
    ///
    /// The reason why the clients cannot be handed over.
    pub fn pause(
        &self,
        flush: bool,
    ) -> impl Future<Output = Result<Vec<SavedClient>, String>> + use<> {
        let workers = &self.export.workers;
        let paused: Vec<_> = workers.iter().map(|worker| worker.pause(flush)).collect();
        async move {
            let mut all = Vec::new();
            for answer in paused {
                let saved = answer.await.map_err(|gone| gone.to_string())?;
                all.extend(saved.map_err(|errno| errno.desc().to_owned())?);
            }
            Ok(all)
        }
    }

    /// Makes written data durable while the clients are served.
    ///
    /// # Errors
    ///
    /// As of fdatasync(2).
    pub fn flush(&self) -> impl Future<Output = Result<(), String>> + use<> {
        let flushed: Vec<_> = self.export.workers.iter().map(WorkerHandle::flush).collect();
        async move {
            for answer in flushed {
                let flushed = answer.await.map_err(|gone| gone.to_string())?;
                flushed.map_err(|errno| errno.desc().to_owned())?;
            }
            Ok(())
        }
    }

    /// Serves all clients again after [`pause`](Self::pause).
    pub fn resume(&self) {
        self.export.workers.iter().for_each(WorkerHandle::resume);
    }

    /// Disconnects the clients that were not handed over.
    ///
    /// Another process has taken over the others.
    pub fn disconnect_clients(&self) -> impl Future<Output = ()> + use<> {
        let parted: Vec<_> = self.export.workers.iter().map(WorkerHandle::part).collect();
        async move {
            for answer in parted {
                // Once its loop has ended, a worker has no clients.
                let _ = answer.await;
            }
        }
    }

    /// Serves clients that another process has handed over.
    pub fn begin(&self, clients: Vec<SavedClient>) {
        for SavedClient { socket, agreed, input, output } in clients {
            let (shared, export) = (self.shared.clone(), self.export.clone());
            let read_only = agreed.read_only || export.info.borrow().read_only;
            // Bitmaps that the export had in the other process only are left out of replies.
            let there = export.info.borrow().bitmaps.len() as u32;
            let bitmaps = agreed.contexts.bitmaps & !u64::MAX.checked_shl(there).unwrap_or(0);
            let contexts = Contexts { bitmaps, ..agreed.contexts };
            let agreed = Agreed { read_only, contexts, ..agreed };
            let left = (input, output);
            let client = Client { socket: Arc::new(socket), agreed, secured: None, left };
            self.shared.count(async move { shared.attend(&export, client).await });
        }
    }
}
