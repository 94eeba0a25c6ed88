//! The daemon: what a command line and its monitors' clients ask for, made, run and taken down again.
//!
//! One task owns everything there is, [`Daemon`], and carries out one change after the other, whoever
//! asked for it; monitors send it their commands.

#![deny(unsafe_code)]

mod activity;
mod bitmaps;
mod chain;
mod changes;
mod chardev;
mod commands;
pub mod confinement;
mod damage;
mod disk_thread;
mod environment;
pub mod errno;
mod error;
mod errors;
mod export;
mod exports;
mod jobs;
mod journals;
mod libraries;
pub mod logger;
mod metrics;
mod monitor;
mod nodes;
mod objects;
mod open_files;
pub mod pidfile;
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
mod threads;
mod threshold;
mod turn;
mod upgrade;
mod watchdog;

/// Parsers of what another process sends, for the fuzz targets. No part of the interface.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::metrics::http;
    pub use crate::service_manager::watchdog;
    pub use crate::socket_activation::{ActivationSockets, announced};
    pub use crate::upgrade::{Definitions, document, packets};
}

use std::cell::{Cell, OnceCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;

use ::exports::nbd::NbdServer;
use block::{DriverServices, NodeRegistry};
use control::{Graph, Step};
use event_loop::{EventLoop, LoopConfig, oneshot};
use sandbox::{InForce, Sandbox};
use serde_json::json;

use chardev::Chardev;
pub use commands::register as register_commands;
pub use environment::Environment;
pub use error::DaemonError;
use export::Stopped;
use exports::Exports;
use jobs::Jobs;
use journals::Home;
use monitor::{Clients, LINGER_NS, Outcome};
use objects::Objects;
pub use open_files::raise_limit;
use serving::{End, Message};
use signal::Mailbox;
use signal::{Signal, until};
use signals::StopSignals;
pub use signals::block as block_signals;
use signals::handled as handled_signals;
pub use state::Keeping;
use statistics::{ProcessStatistics, Statistics, ThrottleStatistics};
pub use status::Status;
use threads::IoThreads;
use turn::Turn;
use upgrade::{Definitions, HandedOver};
pub use upgrade::{TakenOver, receive};

use pidfile::Pidfile;
use service_manager::ServiceManager;
use socket_activation::ActivationSockets;
use spawner::Spawner;

/// Exports, the nodes they offer, the threads that serve them, and who gives orders.
pub struct Daemon {
    exports: Exports,
    nbd_server: Option<NbdServer>,
    nodes: NodeRegistry,
    threads: IoThreads,
    objects: Objects,
    /// What there is and who uses it, by name: says whether a change fits.
    graph: Graph,
    /// Those that no monitor is on.
    chardevs: BTreeMap<String, Chardev>,
    jobs: Jobs,
    clients: Clients,
    given: ActivationSockets,
    manager: Option<Rc<ServiceManager>>,
    mailbox: Mailbox<Message>,
    /// `None`: there is none.
    sandbox: Option<Sandbox>,
    /// Once everything is ready; nothing: it is not.
    in_force: OnceCell<InForce>,
    control: EventLoop,
    /// What all this was made by.
    definitions: Definitions,
    /// The listening sockets of monitors and metrics, by what they are for.
    listeners: BTreeMap<String, (OwnedFd, Option<PathBuf>)>,
    spawner: Option<Rc<Spawner>>,
    pidfile: Rc<OnceCell<Pidfile>>,
    /// When clients of monitors and metrics are served here.
    turn: Rc<Turn>,
    /// What another process has handed over, until all is made of it.
    taken: Option<TakenOver>,
    /// Everything that the command line asks for is made.
    serves: bool,
    /// `None` without `--state`.
    keeping: Option<Keeping>,
    /// Steps from the state file that the command line lacks. Empty once carried out.
    kept: Vec<Step>,
    /// A change is under way that a stop signal must not interrupt: see `unless_stopped`.
    moving: Rc<Cell<bool>>,
}

/// What a daemon starts with.
#[derive(Default)]
pub struct Start {
    /// What it makes.
    pub steps: Vec<Step>,
    /// The arguments that stand for these, where they do not come from options.
    pub command_line: Option<Vec<String>>,
    /// Starts the program that takes over one day.
    pub spawner: Option<Spawner>,
    /// Outlives the daemon: while the file is there, so is what it stands for.
    pub pidfile: Rc<OnceCell<Pidfile>>,
    /// What it takes over itself.
    pub taken: Option<TakenOver>,
    /// The state file, if any.
    pub keeping: Option<Keeping>,
    /// Steps from the state file. They are carried out after `ready` has run, confined as `ready` leaves the
    /// process.
    pub kept: Vec<Step>,
}

/// Remaining work once the command line is carried out.
pub struct Ready {
    /// The status line to show while the daemon serves.
    pub status: Option<Status>,
    /// Reports readiness, such as in the pid file. Called after the steps of the state file.
    pub tell: Box<dyn FnOnce() -> Result<(), DaemonError>>,
}

impl Ready {
    /// Returns a value that reports readiness nowhere.
    pub fn new(status: Option<Status>) -> Self {
        Ready { status, tell: Box::new(|| Ok(())) }
    }
}

/// How long the exports have to finish once an I/O thread has failed: those that it served never do.
const AFTER_FAILURE_NS: u64 = 5_000_000_000;

/// How serving ended.
enum Served {
    /// By a signal or a command; whether all that was written could be flushed.
    Stopped(bool),
    /// By two signals.
    Insisted,
    /// An I/O thread has failed.
    Failed(DaemonError),
}

/// Makes what `start.steps` ask for, calls `ready` once it is all there, which is to call
/// [`Daemon::confine`], serves until a signal or a command ends that, and takes everything down: requests in
/// flight are finished and flushed, sockets removed.
/// A second signal ends the process at once. An I/O thread that fails ends the daemon with an error.
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
    let stop = StopSignals::new(&control, &blocked)
        .map_err(|errno| DaemonError::new(format!("signalfd failed: {}", errno.desc())))?;
    let result = run_on(&control, stop, start, environment, ready);
    // Drops the tasks that listen, which remove their sockets.
    let shut_down = control.shut_down();
    result.and(shut_down.map_err(|error| control_failed(&error)))
}

