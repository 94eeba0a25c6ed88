//! The daemon's exports, from their start to their last flush.

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use block::node::BlockNode;
use block::policy::{ErrorPolicy, IoStatus};
use control::{ExportOptions, Inventory};
use event_loop::{EventLoop, JoinHandle, oneshot, until};
use serde_json::{Map, Value as Json};
use stats::QueueStats;

use super::export::{Asked, Running};
use super::stalls::Stalls;
use super::statistics::ExportStatistics;
use super::upgrade::document::Document;
use super::upgrade::{Part, TakenPart};

/// Longest wait of [`Exports::hung_up_are_gone`], nanoseconds.
const GONE_NS: u64 = 1_000_000_000;

/// The running exports, in order of creation. The inventory has their options and nodes.
pub(super) struct Exports {
    event_loop: EventLoop,
    exports: Vec<Export>,
    /// Called with the name of each export that has ended, while the daemon serves.
    on_end: Rc<dyn Fn(String)>,
    /// Interval of the search for stalled requests, nanoseconds; 0: off.
    pause_ns: Rc<Cell<u64>>,
    /// Called once per interval.
    on_look: Rc<dyn Fn()>,
}

struct Export {
    id: String,
    /// `None` once the export is being stopped.
    serving: Option<Box<dyn Running>>,
    /// Returns whether the last flush succeeded.
    stopping: Option<JoinHandle<bool>>,
    /// Dropped with the export, which completes the receiver of [`Exports::stop`].
    awaited: Option<oneshot::Sender<()>>,
    /// The nodes that it offers, kept alive for [`errors::watch`](super::errors::watch), which looks up their names.
    _nodes: Vec<Arc<dyn BlockNode>>,
    /// The policy for failed requests; `None`: the front end gets the error.
    policy: Option<Arc<ErrorPolicy>>,
    /// The record of stalled requests; `None`: switched off.
    stalls: Option<Rc<Stalls>>,
}

/// The state of an export.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExportState {
    Idle,
    /// A front end or client is connected.
    InUse,
    ShuttingDown,
}

/// The description of an export in QMP.
pub(super) struct ExportInfo<'a> {
    pub(super) id: &'a str,
    pub(super) node_name: &'a str,
    /// All its nodes, if there can be several, and the member that lists them.
    pub(super) list: Option<(&'static str, &'a [String])>,
    pub(super) kind: &'static str,
    pub(super) shutting_down: bool,
    /// The path of the host's block device, if the export is one.
    pub(super) device: Option<PathBuf>,
    /// `None`: errors stop nothing.
    pub(super) io_status: Option<IoStatus>,
}

impl Exports {
    pub(super) fn new(
        event_loop: &EventLoop,
        on_end: impl Fn(String) + 'static,
        on_look: impl Fn() + 'static,
    ) -> Self {
        Exports {
            event_loop: event_loop.clone(),
            exports: Vec::new(),
            on_end: Rc::new(on_end),
            pause_ns: Rc::default(),
            on_look: Rc::new(on_look),
        }
    }

    pub(super) fn add(
        &mut self,
        options: &ExportOptions,
        export: Box<dyn Running>,
        nodes: Vec<Arc<dyn BlockNode>>,
        policy: Option<Arc<ErrorPolicy>>,
    ) {
        let limit_ns = options.stall_timeout_ms * 1_000_000;
        let stalls =
            (limit_ns > 0).then(|| Rc::new(Stalls::new(limit_ns, options.kind.type_name())));
        if let Some(stalls) = &stalls {
            self.look_every(stalls.pause_ns());
        }
        self.exports.push(Export {
            id: options.id.clone(),
            serving: Some(export),
            stopping: None,
            awaited: None,
            _nodes: nodes,
            policy,
            stalls,
        });
    }

    /// Starts the search for stalled requests, or shortens its interval to `pause_ns`.
    fn look_every(&self, pause_ns: u64) {
        let before = self.pause_ns.get();
        if before == 0 || before > pause_ns {
            self.pause_ns.set(pause_ns);
        }
        if before > 0 {
            return;
        }
        let (event_loop, pause_ns) = (self.event_loop.clone(), self.pause_ns.clone());
        let on_look = self.on_look.clone();
        self.event_loop.spawn(async move {
            loop {
                event_loop.sleep_until(event_loop.now_ns() + pause_ns.get()).await;
                on_look();
            }
        });
    }

