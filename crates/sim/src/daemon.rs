//! A daemon under simulation: the daemon library with its command line, on simulated loops.

use std::cell::{Ref, RefCell};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use ::daemon::state_file::StateFile;
use ::daemon::{Environment, Host, Keeping, Ready, Start, receive_from};
use block::options::Discard;
use control::{Command, Merged, Step, StorageDaemonOptions};
use event_loop::EventLoop;
use event_loop::ring::sim::{Faults, Happened, Storage};
use nix::sys::signal::SigSet;
use serde_json::{Value as Json, json};

use crate::host::{Loop, Loops, Machines, Process};
use crate::image::{Format, Image};
use crate::listener::Socket;
use crate::machine::{ActorId, Machine};
use crate::{attacker, client, guest};

/// The name of the throttle group.
pub(crate) const GROUP: &str = "group";

/// The configuration of a daemon.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) io_threads: usize,
    /// Faults of the I/O threads' rings.
    pub(crate) faults: Faults,
    pub(crate) poll_max_ns: u64,
    /// Maximum operations per submission of a loop.
    pub(crate) entries: u32,
    pub(crate) preempt: u64,
    pub(crate) discard: Discard,
    /// Maximum time until the daemon is killed, nanoseconds; 0 for no kill.
    pub(crate) life_ns: u64,
    /// One kill in `power_cuts` is a power cut; 0 for never.
    pub(crate) power_cuts: u64,
    /// The daemon keeps journals of qcow2 images.
    pub(crate) journals: bool,
    /// The daemon keeps its configuration in a state file.
    pub(crate) state: bool,
    /// All disks are in a throttle group. Its limits change.
    pub(crate) throttled: bool,
}

/// A disk and its export.
pub(crate) struct Disk {
    pub(crate) image: Image,
    pub(crate) offered: Offered,
    pub(crate) discard: Discard,
    pub(crate) throttled: bool,
}

/// The export of a disk.
#[derive(Clone)]
pub(crate) enum Offered {
    VhostUser {
        socket: Rc<Socket>,
        device: guest::Device,
        queues: u16,
    },
    Nbd,
    /// AHCI over vfio-user.
    Ahci {
        socket: Rc<Socket>,
    },
    /// NVMe over vfio-user.
    Nvme {
        socket: Rc<Socket>,
        queues: u16,
    },
}

impl Offered {
    pub(crate) fn is_ahci(&self) -> bool {
        matches!(self, Offered::Ahci { .. })
    }

    pub(crate) fn is_nvme(&self) -> bool {
        matches!(self, Offered::Nvme { .. })
    }
}

/// A running daemon.
pub(crate) struct Daemon {
    machine: Machine,
    pub(crate) process: Rc<Process>,
    loops: Loops,
    io_threads: usize,
    /// The result, once the daemon has ended.
    ended: Rc<RefCell<Option<Result<(), String>>>>,
}

/// The surroundings of a daemon, which outlive it.
pub(crate) struct Surroundings<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) plan: &'a Plan,
    pub(crate) disks: &'a [Disk],
    /// The image that the attacker uses, if there is one.
    pub(crate) attacked: Option<&'a Image>,
    pub(crate) nbd_socket: &'a Socket,
    pub(crate) monitor: &'a Socket,
    pub(crate) storage: &'a Storage,
    pub(crate) journals: PathBuf,
    /// The folders of all daemons.
    pub(crate) journals_besides: Vec<PathBuf>,
    /// The state file, if any.
    pub(crate) state: Option<PathBuf>,
}

impl Surroundings<'_> {
    fn environment(&self, machines: &Rc<Machines>) -> Environment {
        Environment {
            journals: Some(self.journals.clone()),
            journals_besides: self.journals_besides.clone(),
            host: machines.clone(),
            ..Environment::default()
        }
    }
}

/// The options of a command line.
fn parse(arguments: &[String]) -> StorageDaemonOptions {
    match control::parse_args(arguments.iter().map(Into::into)) {
        Ok(Command::StorageDaemon(options)) => options,
        Ok(_) => unreachable!("the command line is that of storage-daemon"),
        Err(error) => panic!("the command line is wrong: {error}"),
    }
}

/// The first configuration of a daemon with a state file.
fn keep(path: &Path, steps: Vec<Step>) -> Start {
    let kept = StateFile::open(path, None).and_then(|(file, state)| {
        let merged = state.merge(&steps)?;
        Ok((Keeping::new(file, &steps), merged))
    });
    let (keeping, Merged { given, kept, .. }) =
        kept.unwrap_or_else(|error| panic!("the state file cannot be used: {error}"));
    Start { steps: given, kept, keeping: Some(keeping), ..Start::default() }
}

