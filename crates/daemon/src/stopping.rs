//! The end of the daemon: exports, jobs and nodes, each as soon as it can end.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::pin::pin;
use std::process;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_loop::sync::lock;
use event_loop::{oneshot, until};
use serde_json::json;
use stats::QueueStats;

use super::monitor::{LINGER_NS, Outcome};
use super::signal::Mailbox;
use super::signals::StopSignals;
use super::{Daemon, Pidfile, changes};

/// The exit code of a daemon that `--stop-timeout` has ended, as of timeout(1).
pub const STOP_TIMED_OUT: i32 = 124;

/// Time between two looks for nodes without users, nanoseconds. I/O threads drop nodes without a message.
const LOOK_NS: u64 = 50_000_000;

/// Time in which a blocked control thread may still end the process itself, after `--stop-timeout`.
const GRACE: Duration = Duration::from_millis(500);

/// An event while the daemon ends.
enum Event {
    /// The export has finished its last request, but not its flush.
    Quiet(String),
    ExportEnded(String),
    /// The worker of a job has closed its nodes.
    JobClosed(String),
}

/// What the end of the daemon waits for.
#[derive(Default)]
pub(super) struct Unfinished {
    /// Exports that have not ended, with their nodes and queues.
    exports: Vec<(String, Vec<String>, Vec<Arc<QueueStats>>)>,
    /// Jobs whose workers have not ended, with their nodes.
    jobs: Vec<(String, [String; 2])>,
    /// The node that is being closed. The thread that ends the process reads it when the control thread blocks.
    closing: Arc<Mutex<Option<String>>>,
}

impl Unfinished {
    /// Returns a line for each export and job that has not ended.
    fn lines(&self) -> Vec<String> {
        let exports = self.exports.iter().map(|(id, nodes, queues)| {
            let nodes = nodes.join("\", \"");
            match queues.iter().map(|queue| queue.in_flight()).sum() {
                0 => format!("export {id}: waits for a flush: of node \"{nodes}\""),
                1 => format!("export {id}: waits for 1 request: to node \"{nodes}\""),
                n => format!("export {id}: waits for {n} requests: to node \"{nodes}\""),
            }
        });
        let jobs = self.jobs.iter().map(|(id, [source, target])| {
            format!("job {id}: waits for its requests: to nodes \"{source}\" and \"{target}\"")
        });
        exports.chain(jobs).collect()
    }
}

fn set_closing(closing: &Mutex<Option<String>>, name: Option<&str>) {
    *lock(closing) = name.map(str::to_owned);
}

fn timed_out(timeout: Duration) -> String {
    format!(
        "--stop-timeout: {} s have passed: the process ends with exit code {STOP_TIMED_OUT}, and leaves images that are \
         not closed as after a kill",
        timeout.as_secs()
    )
}

impl Daemon {
    /// Ends exports, jobs and nodes, and then answers `quit`. As in QSD, the client has had all events by then.
    ///
    /// Returns whether all completed writes are on stable storage. Does not return if `--stop-timeout` passes or a
    /// further signal insists: then the process ends, and nothing more is closed.
    pub(super) async fn end(
        self,
        quit: Option<oneshot::Sender<Outcome>>,
        stop: &mut StopSignals,
    ) -> bool {
        let (host, pidfile, timeout) =
            (self.process.host.clone(), self.process.pidfile.clone(), self.process.stop_timeout);
        let unfinished = Rc::new(RefCell::new(Unfinished::default()));
        let closing = unfinished.borrow().closing.clone();
        let _guard = timeout.zip(stop.left_ns()).map(|(timeout, left_ns)| {
            let late = move || {
                let closing = lock(&closing).take();
                if let Some(name) = closing {
                    log::error!("node {name}: waits to be closed");
                }
                log::error!("{}", timed_out(timeout));
                process::exit(STOP_TIMED_OUT);
            };
            host.unless_ended(Duration::from_nanos(left_ns) + GRACE, Box::new(late))
        });
        let mut down = pin!(self.take_down(quit, unfinished.clone()));
        let late = stop.part_has_passed(1);
        // Nothing is dropped below: an image that is dropped is closed, which may wait for what does not end.
        match until(down.as_mut(), until(stop.insisted(), late)).await {
            Ok(flushed) => flushed,
            Err(insisted) => {
                if let (Err(()), Some(timeout)) = (insisted, timeout) {
                    unfinished.borrow().lines().iter().for_each(|line| log::error!("{line}"));
                    log::error!("{}", timed_out(timeout));
                }
                pidfile.get().into_iter().for_each(Pidfile::remove);
                host.exit(if insisted.is_ok() { 1 } else { STOP_TIMED_OUT })
            }
        }
    }