    /// Looks for stalled requests, and logs them.
    pub(super) fn look_for_stalls(&self) {
        for export in &self.exports {
            let (Some(serving), Some(stalls)) = (&export.serving, &export.stalls) else { continue };
            let now_ns = self.event_loop.now_ns();
            // The error policy holds these requests, or has just resumed them: the disk is not slow.
            let is_held = |policy: &Arc<ErrorPolicy>| {
                let resumed_ns = policy.resumed_ns();
                policy.is_stopped() || resumed_ns > 0 && now_ns < resumed_ns + stalls.limit_ns()
            };
            if export.policy.as_ref().is_some_and(is_held) {
                continue;
            }
            let id = export.id.clone();
            if let Some(silence) = stalls.silence(now_ns) {
                log::warn!("export {id}: {silence}");
            }
            let in_flight = || serving.queue_stats().iter().any(|queue| queue.in_flight() > 0);
            if !stalls.must_ask(in_flight()) {
                continue;
            }
            stalls.ask(now_ns);
            let (asked, stalls) = (serving.in_flight(), stalls.clone());
            let event_loop = self.event_loop.clone();
            self.event_loop.spawn(async move {
                let in_flight = asked.await;
                for line in stalls.look(&in_flight, event_loop.now_ns()) {
                    log::warn!("export {id}: {line}");
                }
            });
        }
    }

    pub(super) fn count(&self) -> usize {
        self.exports.len()
    }

