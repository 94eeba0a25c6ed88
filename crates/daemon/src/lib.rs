//! The daemon: creates, runs and takes down what the command line and monitors ask for.
//!
//! One task owns the [`Daemon`] and carries out one change after the other. Monitors send their commands to this
//! task.

#![deny(unsafe_code)]

mod activity;
mod agenda;
mod bitmaps;
mod calendar;
mod chain;
mod changes;
mod chardev;
mod commands;
pub mod confinement;
mod damage;
mod dry_run;
mod entrances;
mod environment;
pub mod errno;
mod error;
mod errors;
mod export;
mod exports;
mod host;
mod internal_snapshots;
mod jobs;
mod journals;
mod libraries;
mod localize;
pub mod logger;
mod metrics;
mod monitor;
mod nodes;
mod objects;
mod open_files;
mod origin;
pub mod pidfile;
mod process;
mod service_manager;
mod serving;
mod signal;
mod signals;
mod snapshot;
mod socket_activation;
pub mod spawner;
mod stalls;
mod state;
pub mod state_file;
mod statistics;
mod status;
mod stopping;
mod threads;
mod threshold;
mod turn;
mod upgrade;
mod watchdog;

/// Parsers of input from other processes, for the fuzz targets. Not part of the interface.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::metrics::http;
    pub use crate::service_manager::watchdog;
    pub use crate::socket_activation::{ActivationSockets, announced};
    pub use crate::upgrade::{document, packets};
}

use std::cell::OnceCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::node::BlockNode;
use block::{DriverServices, NodeRegistry};
use control::{Inventory, Step};
use event_loop::{EventLoop, LoopConfig, oneshot, until};
use nix::sys::signal::SigSet;
use sandbox::Sandbox;
use serde_json::json;

pub use ::exports::ublk;
use agenda::Agenda;
pub use calendar::utc;
pub use commands::register as register_commands;
pub use dry_run::{check, check_ublk, check_vduse};
use entrances::Entrances;
pub use environment::Environment;
pub use error::DaemonError;
use exports::Exports;
pub use host::{Host, HostThread, OperatingSystem, Successor};
use jobs::Jobs;
use journals::Home;
pub use journals::{journal_folder, journal_folders};
pub use localize::Localize;
use monitor::{Clients, LINGER_NS, Outcome};
use objects::Objects;
pub use objects::add_credentials;
pub use open_files::raise_limit;
use origin::Origin;
use process::Process;
use serving::{End, Message};
use signal::Mailbox;
use signal::Signal;
use signals::StopSignals;
pub use signals::block as block_signals;
use signals::handled as handled_signals;
pub use state::{Identify, Keeping};
use statistics::{ProcessStatistics, Statistics, ThrottleStatistics};
pub use status::Status;
pub use stopping::STOP_TIMED_OUT;
use threads::IoThreads;
use upgrade::HandedOver;
pub use upgrade::{TakenOver, receive, receive_from};

use pidfile::Pidfile;
use spawner::Spawner;

/// Exports, their nodes, the threads that serve them, and the monitors.
pub struct Daemon {
    exports: Exports,
    entrances: Entrances,
    nodes: NodeRegistry,
    threads: IoThreads,
    objects: Objects,
    /// The inventory: all items by name, with their options and users. Checks whether a change is possible.
    inventory: Inventory,
    jobs: Jobs,
    clients: Clients,
    agenda: Agenda,
    control: EventLoop,
    process: Process,
    origin: Origin,
    localizing: localize::Localizing,
}