fn control_failed(error: &std::io::Error) -> DaemonError {
    DaemonError::new(format!("the control loop failed: {error}"))
}

fn run_on(
    control: &EventLoop,
    mut stop: StopSignals,
    start: Start,
    environment: Environment,
    ready: impl FnOnce(&Daemon) -> Result<Ready, DaemonError>,
) -> Result<(), DaemonError> {
    let mut daemon = Daemon::new(control, environment);
    damage::watch(&mut daemon.nodes, control, &daemon.clients);
    threshold::watch(&mut daemon.nodes, control, &daemon.clients);
    let mailbox = daemon.mailbox.clone();
    signals::watch_upgrade(control, move || mailbox.push(Message::Upgrade))
        .map_err(|errno| DaemonError::new(format!("signalfd failed: {}", errno.desc())))?;
    let took_over = start.taken.is_some();
    let steps = daemon.begin_with(start);
    let making = async move {
        // A client may be waited for.
        let made = until(daemon.make_all(steps), stop.next()).await;
        (daemon, stop, made)
    };
    let (daemon, stop, made) = control.block_on(making).map_err(|error| control_failed(&error))?;
    let made = match made {
        // What the other process has is not to be taken down.
        Err(_) if daemon.taken.is_some() => std::process::exit(1),
        Err(signal) => Err(signal),
        Ok(made) => Ok(made.and_then(|()| ready(&daemon))),
    };
    let keeping = async move {
        let (mut daemon, mut stop) = (daemon, stop);
        let made = match made {
            Ok(Ok(ready)) if !took_over => {
                let kept = until(daemon.make_kept(), stop.next()).await;
                kept.map(|kept| kept.map(|()| ready))
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
                // That is the error to tell of, whatever else goes wrong.
                let _ = control.block_on(daemon.take_down(None));
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
                daemon.is_stopping();
                daemon.abandon().await;
                return Served::Failed(error);
            }
            End::HandedOver(to) => daemon.leave(&to).await,
            End::Signal(signal) => (signal, None),
            End::Quit(answer) => ("quit", Some(answer)),
        };
        daemon.is_stopping();
        log::info!("{cause}: finishing the requests in flight; a further signal ends at once");
        let down = daemon.take_down(quit);
        until(down, stop.insisted(cause)).await.map_or(Served::Insisted, Served::Stopped)
    });
    match served {
        Ok(Served::Stopped(true)) => Ok(()),
        Ok(Served::Stopped(false)) => {
            Err(DaemonError::new("not all that was written could be flushed"))
        }
        Ok(Served::Insisted) => std::process::exit(1),
        Ok(Served::Failed(error)) => Err(error),
        Err(error) => Err(control_failed(&error)),
    }
}

