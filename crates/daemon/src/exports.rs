//! The daemon's exports, from their start to their last flush.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;

use block::policy::{ErrorPolicy, IoStatus};
use control::{ExportKind, ExportOptions};
use event_loop::{EventLoop, JoinHandle, oneshot};
use stats::QueueStats;

use super::export::{Asked, Described, Running, Stopped};
use super::signal::{Mailbox, until};
use super::stalls::Stalls;
use super::statistics::ExportStatistics;

/// Longest wait of [`Exports::hung_up_are_gone`], nanoseconds.
const GONE_NS: u64 = 1_000_000_000;

/// The exports, in the order in which they were made.
pub(super) struct Exports {
    event_loop: EventLoop,
    exports: Vec<Export>,
    /// Called with the name of each that has ended, while the daemon serves.
    on_end: Rc<dyn Fn(String)>,
    /// How long to wait before looking for requests that take long, nanoseconds; 0: nobody looks.
    pause_ns: Rc<Cell<u64>>,
    /// Called when it is time to.
    on_look: Rc<dyn Fn()>,
}

struct Export {
    id: String,
    /// The nodes that it offers: one, or those of the logical units or namespaces.
    nodes: Vec<String>,
    kind: &'static str,
    /// The member that lists the nodes in its description, if there can be several.
    list: Option<&'static str>,
    /// It shows dirty bitmaps, which a restart may not find.
    shows_bitmaps: bool,
    /// `None` once it is being stopped.
    serving: Option<Box<dyn Running>>,
    /// Gives whether all could be flushed.
    stopping: Option<JoinHandle<bool>>,
    /// Goes with it: for who waits for its end.
    awaited: Option<oneshot::Sender<()>>,
    /// What becomes of requests that fail; `None`: the other side is told.
    policy: Option<Arc<ErrorPolicy>>,
    /// Its requests that take long; `None`: nobody wants to know.
    stalls: Option<Rc<Stalls>>,
}

/// What an export is at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExportState {
    Idle,
    /// Somebody is connected.
    InUse,
    ShuttingDown,
}