/// The input of [`run`].
#[derive(Default)]
pub struct Start {
    /// Steps that create the first configuration.
    pub steps: Vec<Step>,
    /// The options of `storage-daemon` with the effect of `steps`, if the steps come from another command line.
    pub command_line: Option<Vec<String>>,
    /// Starts the new program in an upgrade.
    pub spawner: Option<Spawner>,
    /// Outlives the daemon: the sockets are removed before the pid file.
    pub pidfile: Rc<OnceCell<Pidfile>>,
    /// The state that another process has handed over.
    pub taken: Option<TakenOver>,
    /// The state file, if any.
    pub keeping: Option<Keeping>,
    /// Steps from the state file. They are carried out after `ready` has run, confined as `ready` leaves the
    /// process.
    pub kept: Vec<Step>,
    /// `--stop-timeout`: the time from the signal or command that ends the daemon to the end of the process. `None`: no
    /// limit.
    pub stop_timeout: Option<Duration>,
    /// `serve --localize`.
    pub localize: Option<Localize>,
}

/// See [`Ready::finish`].
pub type Finish = Pin<Box<dyn Future<Output = Result<(), DaemonError>>>>;

/// Remaining work once the command line is carried out.
pub struct Ready {
    /// The status line to show while the daemon serves.
    pub status: Option<Status>,
    /// Needs a daemon that serves. Clients come in before; the daemon is not ready yet.
    pub finish: Option<Finish>,
    /// Reports readiness, such as in the pid file. Called after the steps of the state file.
    pub tell: Box<dyn FnOnce() -> Result<(), DaemonError>>,
}

impl Ready {
    /// Returns a value that reports readiness nowhere.
    pub fn new(status: Option<Status>) -> Self {
        Ready { status, finish: None, tell: Box::new(|| Ok(())) }
    }
}

/// Time limit of the exports to finish after an I/O thread has failed, nanoseconds. Exports of that thread
/// never finish.
const AFTER_FAILURE_NS: u64 = 5_000_000_000;

/// How serving ended.
enum Served {
    /// By a signal or a command. The value: whether all flushes succeeded.
    Stopped(bool),
    /// An I/O thread has failed.
    Failed(DaemonError),
}

/// Runs the daemon until a signal or a command ends it.
///
/// Carries out `start.steps`, then calls `ready`, which has to call [`Daemon::confine`]. At the end, requests in
/// flight are finished and flushed, and sockets removed. The process ends at once by a further signal, a second or more
/// after the first, and with [`STOP_TIMED_OUT`] after [`Start::stop_timeout`]. An I/O thread that fails ends the daemon with an error.
///
/// # Errors
///
/// A step or `ready` fails; later, the control loop, an I/O thread or the flush at the end.
pub fn run(
    start: Start,
    environment: Environment,
    ready: impl FnOnce(&Daemon) -> Result<Ready, DaemonError>,
) -> Result<(), DaemonError> {
    let blocked = signals::block()
        .map_err(|errno| DaemonError::new(format!("sigprocmask failed: {}", errno.desc())))?;
    raise_limit();
    let pool_birth = threads::pool_birth(environment.sandbox.as_ref());
    let config = LoopConfig { name: "control".into(), pool_birth, ..LoopConfig::default() };
    let control = EventLoop::new(config).map_err(DaemonError::new)?;
    run_on(&control, &blocked, start, environment, ready)
}

fn control_failed(error: &std::io::Error) -> DaemonError {
    DaemonError::new(format!("the control loop failed: {error}"))
}

/// Runs the daemon as [`run`] does, with `control` as the loop of this thread.
///
/// The loop is shut down at the end. `signals`: the signals that end the daemon. The caller has blocked them.
///
/// # Errors
///
/// Those of [`run`].
pub fn run_on(
    control: &EventLoop,
    signals: &SigSet,
    start: Start,
    environment: Environment,
    ready: impl FnOnce(&Daemon) -> Result<Ready, DaemonError>,
) -> Result<(), DaemonError> {
    let stop = StopSignals::new(control, signals)
        .map_err(|errno| DaemonError::new(format!("signalfd failed: {}", errno.desc())))?;
    let result = run_until_stopped(control, stop, start, environment, ready);
    // Drops the tasks that listen, which remove their sockets.
    let shut_down = control.shut_down();
    result.and(shut_down.map_err(|error| control_failed(&error)))
}