    pub(super) fn all<'a>(
        &'a self,
        inventory: &'a Inventory,
    ) -> impl Iterator<Item = ExportInfo<'a>> {
        self.exports.iter().filter_map(|export| {
            let (options, nodes) = inventory.export(&export.id)?;
            Some(ExportInfo {
                id: &export.id,
                node_name: nodes.first().map_or("", String::as_str),
                list: options.kind.more_nodes().map(|more| (more.list, nodes)),
                kind: options.kind.type_name(),
                shutting_down: export.serving.is_none(),
                device: export.serving.as_ref().and_then(|serving| serving.device()),
                io_status: export.policy.as_ref().map(|policy| policy.status()),
            })
        })
    }

    /// Pauses the exports for which `is_paused` is true, by name, and resumes all others.
    pub(super) async fn pause(&self, is_paused: impl Fn(&str) -> bool) {
        for export in &self.exports {
            if let Some(serving) = &export.serving {
                serving.set_paused(is_paused(&export.id)).await;
            }
        }
    }

    /// Waits until clients that have hung up no longer count as users, at most [`GONE_NS`]. A client with a
    /// request in flight, on a disk that does not answer, still counts.
    pub(super) async fn hung_up_are_gone(&self, id: &str) {
        let export = self.exports.iter().find(|export| export.id == id);
        if let Some(serving) = export.and_then(|export| export.serving.as_ref()) {
            let enough = self.event_loop.sleep_until(self.event_loop.now_ns() + GONE_NS);
            let _ = until(serving.hung_up_are_gone(), enough).await;
        }
    }

    /// Has an export disregard its users when it ends.
    pub(super) fn spare_nobody(&self, id: &str) {
        let export = self.exports.iter().find(|export| export.id == id);
        if let Some(serving) = export.and_then(|export| export.serving.as_ref()) {
            serving.spare_nobody();
        }
    }

    /// The state of an export. `None`: there is no such export.
    pub(super) fn state(&self, id: &str) -> Option<ExportState> {
        let export = self.exports.iter().find(|export| export.id == id)?;
        Some(match &export.serving {
            Some(serving) if serving.is_connected() => ExportState::InUse,
            Some(_) => ExportState::Idle,
            None => ExportState::ShuttingDown,
        })
    }

    /// Begins to end an export: it completes its requests and flushes. `on_end` gets a message at the end. The
    /// returned receiver completes when the export is [forgotten](Self::forget).
    pub(super) fn stop(&mut self, id: &str) -> oneshot::Receiver<()> {
        let (awaited, end) = oneshot::channel();
        if let Some(export) = self.exports.iter_mut().find(|export| export.id == id) {
            export.stop(&self.event_loop, || {}, self.on_end.clone());
            export.awaited = Some(awaited);
        }
        end
    }

    /// Forgets an export that has ended.
    pub(super) fn forget(&mut self, id: &str) {
        self.exports.retain(|export| export.id != id);
    }

    /// Begins to end all exports, each of which completes its requests and flushes.
    ///
    /// Calls `on_quiet` with the name of each export that has finished its last request, then `on_end`.
    pub(super) fn stop_all(
        &mut self,
        on_quiet: impl Fn(String) + Clone + 'static,
        on_end: impl Fn(String) + 'static,
    ) {
        let on_end: Rc<dyn Fn(String)> = Rc::new(on_end);
        for export in &mut self.exports {
            let (id, on_quiet) = (export.id.clone(), on_quiet.clone());
            export.stop(&self.event_loop, move || on_quiet(id), on_end.clone());
        }
    }

    /// Forgets an export that has ended, and returns whether its flush succeeded.
    pub(super) async fn joined(&mut self, id: &str) -> bool {
        let Some(place) = self.exports.iter().position(|export| export.id == id) else {
            return true;
        };
        match self.exports.remove(place).stopping {
            Some(stopping) => stopping.await.unwrap_or(false),
            None => true,
        }
    }

    /// Returns the names of all exports, in order of creation.
    pub(super) fn names(&self) -> Vec<String> {
        self.exports.iter().map(|export| export.id.clone()).collect()
    }

    /// Asks each export for its description for the new process. From then on, vhost-user servers read no more
    /// messages.
    pub(super) fn describe(&self) -> Vec<(String, Asked<Part>)> {
        let describe =
            |export: &Export| Some((export.id.clone(), export.serving.as_ref()?.describe()?));
        self.exports.iter().filter_map(describe).collect()
    }

    /// Flushes the exports for which `keeps_back` is true, by name. Completes once all flushes have ended or failed.
    pub(super) fn flush(&self, keeps_back: impl Fn(&str) -> bool) -> impl Future<Output = ()> {
        let flush = |export: &Export| {
            Some(export.serving.as_ref().filter(|_| keeps_back(&export.id))?.flush())
        };
        let asked: Vec<_> = self.exports.iter().filter_map(flush).collect();
        // A failed flush fails again when the queues stop, and is reported then.
        all(asked)
    }

    /// Stops the queues of all exports, and flushes those for which `keeps_back` is true, by name.
    pub(super) fn stop_queues(
        &self,
        keeps_back: impl Fn(&str) -> bool,
    ) -> Vec<(String, Asked<Part>)> {
        let stop = |export: &Export| {
            let stopped = export.serving.as_ref()?.quiesce(keeps_back(&export.id));
            Some((export.id.clone(), stopped))
        };
        self.exports.iter().filter_map(stop).collect()
    }

    /// When the oldest request in flight was taken, nanoseconds, and its export. Leaves out exports for which `but` is
    /// true, by name.
    pub(super) fn oldest(
        &self,
        but: impl Fn(&str) -> bool,
    ) -> impl Future<Output = Option<(u64, String)>> {
        let ask = |export: &Export| {
            let serving = export.serving.as_ref()?;
            (!but(&export.id)).then(|| (export.id.clone(), serving.in_flight()))
        };
        let asked: Vec<_> = self.exports.iter().filter_map(ask).collect();
        async move {
            let mut oldest: Option<(u64, String)> = None;
            for (id, in_flight) in asked {
                let started = in_flight.await.iter().map(|(_, request)| request.started_ns).min();
                oldest = oldest.into_iter().chain(started.map(|ns| (ns, id))).min();
            }
            oldest
        }
    }

    /// Restarts the queues of all exports until the next attempt to stop them. Completes once all serve.
    pub(super) fn restart_queues(&self) -> impl Future<Output = ()> + use<> {
        let serving = self.exports.iter().filter_map(|export| export.serving.as_ref());
        let asked: Vec<_> = serving.map(|serving| serving.restart_queues()).collect();
        // An error means that the export has ended.
        all(asked)
    }

    /// Resumes all exports.
    pub(super) fn resume(&self) {
        self.exports
            .iter()
            .filter_map(|export| export.serving.as_ref())
            .for_each(|serving| serving.resume());
    }

    /// Has the exports check the state that another process handed over, by their names.
    ///
    /// # Errors
    ///
    /// The state is malformed, or cannot be served here.
    pub(super) fn prepare(
        &self,
        mut states: Map<String, Json>,
        document: &mut Document,
    ) -> Result<(), String> {
        for Export { id, serving, .. } in &self.exports {
            let (Some(serving), Some(json)) = (serving, states.remove(id)) else { continue };
            let state = TakenPart { json, document: &mut *document };
            serving.prepare(state).map_err(|why| format!("export '{id}': {why}"))?;
        }
        Ok(())
    }

    /// Starts all exports. Completes once all serve.
    pub(super) fn begin(&self) -> impl Future<Output = ()> + use<> {
        let serving = self.exports.iter().filter_map(|export| export.serving.as_ref());
        let begun: Vec<_> = serving.map(|serving| serving.begin()).collect();
        all(begun)
    }

    /// Disconnects the clients that could not be handed over to the new process.
    pub(super) fn disconnect_clients(&self) -> impl Future<Output = ()> + use<> {
        let serving = self.exports.iter().filter_map(|export| export.serving.as_ref());
        let parted: Vec<_> = serving.filter_map(|serving| serving.disconnect_clients()).collect();
        all(parted)
    }

    /// Resumes an export after an error. `None`: there is no such export.
    pub(super) fn resume_after_error(&self, id: &str, now_ns: u64) -> Option<()> {
        let export = self.exports.iter().find(|export| export.id == id)?;
        if let Some(policy) = &export.policy {
            policy.resume(now_ns);
        }
        Some(())
    }

    /// The statistics of all exports that are not being stopped.
    pub(super) fn statistics(&self, inventory: &Inventory) -> Vec<ExportStatistics> {
        let of = |export: &Export| {
            let serving = export.serving.as_ref()?;
            let (options, nodes) = inventory.export(&export.id)?;
            Some(ExportStatistics {
                id: export.id.clone(),
                kind: options.kind.type_name(),
                nodes: nodes.to_vec(),
                connected: serving.is_connected(),
                io_status: export.policy.as_ref().map_or(IoStatus::Ok, |policy| policy.status()),
                queues: serving.queues(),
            })
        };
        self.exports.iter().filter_map(of).collect()
    }

    /// The counters of each queue of an export; `None`: there is no such export.
    pub(super) fn queues_of(&self, id: &str) -> Option<&[Arc<QueueStats>]> {
        let export = self.exports.iter().find(|export| export.id == id)?;
        Some(export.serving.as_ref()?.queue_stats())
    }

    /// The counters of each queue of each export.
    pub(super) fn queue_stats(&self) -> Vec<Arc<QueueStats>> {
        let serving = self.exports.iter().filter_map(|export| export.serving.as_ref());
        serving.flat_map(|export| export.queue_stats().to_vec()).collect()
    }
}

impl Export {
    fn stop(
        &mut self,
        event_loop: &EventLoop,
        on_quiet: impl FnOnce() + 'static,
        on_end: Rc<dyn Fn(String)>,
    ) {
        let Some(export) = self.serving.take() else { return };
        let id = self.id.clone();
        self.stopping = Some(event_loop.spawn(async move {
            let result = export.stop(Box::new(on_quiet)).await;
            if let Err(error) = &result {
                log::error!("export {id}: {error}");
            }
            on_end(id);
            result.is_ok()
        }));
    }
}

/// Awaits all, and ignores their results.
async fn all(asked: Vec<impl Future>) {
    for one in asked {
        let _ = one.await;
    }
}