/// What is told of an export.
pub(super) struct ExportInfo<'a> {
    pub(super) id: &'a str,
    pub(super) node_name: &'a str,
    /// All its nodes, if there can be several, and the member that lists them.
    pub(super) list: Option<(&'static str, &'a [String])>,
    pub(super) kind: &'static str,
    pub(super) shutting_down: bool,
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
            nodes: options.nodes().map(String::from).collect(),
            kind: options.kind.type_name(),
            list: options.kind.more_nodes().map(|more| more.list),
            shows_bitmaps: matches!(&options.kind, ExportKind::Nbd(nbd) if !nbd.bitmaps.is_empty()),
            serving: Some(export),
            stopping: None,
            awaited: None,
            policy,
            stalls,
        });
    }

    /// Has somebody look for requests that take long, at least so often.
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

    /// Looks for requests that take long, and tells the log of them.
    pub(super) fn look_for_stalls(&self) {
        for export in &self.exports {
            let (Some(serving), Some(stalls)) = (&export.serving, &export.stalls) else { continue };
            let now_ns = self.event_loop.now_ns();
            // What is held does not take long by itself, nor what has just gone on.
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

    pub(super) fn all(&self) -> impl Iterator<Item = ExportInfo<'_>> {
        self.exports.iter().map(|export| ExportInfo {
            id: &export.id,
            node_name: export.nodes.first().map_or("", String::as_str),
            list: export.list.map(|list| (list, &export.nodes[..])),
            kind: export.kind,
            shutting_down: export.serving.is_none(),
            io_status: export.policy.as_ref().map(|policy| policy.status()),
        })
    }

    /// Whether an export shows dirty bitmaps.
    pub(super) fn shows_bitmaps(&self, id: &str) -> bool {
        self.exports.iter().any(|export| export.id == id && export.shows_bitmaps)
    }

    /// The nodes that an export offers.
    pub(super) fn nodes_of(&self, id: &str) -> Vec<String> {
        let export = self.exports.iter().find(|export| export.id == id);
        export.map(|export| export.nodes.clone()).unwrap_or_default()
    }

    /// Those that offered node `old` offer `new` now.
    pub(super) fn node_replaced(&mut self, old: &str, new: &str) {
        let names = self.exports.iter_mut().flat_map(|export| &mut export.nodes);
        names.filter(|name| *name == old).for_each(|name| new.clone_into(name));
    }

    /// Has exports whose nodes are not all active pass nothing on, and all others go on.
    pub(super) async fn pause(&self, inactive: impl Fn(&str) -> bool) {
        for export in &self.exports {
            if let Some(serving) = &export.serving {
                serving.set_paused(export.nodes.iter().any(|node| inactive(node))).await;
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

    /// What it is at. `None`: there is no such export.
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

    /// Forgets one that has ended.
    pub(super) fn forget(&mut self, id: &str) {
        self.exports.retain(|export| export.id != id);
    }

    /// Stops all exports and waits for them. Returns whether all flushes succeeded.
    ///
    /// Calls `ended` with the name of each export. Whenever an export has finished its last request, calls
    /// `quiet` with the nodes of the exports that may still have requests in flight.
    pub(super) async fn stop_all(
        mut self,
        mut ended: impl FnMut(&str),
        quiet: impl Fn(&[String]),
    ) -> bool {
        let are_quiet = Mailbox::default();
        for export in &mut self.exports {
            let (id, are_quiet) = (export.id.clone(), are_quiet.clone());
            export.stop(&self.event_loop, move || are_quiet.push(id), Rc::new(|_| {}));
        }
        let mut busy: BTreeMap<_, _> =
            self.exports.iter().map(|export| (export.id.clone(), export.nodes.clone())).collect();
        let watching = async {
            loop {
                busy.remove(&are_quiet.next().await);
                quiet(&busy.values().flatten().cloned().collect::<Vec<_>>());
            }
        };
        let ending = async {
            let mut clean = true;
            // In QSD's order: the newest first.
            for export in self.exports.into_iter().rev() {
                if let Some(stopping) = export.stopping {
                    clean &= stopping.await.unwrap_or(false);
                }
                ended(&export.id);
            }
            clean
        };
        until(ending, watching).await.unwrap_or_else(|never: Infallible| match never {})
    }

    /// Has all of them say what there is to hand over; they hear nothing any more.
    pub(super) fn describe(&self) -> Vec<(String, Asked<Described>)> {
        let describe =
            |export: &Export| Some((export.id.clone(), export.serving.as_ref()?.describe()?));
        self.exports.iter().filter_map(describe).collect()
    }

    /// Has those flush that offer a node of which `keeps_back` is true; completes when they have, or could not.
    pub(super) fn flush(&self, keeps_back: impl Fn(&str) -> bool) -> impl Future<Output = ()> {
        let flush = |export: &Export| {
            let keeps_back = export.nodes.iter().any(|node| keeps_back(node));
            Some(export.serving.as_ref().filter(|_| keeps_back)?.flush())
        };
        let asked: Vec<_> = self.exports.iter().filter_map(flush).collect();
        // What has failed fails the next time too, and is told then.
        all(asked)
    }

    /// Has all of them stop their queues, and those flush that offer a node of which `keeps_back` is true.
    pub(super) fn stop_queues(
        &self,
        keeps_back: impl Fn(&str) -> bool,
    ) -> Vec<(String, Asked<Stopped>)> {
        let stop = |export: &Export| {
            let flush = export.nodes.iter().any(|node| keeps_back(node));
            let stopped = export.serving.as_ref()?.quiesce(flush);
            Some((export.id.clone(), stopped))
        };
        self.exports.iter().filter_map(stop).collect()
    }

    /// When the oldest request in flight was taken, and of which export it is. Those are left out that
    /// offer a node of which `but` is true.
    pub(super) fn oldest(
        &self,
        but: impl Fn(&str) -> bool,
    ) -> impl Future<Output = Option<(u64, String)>> {
        let ask = |export: &Export| {
            let serving = export.serving.as_ref()?;
            let is_left_out = export.nodes.iter().any(|node| but(node));
            (!is_left_out).then(|| (export.id.clone(), serving.in_flight()))
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

    /// Has all of them serve, before they are to stop their queues once more; completes when they do.
    pub(super) fn restart_queues(&self) -> impl Future<Output = ()> + use<> {
        let serving = self.exports.iter().filter_map(|export| export.serving.as_ref());
        let asked: Vec<_> = serving.map(|serving| serving.restart_queues()).collect();
        // One that is gone serves nobody.
        all(asked)
    }

    /// Has all of them go on where they were.
    pub(super) fn resume(&self) {
        self.exports
            .iter()
            .filter_map(|export| export.serving.as_ref())
            .for_each(|serving| serving.resume());
    }

    /// Has all that were taken over begin; completes when they have.
    pub(super) fn begin(
        &self,
        mut stopped: BTreeMap<String, Stopped>,
    ) -> impl Future<Output = ()> + use<> {
        let begin = |export: &Export| {
            let serving = export.serving.as_ref()?;
            Some(serving.begin(stopped.remove(&export.id)))
        };
        let begun: Vec<_> = self.exports.iter().filter_map(begin).collect();
        all(begun)
    }

    /// Another process goes on: sends those away who could not be handed over.
    pub(super) fn disconnect_clients(&self) -> impl Future<Output = ()> + use<> {
        let serving = self.exports.iter().filter_map(|export| export.serving.as_ref());
        let parted: Vec<_> = serving.filter_map(|serving| serving.disconnect_clients()).collect();
        all(parted)
    }

    /// Lets an export go on that an error has stopped. `None`: there is no such export.
    pub(super) fn resume_after_error(&self, id: &str, now_ns: u64) -> Option<()> {
        let export = self.exports.iter().find(|export| export.id == id)?;
        if let Some(policy) = &export.policy {
            policy.resume(now_ns);
        }
        Some(())
    }

    /// What each has done, as long as it is not being stopped.
    pub(super) fn statistics(&self) -> Vec<ExportStatistics> {
        let of = |export: &Export| {
            let serving = export.serving.as_ref()?;
            Some(ExportStatistics {
                id: export.id.clone(),
                kind: export.kind,
                nodes: export.nodes.clone(),
                connected: serving.is_connected(),
                io_status: export.policy.as_ref().map_or(IoStatus::Ok, |policy| policy.status()),
                queues: serving.queues(),
            })
        };
        self.exports.iter().filter_map(of).collect()
    }

    /// What each queue of an export has done; `None`: there is no such export.
    pub(super) fn queues_of(&self, id: &str) -> Option<&[Arc<QueueStats>]> {
        let export = self.exports.iter().find(|export| export.id == id)?;
        Some(export.serving.as_ref()?.queue_stats())
    }

    /// What each queue of each export has done.
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

/// Completes when all have, whatever came of them.
async fn all(asked: Vec<impl Future>) {
    for one in asked {
        let _ = one.await;
    }
}