fn run_until_stopped(
    control: &EventLoop,
    mut stop: StopSignals,
    start: Start,
    environment: Environment,
    ready: impl FnOnce(&Daemon) -> Result<Ready, DaemonError>,
) -> Result<(), DaemonError> {
    let mut daemon = Daemon::new(control, environment);
    let host = daemon.process.host.clone();
    damage::watch(&mut daemon.nodes, control, &daemon.clients);
    threshold::watch(&mut daemon.nodes, control, &daemon.clients);
    let mailbox = daemon.agenda.mailbox.clone();
    signals::watch_upgrade(control, move || mailbox.push(Message::Upgrade))
        .map_err(|errno| DaemonError::new(format!("signalfd failed: {}", errno.desc())))?;
    let took_over = start.taken.is_some();
    stop.set_timeout(
        start.stop_timeout.map(|timeout| u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)),
    );
    let steps = daemon.begin_with(start);
    let making = async move {
        // A step may wait for a client, so a signal must be able to end it.
        let made = until(daemon.make_all(steps), stop.next()).await;
        (daemon, stop, made)
    };
    let (daemon, stop, made) = control.block_on(making).map_err(|error| control_failed(&error))?;
    let made = match made {
        // The other process still serves: its sockets and files must stay.
        Err(_) if daemon.origin.taken.is_some() => host.exit(1),
        Err(signal) => Err(signal),
        Ok(made) => Ok(made.and_then(|()| ready(&daemon))),
    };
    let keeping = async move {
        let (mut daemon, mut stop) = (daemon, stop);
        let made = match made {
            Ok(Ok(mut ready)) if !took_over => {
                let finish = ready.finish.take();
                let rest = async {
                    daemon.make_kept().await?;
                    match finish {
                        None => Ok(()),
                        Some(finish) => {
                            drop(daemon.let_in());
                            finish.await
                        }
                    }
                };
                let done = until(rest, stop.next()).await;
                done.map(|done| done.map(|()| ready))
            }
            made => made,
        };
        (daemon, stop, made)
    };
    let (mut daemon, mut stop, made) =
        control.block_on(keeping).map_err(|error| control_failed(&error))?;
    let begun = match made {
        Err(signal) => Some(End::Signal(signal)),
        Ok(made) => match made.and_then(|ready| (ready.tell)().map(|()| ready.status)) {
            Ok(status) => {
                daemon.is_ready(status);
                None
            }
            Err(error) => {
                // The first error is reported; failures of the clean-up are not.
                let _ = control.block_on(async move { daemon.end(None, &mut stop).await });
                return Err(error);
            }
        },
    };
    let served = control.block_on(async move {
        let end = match begun {
            Some(end) => end,
            None => daemon.serve(&mut stop).await,
        };
        logger::end_status();
        let (cause, quit) = match end {
            End::Failed(error) => {
                log::error!("{error}: the daemon ends, for its exports to be started again");
                daemon.process.is_stopping();
                daemon.abandon().await;
                return Served::Failed(error);
            }
            End::HandedOver(to, answer) => daemon.leave(&to, answer).await,
            End::Signal(signal) => (signal, None),
            End::Quit(answer) => ("quit", Some(answer)),
        };
        daemon.process.is_stopping();
        log::info!("{cause}: finishing the requests in flight; another signal, after a second, ends at once");
        Served::Stopped(daemon.end(quit, &mut stop).await)
    });
    match served {
        Ok(Served::Stopped(true)) => Ok(()),
        Ok(Served::Stopped(false)) => {
            Err(DaemonError::new("not all that was written could be flushed"))
        }
        Ok(Served::Failed(error)) => Err(error),
        Err(error) => Err(control_failed(&error)),
    }
}

