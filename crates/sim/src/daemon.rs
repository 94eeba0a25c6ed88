//! A daemon: production loops, nodes and exports, assembled as in the program, with actors in place of
//! threads.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::{
    Backing, BlockdevOptions, BlockdevRef, Discard, Driver, FileOptions, Locking, Qcow2Options,
    RawOptions, ThrottleOptions,
};
use block::throttle::{ThrottleGroup, ThrottleLimits};
use devices::ahci::{Drive, DriveConfig};
use event_loop::ring::sim::{Faults, Happened, Storage};
use event_loop::{EventLoop, JoinHandle, LoopConfig, LoopHandle, PollParams, oneshot};
use exports::nbd::{NbdExport, NbdExportConfig, NbdListen, NbdServer, NbdServerConfig};
use exports::vhost_user::{Listen, VhostUserConfig, VhostUserExport};
use guest_memory::GuestMemory;
use vcpu::ahci::Controller;

use crate::image::{Format, Image};
use crate::journals::Journals;
use crate::listener::Socket;
use crate::machine::{ActorId, Machine};
use crate::ring::{MachineRing, Preemption};
use crate::{client, guest};

/// The name of the throttle group.
const GROUP: &str = "group";

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
    /// All disks are in a throttle group, whose limits change.
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
    /// A controller in the VMM's process, with this guest memory.
    Ahci {
        memory: Arc<GuestMemory>,
    },
}

/// A loop and the actor that runs it.
pub(crate) struct Loop {
    pub(crate) actor: ActorId,
    pub(crate) ring: MachineRing,
    event_loop: EventLoop,
    handle: LoopHandle,
    wakes: Cell<u64>,
}

impl Loop {
    fn new(machine: &Machine, name: &str, plan: &Plan, faults: Faults, storage: &Storage) -> Self {
        let seed = machine.random().next();
        let preemption = Preemption { calls: plan.preempt, pushes: plan.preempt };
        let ring = MachineRing::new(machine, seed, faults, preemption, storage);
        let config = LoopConfig {
            name: name.into(),
            entries: plan.entries,
            poll: PollParams { max_ns: plan.poll_max_ns, ..PollParams::default() },
            ..LoopConfig::default()
        };
        let (boxed, clock) = (Box::new(ring.clone()), Box::new(ring.clone()));
        let event_loop = EventLoop::with_ring(config, boxed, ring.sim.chosen(), clock);
        let event_loop = event_loop.expect("a loop");
        let handle = event_loop.handle();
        let running = event_loop.clone();
        let run = move || running.run().expect("a loop that runs");
        let actor = machine.spawn(name.into(), run);
        Loop { actor, ring, event_loop, handle, wakes: Cell::new(0) }
    }

    /// Has the loop check its descriptors.
    pub(crate) fn poke(&self, machine: &Machine) {
        self.ring.sim.look_at_descriptors();
        machine.wake(self.actor);
    }

    /// Returns whether the loop was woken since the last call.
    pub(crate) fn was_woken(&self) -> bool {
        let wakes = self.handle.stats().wakes.get();
        self.wakes.replace(wakes) != wakes
    }
}

/// A running daemon.
pub(crate) struct Daemon {
    machine: Machine,
    /// The control loop, then the loops of the I/O threads.
    pub(crate) loops: Vec<Loop>,
    nodes: NodeRegistry,
    group: Arc<ThrottleGroup>,
    started: mpsc::Receiver<VhostUserExport>,
    exports: Vec<VhostUserExport>,
    /// The NBD server, once it is being started.
    nbd: Option<JoinHandle<Nbd>>,
    /// By disk.
    controllers: BTreeMap<usize, Controller>,
    drives: Vec<AhciDrive>,
}

/// The loop of an AHCI drive, and the drive, once that loop has made it.
type AhciDrive = (EventLoop, Rc<RefCell<Option<Rc<Drive>>>>);

/// The NBD server and its exports.
type Nbd = (NbdServer, Vec<NbdExport>);