    /// Ends exports, jobs and nodes, without a time limit.
    pub(super) async fn take_down(
        mut self,
        quit: Option<oneshot::Sender<Outcome>>,
        unfinished: Rc<RefCell<Unfinished>>,
    ) -> bool {
        self.agenda.mailbox.close();
        let events = Mailbox::default();
        let mut jobs = BTreeSet::new();
        for job in self.end_jobs() {
            let (id, events) = (job.id.clone(), events.clone());
            jobs.insert(id.clone());
            unfinished.borrow_mut().jobs.push((id.clone(), job.names.clone()));
            self.control.spawn(async move {
                job.closed().await;
                events.push(Event::JobClosed(id));
            });
        }
        // In QSD's order of events: the newest first.
        let mut exports = self.exports.names();
        for id in &exports {
            let nodes = self.inventory.nodes_of(id).to_vec();
            let queues = self.exports.queues_of(id).unwrap_or_default().to_vec();
            unfinished.borrow_mut().exports.push((id.clone(), nodes, queues));
        }
        let (are_quiet, ended) = (events.clone(), events.clone());
        self.exports.stop_all(
            move |id| are_quiet.push(Event::Quiet(id)),
            move |id| ended.push(Event::ExportEnded(id)),
        );
        let mut busy: BTreeSet<_> = exports.iter().cloned().collect();
        let (mut gone, mut clean) = (BTreeSet::new(), true);
        let closing = unfinished.borrow().closing.clone();
        loop {
            self.nodes.close_idle(|name| set_closing(&closing, Some(name)));
            set_closing(&closing, None);
            if exports.is_empty() && jobs.is_empty() {
                break;
            }
            let look = self.control.sleep_until(self.control.now_ns() + LOOK_NS);
            match until(events.next(), look).await {
                Err(()) => {}
                Ok(Event::Quiet(id)) => {
                    busy.remove(&id);
                    // As in QSD, locks are released before the flush, which may take long.
                    let nodes = busy.iter().flat_map(|export| self.inventory.nodes_of(export));
                    self.nodes.give_up_locks(&nodes.cloned().collect::<Vec<_>>());
                }
                Ok(Event::ExportEnded(id)) => {
                    clean &= self.exports.joined(&id).await;
                    busy.remove(&id);
                    unfinished.borrow_mut().exports.retain(|(other, ..)| *other != id);
                    gone.insert(id);
                    while let Some(id) = exports.pop_if(|id| gone.contains(id)) {
                        changes::tell_export_deleted(&self.clients, &id);
                    }
                }
                Ok(Event::JobClosed(id)) => {
                    unfinished.borrow_mut().jobs.retain(|(other, _)| *other != id);
                    jobs.remove(&id);
                }
            }
        }
        if let Some(server) = self.entrances.nbd_server {
            match self.origin.serves {
                true => server.stop_leaving_file().await,
                false => server.stop().await,
            }
        }
        self.nodes.resized().await;
        self.nodes.all_closed().await;
        // Threads first: an I/O thread may still own the node of an export that failed to start. A node that is closed there
        // leaves its journal to this thread, which removes it with `nodes`.
        drop(self.threads);
        self.nodes.close_all(|name| set_closing(&closing, Some(name)));
        set_closing(&closing, None);
        if let Some(answer) = quit {
            answer.send(Ok(json!({})));
        }
        let deadline = self.control.now_ns() + LINGER_NS;
        // A client that does not read delays the end by this time at most.
        let _ = until(self.clients.settle(), self.control.sleep_until(deadline)).await;
        clean
    }
}