impl Daemon {
    /// Starts a daemon.
    pub(crate) fn start(around: &Surroundings<'_>) -> Self {
        let Surroundings { plan, disks, nbd_socket, monitor, .. } = around;
        let (daemon, machines) = Daemon::new(around);
        let mut environment = around.environment(&machines);
        let mut give =
            (1_000..).zip([(MONITOR.to_owned(), *monitor), (NBD.to_owned(), nbd_socket)]);
        let mut give_all = |given: &mut dyn Iterator<Item = (i32, (String, &Socket))>| {
            for (number, (name, socket)) in given {
                environment.given.add(number, Some(name), Arc::new(socket.for_daemon()));
            }
        };
        give_all(&mut give);
        let exported = disks.iter().enumerate().filter_map(|(number, disk)| match &disk.offered {
            Offered::VhostUser { socket, .. }
            | Offered::Ahci { socket }
            | Offered::Nvme { socket, .. } => Some((disk_name(number), &**socket)),
            Offered::Nbd => None,
        });
        give_all(&mut (2_000..).zip(exported));
        let arguments = command_line(plan, disks, around.attacked);
        let (result, state) = (daemon.ended.clone(), around.state.clone());
        let run = move |control: &EventLoop| {
            let steps = parse(&arguments).steps;
            let start = match state {
                Some(path) => keep(&path, steps),
                None => Start { steps, ..Start::default() },
            };
            let ready = |_: &::daemon::Daemon| Ok(Ready::new(None));
            let end = ::daemon::run_on(control, &SigSet::empty(), start, environment, ready);
            result.replace(Some(end.map_err(|error| error.to_string())));
        };
        daemon.spawn(&machines, run);
        daemon
    }

    /// Starts the new program of an upgrade, with its end of the hand-over.
    pub(crate) fn take_over(around: &Surroundings<'_>, socket: OwnedFd) -> Self {
        let (daemon, machines) = Daemon::new(around);
        let environment = around.environment(&machines);
        let (result, host) = (daemon.ended.clone(), machines.clone());
        let run = move |control: &EventLoop| {
            let Ok(mut taken) = receive_from(&*host, socket) else { host.exit(1) };
            let keeping = taken.state.take().map(|(path, file)| {
                let (file, state) = StateFile::take_over(path, file).expect("a state file");
                Keeping::new(file, &state.command_line)
            });
            let first = "ringmill".to_owned();
            let arguments: Vec<_> =
                std::iter::once(first).chain(taken.arguments.iter().cloned()).collect();
            let steps = parse(&arguments).steps;
            let start = Start { steps, taken: Some(taken), keeping, ..Start::default() };
            let ready = |_: &::daemon::Daemon| Ok(Ready::new(None));
            let end = ::daemon::run_on(control, &SigSet::empty(), start, environment, ready);
            result.replace(Some(end.map_err(|error| error.to_string())));
        };
        daemon.spawn(&machines, run);
        daemon
    }

    /// A daemon without a control loop.
    fn new(around: &Surroundings<'_>) -> (Self, Rc<Machines>) {
        let Surroundings { machine, plan, storage, .. } = around;
        let (machine, loops) = ((*machine).clone(), Loops::default());
        let process = Rc::<Process>::default();
        let machines = Rc::new(Machines {
            machine: machine.clone(),
            plan: (*plan).clone(),
            storage: (*storage).clone(),
            loops: loops.clone(),
            process: process.clone(),
        });
        let daemon =
            Daemon { machine, process, loops, io_threads: plan.io_threads, ended: Rc::default() };
        (daemon, machines)
    }

    /// Starts the control loop.
    fn spawn(&self, machines: &Machines, run: impl FnOnce(&EventLoop) + 'static) {
        let plan = &machines.plan;
        // The control loop has only polls, which do not fail.
        let polls = Faults { fail: 0, ..plan.faults.clone() };
        let control = Loop::new(machines, "control loop", plan.poll_max_ns, polls, run);
        self.loops.borrow_mut().insert(0, control.expect("a loop"));
    }

    /// Whether this actor runs a loop of the daemon.
    pub(crate) fn has(&self, actor: ActorId) -> bool {
        self.loops.borrow().iter().any(|l| l.actor == actor)
    }

    /// The control loop, then the loops of I/O threads.
    pub(crate) fn loops(&self) -> Ref<'_, Vec<Rc<Loop>>> {
        self.loops.borrow()
    }

    /// Number of file operations in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.loops.borrow().iter().map(|l| l.ring.sim.in_flight()).sum()
    }

    /// Whether all loops wait for a wake-up, with nothing in flight.
    pub(crate) fn is_asleep(&self) -> bool {
        let is_asleep =
            |l: &Rc<Loop>| self.machine.is_asleep(l.actor) && l.ring.sim.in_flight() == 0;
        self.loops.borrow().iter().all(is_asleep)
    }

    /// The counters of the rings, summed over the loops.
    pub(crate) fn happened(&self) -> Happened {
        let loops = self.loops.borrow();
        let all = loops.iter().map(|l| l.ring.sim.happened());
        all.fold(Happened::default(), |sum, one| sum.and(&one))
    }

    /// The loop of a queue, once it runs.
    pub(crate) fn loop_of(&self, queue: u16) -> Option<Rc<Loop>> {
        let loops = self.loops.borrow();
        loops.get(1 + usize::from(queue) % self.io_threads).cloned()
    }

    /// Kills the daemon with its loops wherever they are. Operations in flight are carried out or not, and none is
    /// completed. The caller closes descriptors and removes mappings.
    pub(crate) fn kill(self) {
        for l in self.loops.borrow().iter().filter(|l| !l.ended.get()) {
            l.ring.sim.kill();
            self.machine.kill(l.actor);
        }
        self.process.is_killed();
        // A killed process drops nothing: its memory is leaked.
        std::mem::forget(self);
    }

    /// The daemon's result, once it has ended.
    pub(crate) fn ended(&self) -> Option<Result<(), String>> {
        self.ended.borrow().clone()
    }
}