impl Daemon {
    /// Starts a daemon. Fails if an image cannot be opened.
    pub(crate) fn start(
        machine: &Machine,
        plan: &Plan,
        disks: &[Disk],
        nbd_socket: &Socket,
        storage: &Storage,
        journals: &Journals,
    ) -> Result<Self, String> {
        // The control loop has only polls, which do not fail.
        let polls = Faults { fail: 0, ..plan.faults.clone() };
        let mut loops = vec![Loop::new(machine, "control loop", plan, polls, storage)];
        for n in 0..plan.io_threads {
            let name = format!("I/O loop {n}");
            loops.push(Loop::new(machine, &name, plan, plan.faults.clone(), storage));
        }
        let io_threads: Vec<_> = loops[1..].iter().map(|l| l.handle.clone()).collect();
        let mut nodes = match plan.journals {
            true => journals.registry(),
            false => NodeRegistry::new(),
        };
        let group = ThrottleGroup::new(ThrottleLimits::default()).expect("no limits");
        nodes.add_throttle_group(GROUP, group.clone());
        let (sender, started) = mpsc::channel();
        let mut over_nbd = Vec::new();
        let (mut controllers, mut drives) = (BTreeMap::new(), Vec::new());
        for (number, disk) in disks.iter().enumerate() {
            let name = format!("disk{number}");
            let node = nodes.open(&blockdev(&name, disk)).map_err(|error| error.to_string())?;
            let (id, io_threads) = (format!("export{number}"), io_threads.clone());
            let (socket, device, num_queues) = match &disk.offered {
                Offered::VhostUser { socket, device, queues } => (socket, *device, *queues),
                Offered::Nbd => {
                    over_nbd.push(NbdExportConfig {
                        id,
                        name: client::export_name(number),
                        description: String::new(),
                        node,
                        io_threads,
                        writable: true,
                        writethrough: false,
                        allocation_depth: false,
                        bitmaps: Vec::new(),
                    });
                    continue;
                }
                Offered::Ahci { memory } => {
                    let l = &loops[1 + number % plan.io_threads];
                    let (controller, drive) = attach(&l.event_loop, memory, node, &name);
                    controllers.insert(number, controller);
                    drives.push(drive);
                    continue;
                }
            };
            let config = VhostUserConfig {
                id,
                listen: Listen::Fd(socket.for_daemon().into()),
                io_threads,
                num_queues: Some(num_queues),
                writable: true,
                writethrough: false,
                logical_block_size: 512,
                pin_memory: false,
                taken_over: None,
                held: false,
            };
            let sender = sender.clone();
            let start = move |event_loop: &EventLoop| {
                let control = event_loop.clone();
                event_loop.spawn(async move {
                    let export = match device {
                        guest::Device::Blk => {
                            VhostUserExport::blk(control, config, node, name).await
                        }
                        guest::Device::Scsi => {
                            VhostUserExport::scsi(control, config, vec![node]).await
                        }
                    };
                    // Fails if the daemon was killed and the receiver dropped.
                    let _ = sender.send(export.expect("an export"));
                });
            };
            loops[0].handle.spawn(start).expect("the loop is there");
        }
        let nbd =
            (!over_nbd.is_empty()).then(|| start_nbd(&loops[0].event_loop, nbd_socket, over_nbd));
        let (machine, exports) = (machine.clone(), Vec::new());
        Ok(Daemon { machine, loops, nodes, group, started, exports, nbd, controllers, drives })
    }

    /// Changes the limits of the throttle group.
    pub(crate) fn set_limits(&self, limits: ThrottleLimits) {
        self.group.set_limits(limits).expect("limits that make sense");
    }

    /// Begins a resize. Once it has ended, `done` has whether it succeeded.
    pub(crate) fn resize(&self, disk: usize, size: u64, done: Rc<Cell<Option<bool>>>) {
        let control = &self.loops[0].event_loop;
        let resized = self.nodes.resize(&format!("disk{disk}"), size, control);
        let resized = resized.expect("the node is there");
        control.spawn(async move {
            done.set(Some(resized.await.is_ok()));
        });
        self.wake_control();
    }

    /// Wakes the control loop after a spawn from outside of it. A spawn does not wake its own loop, as a real
    /// loop's tasks are spawned on its thread.
    fn wake_control(&self) {
        self.loops[0].handle.spawn(|_| ()).expect("the loop is there");
    }

    /// The AHCI controller of a disk.
    pub(crate) fn controller(&self, disk: usize) -> Option<Controller> {
        self.controllers.get(&disk).cloned()
    }