impl Daemon {
    fn new(control: &EventLoop, mut environment: Environment) -> Self {
        commands::register();
        let mailbox = Mailbox::default();
        let (ended, failed, look) = (mailbox.clone(), mailbox.clone(), mailbox.clone());
        let host = environment.host;
        let identity = environment.sandbox.as_ref().and_then(Sandbox::identity);
        environment.given.make_for(identity);
        let journals = match environment.journals {
            Some(folder) => Home::at(folder, environment.journals_besides, identity),
            None => Home::of(identity),
        };
        Daemon {
            exports: Exports::new(
                control,
                move |id| ended.push(Message::ExportEnded(id)),
                move || look.push(Message::LookForStalls),
            ),
            entrances: Entrances::new(environment.given),
            nodes: journals
                .registry()
                .with_connector_birth(threads::helper_birth(environment.sandbox.as_ref()))
                .with_services(DriverServices::new(
                    threads::library_birth(environment.sandbox.as_ref()),
                    environment.sandbox.is_some(),
                ))
                .with_threads(host.threads()),
            threads: IoThreads::new(
                control,
                host.clone(),
                environment.sandbox.clone(),
                move |error| {
                    failed.push(Message::Failed(error));
                },
            ),
            objects: Objects::default(),
            inventory: Inventory::default(),
            jobs: Jobs::default(),
            clients: Clients::new(host.clone()),
            agenda: Agenda::new(mailbox),
            control: control.clone(),
            process: Process::new(host, environment.manager, environment.sandbox),
            origin: Origin::default(),
            localizing: localize::Localizing::default(),
        }
    }

    /// Serves clients of all kinds from now on, first those that wait already. The future completes when the
    /// exports that were handed over run.
    fn let_in(&self) -> impl Future<Output = ()> + use<> {
        let begun = self.exports.begin();
        self.entrances.open();
        begun
    }

    /// Returns the loop of the control thread.
    pub fn control(&self) -> &EventLoop {
        &self.control
    }

    /// Lets clients in: everything that the command line asks for exists.
    fn is_ready(&mut self, status: Option<Status>) {
        self.origin.serves = true;
        if !self.entrances.were_opened() {
            drop(self.let_in());
        }
        if let Some(unused) = self.entrances.given.unused() {
            log::warn!("{unused}");
        }
        if let Some(status) = status {
            let manager = self.process.manager.clone();
            self.control.spawn(status.show(self.control.clone(), self.sources(), manager));
        }
        let Some(manager) = &self.process.manager else { return };
        manager.ready(&self.summary());
        if let Some(limit_ns) = manager.watchdog_ns() {
            let threads = self.threads.alive();
            let watch = watchdog::watch(self.control.clone(), threads, limit_ns, manager.clone());
            self.control.spawn(watch);
        }
    }

    /// The status line for the service manager.
    fn summary(&self) -> String {
        match self.exports.count() {
            1 => "Serving 1 export".into(),
            n => format!("Serving {n} exports"),
        }
    }

    /// Updates the service manager's status line after the number of exports has changed.
    fn tell_summary(&self) {
        if let Some(manager) = &self.process.manager {
            manager.status(&self.summary());
        }
    }

    /// Ends this process after a hand-over, once the pid file is right, and clients have read their answers or after
    /// [`LINGER_NS`].
    async fn leave(self, to: &HandedOver, answer: Option<oneshot::Sender<Outcome>>) -> ! {
        let (pid, pause_us) = (to.pid, to.pause_ns / 1000);
        log::info!("upgrade: pid {pid} serves now, after a pause of {pause_us} us");
        self.entrances.leave();
        let parted = self.exports.disconnect_clients();
        to.settled(&self.control).await;
        if let Some(answer) = answer {
            answer.send(Ok(json!({"pid": pid, "pause-us": pause_us})));
        }
        let last = async {
            self.clients.settle().await;
            parted.await;
        };
        let deadline = self.control.now_ns() + LINGER_NS;
        let _ = until(last, self.control.sleep_until(deadline)).await;
        // Sockets and files belong to the other process: nothing is taken down.
        self.process.host.exit(0)
    }