/// Names of the sockets of the monitor and the NBD server.
const MONITOR: &str = "monitor";
const NBD: &str = "nbd";

/// The name of a disk's node and export.
pub(crate) fn disk_name(number: usize) -> String {
    format!("disk{number}")
}

/// The name of an I/O thread.
fn io_name(number: usize) -> String {
    format!("io{number}")
}

/// The daemon's command line.
fn command_line(plan: &Plan, disks: &[Disk], attacked: Option<&Image>) -> Vec<String> {
    let mut arguments = vec!["ringmill".to_owned(), "storage-daemon".to_owned()];
    let mut add = |option: &str, value: Json| {
        arguments.extend([option.to_owned(), value.to_string()]);
    };
    let io_threads: Vec<_> = (0..plan.io_threads).map(io_name).collect();
    for id in &io_threads {
        let poll = plan.poll_max_ns;
        add("--object", json!({"qom-type": "iothread", "id": id, "poll-max-ns": poll}));
    }
    add("--object", json!({"qom-type": "throttle-group", "id": GROUP}));
    for (number, disk) in disks.iter().enumerate() {
        add("--blockdev", blockdev(number, disk));
    }
    let address = |name: &str| json!({"type": "fd", "str": name});
    if let Some(image) = attacked {
        let path = image.path().display().to_string();
        let file = json!({
            "driver": "file", "filename": path, "locking": "off", "discard": "unmap",
            "node-name": attacker::NAME,
        });
        add("--blockdev", file);
    }
    let is_nbd = |disk: &Disk| matches!(disk.offered, Offered::Nbd);
    if attacked.is_some() || disks.iter().any(is_nbd) {
        add("--nbd-server", json!({"addr": address(NBD), "handshake-max-seconds": 10}));
    }
    for (number, disk) in disks.iter().enumerate() {
        let name = disk_name(number);
        let mut export = json!({
            "id": name, "node-name": name, "writable": true, "iothread": io_threads,
        });
        match &disk.offered {
            Offered::VhostUser { device, queues, .. } => {
                export["type"] = match device {
                    guest::Device::Blk => "vhost-user-blk".into(),
                    guest::Device::Scsi => "vhost-user-scsi".into(),
                };
                export["addr"] = address(&name);
                export["num-queues"] = (*queues).into();
            }
            Offered::Nbd => {
                export["type"] = "nbd".into();
                export["name"] = client::export_name(number).into();
            }
            Offered::Ahci { .. } => {
                export["type"] = "vfio-user-ahci".into();
                export["addr"] = address(&name);
            }
            Offered::Nvme { queues, .. } => {
                export["type"] = "vfio-user-nvme".into();
                export["addr"] = address(&name);
                export["num-queues"] = (*queues).into();
            }
        }
        add("--export", export);
    }
    if attacked.is_some() {
        let name = attacker::NAME;
        let export = json!({
            "type": "nbd", "id": name, "node-name": name, "name": name, "writable": true,
            "iothread": io_threads,
        });
        add("--export", export);
    }
    let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
    add("--chardev", format!("socket,id=monitor,fd={MONITOR},server=on,wait=off"));
    add("--monitor", "chardev=monitor".to_owned());
    arguments
}

/// The options of a disk's node: its format over `file`.
fn blockdev(number: usize, disk: &Disk) -> Json {
    let discard = match disk.discard {
        Discard::Ignore => "ignore",
        Discard::Unmap => "unmap",
    };
    let name = disk_name(number);
    let path = disk.image.path().display().to_string();
    let file = json!({"driver": "file", "filename": path, "locking": "off", "discard": discard});
    let driver = match disk.image.format {
        Format::Raw => "raw",
        Format::Qcow2(_) => "qcow2",
    };
    let format = json!({"driver": driver, "discard": discard, "file": file});
    let mut top = match disk.throttled {
        true => json!({
            "driver": "throttle", "throttle-group": GROUP, "discard": discard, "file": format,
        }),
        false => format,
    };
    top["node-name"] = name.into();
    top
}