impl Daemon {
    fn new(control: &EventLoop, environment: Environment) -> Self {
        commands::register();
        let mailbox = Mailbox::default();
        let (ended, failed, look) = (mailbox.clone(), mailbox.clone(), mailbox.clone());
        let journals = Home::of(environment.sandbox.as_ref().and_then(Sandbox::identity));
        Daemon {
            exports: Exports::new(
                control,
                move |id| ended.push(Message::ExportEnded(id)),
                move || look.push(Message::LookForStalls),
            ),
            nbd_server: None,
            nodes: journals
                .registry()
                .with_connector_birth(threads::helper_birth(environment.sandbox.as_ref()))
                .with_services(DriverServices::new(
                    threads::library_birth(environment.sandbox.as_ref()),
                    environment.sandbox.is_some(),
                )),
            threads: IoThreads::new(control, environment.sandbox.clone(), move |error| {
                failed.push(Message::Failed(error));
            }),
            objects: Objects::default(),
            graph: Graph::default(),
            chardevs: BTreeMap::new(),
            jobs: Jobs::default(),
            clients: Clients::default(),
            given: environment.given,
            manager: environment.manager.map(Rc::new),
            mailbox,
            sandbox: environment.sandbox,
            in_force: OnceCell::new(),
            control: control.clone(),
            definitions: Definitions::default(),
            listeners: BTreeMap::new(),
            spawner: None,
            pidfile: Rc::default(),
            turn: Rc::default(),
            taken: None,
            serves: false,
            keeping: None,
            kept: Vec::new(),
            moving: Rc::default(),
        }
    }

    /// Serves clients of all kinds from now on, first those that wait already. The future completes when the
    /// exports that were handed over run.
    fn let_in(&self, handed_over: BTreeMap<String, Stopped>) -> impl Future<Output = ()> + use<> {
        let begun = self.exports.begin(handed_over);
        if let Some(server) = &self.nbd_server {
            server.resume();
        }
        self.turn.begin();
        begun
    }

    /// Lets clients in: everything that the command line asks for exists.
    fn is_ready(&mut self, status: Option<Status>) {
        self.serves = true;
        if self.turn.is_not_yet() {
            drop(self.let_in(BTreeMap::new()));
        }
        if let Some(unused) = self.given.unused() {
            log::warn!("{unused}");
        }
        if let Some(status) = status {
            let manager = self.manager.clone();
            self.control.spawn(status.show(self.control.clone(), self.sources(), manager));
        }
        let Some(manager) = &self.manager else { return };
        manager.ready(&self.summary());
        if let Some(limit_ns) = manager.watchdog_ns() {
            let threads = self.threads.alive();
            let watch = watchdog::watch(self.control.clone(), threads, limit_ns, manager.clone());
            self.control.spawn(watch);
        }
    }

    fn is_stopping(&self) {
        if let Some(manager) = &self.manager {
            manager.stopping();
        }
    }

    /// A line for people.
    fn summary(&self) -> String {
        match self.exports.all().count() {
            1 => "Serving 1 export".into(),
            n => format!("Serving {n} exports"),
        }
    }

    /// There are more exports, or fewer.
    fn tell_summary(&self) {
        if let Some(manager) = &self.manager {
            manager.status(&self.summary());
        }
    }

    /// Another process serves now: tells who has asked for it, and ends this one.
    async fn leave(self, to: &HandedOver) -> ! {
        let pause_us = to.pause_ns / 1000;
        log::info!("upgrade: pid {} serves now, after a pause of {pause_us} us", to.pid);
        self.turn.end();
        let parted = self.exports.disconnect_clients();
        let last = async {
            self.clients.settle().await;
            parted.await;
        };
        let deadline = self.control.now_ns() + LINGER_NS;
        let _ = until(last, self.control.sleep_until(deadline)).await;
        // Nothing is to be taken down: it belongs to the other one.
        std::process::exit(0);
    }

    /// Makes, or takes over, all that it begins with.
    async fn make_all(&mut self, steps: Vec<Step>) -> Result<(), DaemonError> {
        if self.taken.is_some() {
            self.take_over(steps).await;
            return Ok(());
        }
        self.make(&steps).await
    }