    /// Creates the first configuration, or takes it over from another process.
    async fn make_all(&mut self, steps: Vec<Step>) -> Result<(), DaemonError> {
        if self.origin.taken.is_some() {
            self.take_over(steps).await;
            return Ok(());
        }
        self.make(&steps).await
    }

    /// Stores the parts of `start`, and returns its steps.
    fn begin_with(&mut self, start: Start) -> Vec<Step> {
        let Start {
            steps,
            command_line,
            spawner,
            pidfile,
            mut taken,
            keeping,
            kept,
            stop_timeout,
            localize,
        } = start;
        self.localizing.begin_with(localize);
        self.process.stop_timeout = stop_timeout;
        (self.process.spawner, self.process.pidfile) = (spawner.map(Rc::new), pidfile);
        for image in taken.iter_mut().flat_map(|taken| taken.images.drain(..)) {
            self.nodes.inherit_image(image);
        }
        if let Some(taken) = &mut taken {
            self.nodes.set_storing(std::mem::take(&mut taken.storing));
        }
        self.origin = Origin { command_line, taken, keeping, kept, serves: false };
        steps
    }

    /// The current statistics.
    fn statistics(&self) -> Statistics {
        Statistics {
            process: ProcessStatistics::now(),
            exports: self.exports.statistics(&self.inventory),
            threads: self.threads.statistics(),
            jobs: self.jobs.statistics(),
            throttle_groups: self.throttle_statistics(),
            now_ns: self.control.now_ns(),
        }
    }

    fn throttle_statistics(&self) -> Vec<ThrottleStatistics> {
        let of = |id: &str| {
            let group = self.nodes.throttle_group(id)?;
            Some(ThrottleStatistics { id: id.to_owned(), held: group.held_requests() })
        };
        self.nodes.throttle_groups().filter_map(of).collect()
    }

    /// Where the status line's numbers come from.
    fn sources(&self) -> status::Sources {
        status::Sources {
            queues: self.exports.queue_stats(),
            loops: self.threads.all(),
            localized: self.localizing.progress(),
        }
    }

    /// Confines this thread to what serving needs, and logs what is in force.
    ///
    /// Called once the configuration exists.
    ///
    /// # Errors
    ///
    /// The kernel refuses a part of the sandbox that it has.
    pub fn confine(&self) -> Result<(), DaemonError> {
        self.process.confine(self.are_rings_restricted())
    }

    /// Returns a node for a device of the caller, who drops it before the daemon ends.
    ///
    /// The inventory does not count this user.
    ///
    /// # Errors
    ///
    /// The node does not exist.
    pub fn node(&self, name: &str) -> Result<Arc<dyn BlockNode>, DaemonError> {
        Ok(self.nodes.get(name)?)
    }

    fn are_rings_restricted(&self) -> bool {
        let mut rings = self.rings().map(|(_, ring)| ring).chain([self.control.ring()]);
        rings.all(|ring| ring.flags.is_none_or(|flags| flags.restricted))
    }

    /// Returns the kind of ring of each I/O thread, by its id.
    pub fn rings(&self) -> impl Iterator<Item = (&str, &event_loop::Chosen)> {
        self.threads.rings()
    }