    /// Number of file operations in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.loops.iter().map(|l| l.ring.sim.in_flight()).sum()
    }

    /// What the rings have done, summed over the loops.
    pub(crate) fn happened(&self) -> Happened {
        let all = self.loops.iter().map(|l| l.ring.sim.happened());
        all.fold(Happened::default(), |sum, one| sum.and(&one))
    }

    /// The loop of a queue.
    pub(crate) fn loop_of(&self, queue: u16) -> &Loop {
        let io = &self.loops[1..];
        &io[usize::from(queue) % io.len()]
    }

    /// Begins an orderly end as on `quit`: exports, then loops. The receiver gets whether all flushes succeeded.
    pub(crate) fn begin_stop(&mut self) -> mpsc::Receiver<bool> {
        self.exports.extend(self.started.try_iter());
        let exports = std::mem::take(&mut self.exports);
        let nbd = self.nbd.take();
        let detached: Vec<_> = self.drives.drain(..).map(detach).collect();
        let (done, stopped) = mpsc::channel();
        self.loops[0].event_loop.spawn(async move {
            let mut flushed = true;
            for drive in detached {
                drive.await.expect("the loop is there");
            }
            for export in exports {
                flushed &= export.stop().await.is_ok();
            }
            if let Some(nbd) = nbd {
                let (server, exports) = nbd.await.expect("the loop is there");
                for export in exports {
                    flushed &= export.stop().await.is_ok();
                }
                server.stop().await;
            }
            let _ = done.send(flushed);
        });
        self.wake_control();
        stopped
    }

    pub(crate) fn stop_loops(&self) {
        self.loops.iter().for_each(|l| l.handle.stop());
    }

    /// Kills the daemon with its loops wherever they are. Operations in flight are carried out or not, and none is
    /// completed. The caller closes descriptors and removes mappings.
    pub(crate) fn kill(self) {
        for l in &self.loops {
            l.ring.sim.kill();
            self.machine.kill(l.actor);
        }
        // A killed process drops nothing: leak what it had in memory.
        std::mem::forget(self);
    }

    /// Whether all loops have ended.
    pub(crate) fn has_ended(&self) -> bool {
        !self.loops.iter().any(|l| self.machine.is_there(l.actor))
    }
}

/// Begins to start the NBD server and its exports.
fn start_nbd(
    control: &EventLoop,
    socket: &Socket,
    configs: Vec<NbdExportConfig>,
) -> JoinHandle<Nbd> {
    let config = NbdServerConfig {
        listen: NbdListen::Fds(vec![Arc::new(socket.for_daemon())]),
        max_connections: 0,
        handshake_max_seconds: 10,
        tls: None,
        held: false,
    };
    let on = control.clone();
    control.spawn(async move {
        let server = NbdServer::start(&on, config).expect("a server");
        let mut exports = Vec::new();
        for config in configs {
            exports.push(server.add(config).await.expect("an export"));
        }
        (server, exports)
    })
}

/// Makes a controller for a disk, and a drive on a loop.
fn attach(
    event_loop: &EventLoop,
    memory: &Arc<GuestMemory>,
    node: Arc<dyn BlockNode>,
    name: &str,
) -> (Controller, AhciDrive) {
    let controller = Controller::new(1, memory.clone()).expect("a controller");
    let config = DriveConfig {
        geometry: node.geometry(),
        writable: true,
        write_cache: true,
        serial: name.into(),
        model: "sim".into(),
    };
    let drive = Rc::new(RefCell::new(None));
    let (ahci, on, place) = (controller.ahci.clone(), event_loop.clone(), drive.clone());
    event_loop.spawn(async move {
        let channel = node.open_channel(&on).expect("a channel");
        let attached = Drive::attach(&on, &ahci, 0, channel, config);
        place.replace(Some(attached.expect("a free port")));
    });
    (controller, (event_loop.clone(), drive))
}

/// Detaches a drive on its loop. The receiver completes once the drive has no command in flight.
fn detach((event_loop, drive): AhciDrive) -> oneshot::Receiver<()> {
    let (done, detached) = oneshot::channel();
    event_loop.spawn(async move {
        match drive.take() {
            Some(drive) => drive.detach(move || done.send(())),
            None => done.send(()),
        }
    });
    detached
}

/// The options of a disk's node: its format over `file`.
fn blockdev(name: &str, disk: &Disk) -> BlockdevOptions {
    let of = |name: Option<&str>, driver| BlockdevOptions {
        discard: disk.discard,
        ..BlockdevOptions::new(name, driver)
    };
    let filename = disk.image.path();
    let file = Driver::file(FileOptions { filename, aio: None, locking: Locking::Off });
    let file = BlockdevRef::Inline(Box::new(of(None, file)));
    let format = match disk.image.format {
        Format::Raw => Driver::from(RawOptions { file, offset: 0, size: None, keep_raw: false }),
        Format::Qcow2(_) => Driver::from(Qcow2Options {
            file,
            data_file: None,
            backing: Backing::None,
            pass_discard_request: None,
            discard_no_unref: false,
        }),
    };
    if !disk.throttled {
        return of(Some(name), format);
    }
    let file = BlockdevRef::Inline(Box::new(of(None, format)));
    let throttle_group = GROUP.into();
    of(Some(name), Driver::from(ThrottleOptions { throttle_group, file }))
}