    /// Has what this is to begin with; gives what is to be made.
    fn begin_with(&mut self, start: Start) -> Vec<Step> {
        let Start { steps, command_line, spawner, pidfile, mut taken, keeping, kept } = start;
        (self.spawner, self.pidfile) = (spawner.map(Rc::new), pidfile);
        (self.keeping, self.kept) = (keeping, kept);
        if let Some(arguments) = command_line {
            self.definitions.of_command_line(arguments);
        }
        for image in taken.iter_mut().flat_map(|taken| taken.images.drain(..)) {
            self.nodes.inherit_image(image);
        }
        self.taken = taken;
        steps
    }

    /// What has been done so far.
    fn statistics(&self) -> Statistics {
        Statistics {
            process: ProcessStatistics::now(),
            exports: self.exports.statistics(),
            threads: self.threads.statistics(),
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
        status::Sources { queues: self.exports.queue_stats(), loops: self.threads.all() }
    }

    /// Everything is there: from here on this thread has what serving needs and no more. Says what is in
    /// force.
    pub fn confine(&self) -> Result<(), DaemonError> {
        let Some(sandbox) = &self.sandbox else {
            log::info!("sandbox: off");
            return Ok(());
        };
        let in_force = sandbox.serve(self.are_rings_restricted());
        let in_force = in_force.map_err(|error| DaemonError::new(error).of("sandbox"))?;
        log::info!("sandbox: {in_force}");
        let _ = self.in_force.set(in_force);
        Ok(())
    }

    /// Whether [`confine`](Self::confine) is possible.
    fn rehearse_confining(&self) -> Result<(), DaemonError> {
        let Some(sandbox) = &self.sandbox else { return Ok(()) };
        let rehearsed = sandbox.rehearse(self.are_rings_restricted());
        rehearsed.map(drop).map_err(|error| DaemonError::new(error).of("sandbox"))
    }

    fn are_rings_restricted(&self) -> bool {
        let mut rings = self.rings().map(|(_, ring)| ring).chain([self.control.ring()]);
        rings.all(|ring| ring.flags.is_none_or(|flags| flags.restricted))
    }

    /// What each I/O thread runs on.
    pub fn rings(&self) -> impl Iterator<Item = (&str, &event_loop::Chosen)> {
        self.threads.rings()
    }

    /// Ends exports, closes nodes, and then answers `quit`. As in QSD, the client has had all events by then.
    ///
    /// Returns whether everything that guests were told is on stable storage.
    async fn take_down(mut self, quit: Option<oneshot::Sender<Outcome>>) -> bool {
        self.mailbox.close();
        self.cancel_jobs().await;
        let clients = self.clients;
        let ended = |id: &str| changes::tell_export_deleted(&clients, id);
        // QEMU's daemon releases locks here, too: before the flush, which may take long.
        let quiet = |busy: &[String]| self.nodes.give_up_locks(busy);
        let clean = self.exports.stop_all(ended, quiet).await;
        if let Some(server) = self.nbd_server {
            match self.serves {
                true => server.stop_leaving_file().await,
                false => server.stop().await,
            }
        }
        self.nodes.resized().await;
        drop(self.nodes);
        drop(self.threads);
        if let Some(answer) = quit {
            answer.send(Ok(json!({})));
        }
        let deadline = self.control.now_ns() + LINGER_NS;
        // Who does not read what it is sent is not waited for.
        let _ = until(clients.settle(), self.control.sleep_until(deadline)).await;
        clean
    }

    /// After a thread has failed: stops the exports, but takes no longer than [`AFTER_FAILURE_NS`].
    /// The threads are left to the end of the process, since the one that failed may never come to
    /// be joined; and the nodes, since it may have been changing an image: that one is left as by a kill.
    async fn abandon(self) {
        self.mailbox.close();
        let deadline = self.control.now_ns() + AFTER_FAILURE_NS;
        let end = self.control.sleep_until(deadline);
        std::mem::forget((self.threads, self.nodes));
        // Each error was logged.
        let _ = until(self.exports.stop_all(|_| {}, |_| {}), end).await;
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

    /// From here on this thread cannot enter a ring.
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

    /// Waiting for the first to end does not mean those that were there when the waiting began.
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
            daemon.mailbox.push(Message::Request(Request { call, answer }));
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