    /// Stops the exports after an I/O thread has failed, within [`AFTER_FAILURE_NS`].
    ///
    /// Threads are not joined, since the failed thread may never end. Nodes are not closed, since that thread may have
    /// been changing an image. The image is left as after a kill.
    async fn abandon(self) {
        self.agenda.mailbox.close();
        let deadline = self.control.now_ns() + AFTER_FAILURE_NS;
        let end = self.control.sleep_until(deadline);
        std::mem::forget((self.threads, self.nodes));
        let (mut exports, ended) = (self.exports, Mailbox::default());
        let mut left = exports.count();
        let is_end = ended.clone();
        exports.stop_all(|_| {}, move |id| is_end.push(id));
        let all = async {
            while left > 0 {
                // Each error was logged.
                exports.joined(&ended.next().await).await;
                left -= 1;
            }
        };
        let _ = until(all, end).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

    use super::commands::Accepted;
    use super::monitor::Request;
    use super::*;

    /// Forbids this thread to enter a ring.
    fn deny_rings() {
        let calls = [nix::libc::SYS_io_uring_enter, nix::libc::SYS_epoll_pwait2];
        let rules = calls.into_iter().map(|call| (call, Vec::new())).collect();
        let deny = SeccompAction::Errno(nix::libc::EIO.cast_unsigned());
        let arch = std::env::consts::ARCH.try_into().unwrap();
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, deny, arch).unwrap();
        seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
    }

    #[test]
    fn an_io_thread_that_fails_ends_the_daemon_with_an_error() {
        let socket = std::env::temp_dir().join(format!("daemon-{}.sock", std::process::id()));
        let export = format!(
            "vhost-user-blk,id=e,node-name=n,iothread=worker,addr.type=unix,addr.path={}",
            socket.display()
        );
        let arguments = [
            "ringmill",
            "storage-daemon",
            "--object",
            "iothread,id=worker",
            "--object",
            "iothread,id=idle",
            "--blockdev",
            "null-co,node-name=n",
            "--export",
            &export,
        ];
        let command = control::parse_args(arguments.map(Into::into)).unwrap();
        let control::Command::StorageDaemon(options) = command else { panic!() };
        let (done, is_done) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            if is_done.recv_timeout(Duration::from_secs(60)) == Err(mpsc::RecvTimeoutError::Timeout)
            {
                eprintln!("LOST: the end of a daemon whose I/O thread has failed");
                std::process::abort();
            }
        });
        let start = Start { steps: options.steps, ..Start::default() };
        let error = run(start, Environment::default(), |daemon| {
            assert!(socket.exists());
            let worker = daemon.threads.all().into_iter().next().unwrap();
            worker.spawn(|_| deny_rings()).unwrap();
            Ok(Ready::new(None))
        });
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("I/O thread \"worker\": "), "{error}");
        assert!(error.contains(" failed: ") && error.contains("os error 5"), "{error}");
        assert!(!socket.exists());
        drop(done);
    }

    /// The wait for the end of a thread also covers threads that are added later.
    #[test]
    fn an_io_thread_that_was_added_while_serving_is_watched_too() {
        let blocked = signals::block().unwrap();
        let control = EventLoop::new(LoopConfig::default()).unwrap();
        let mut stop = StopSignals::new(&control, &blocked).unwrap();
        let mut daemon = Daemon::new(&control, Environment::default());
        let end = control.block_on(async move {
            let arguments = [("qom-type", "iothread"), ("id", "late")];
            let arguments = arguments.map(|(name, value)| (name.into(), value.to_owned().into()));
            let asked = commands::read("object-add", arguments.to_vec());
            let Ok(Accepted::Call(call)) = asked else { panic!("object-add is for the daemon") };
            let (answer, outcome) = event_loop::oneshot::channel();
            daemon.agenda.mailbox.push(Message::Request(Request { call, answer }));
            let answered = until(daemon.serve(&mut stop), outcome).await;
            assert!(matches!(answered, Err(Ok(Ok(_)))));
            daemon.threads.all().first().unwrap().spawn(|_| deny_rings()).unwrap();
            let patience = daemon.control.sleep_until(daemon.control.now_ns() + 60_000_000_000);
            let end = until(daemon.serve(&mut stop), patience).await;
            std::mem::forget(daemon.threads);
            end
        });
        let Ok(Ok(End::Failed(error))) = end else { panic!("LOST: the thread's end") };
        assert!(error.to_string().starts_with("I/O thread \"late\": "), "{error}");
    }
}
