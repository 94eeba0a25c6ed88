//! The machine that a simulated daemon runs on: its threads are actors, and its processes are daemons of the same world.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::process::ExitStatus;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::daemon::{Host, HostThread, Successor};
use block::Threads;
use event_loop::ring::sim::{Faults, Storage};
use event_loop::{
    Chosen, EventLoop, IoThreadConfig, LoopConfig, LoopHandle, PollParams, SpawnError, ThreadEnd,
    oneshot,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::daemon::Plan;
use crate::machine::{ActorId, FOREVER, Machine};
use crate::ring::{MachineRing, Preemption};

/// The process of a daemon, as the world and another daemon see it.
#[derive(Debug, Default)]
pub(crate) struct Process {
    /// How the process has ended, as of wait(2).
    status: Cell<Option<i32>>,
    /// The hand-over's end of a program that is to be started.
    to_start: RefCell<Option<OwnedFd>>,
    /// The program that was started last.
    started: RefCell<Option<Rc<Process>>>,
    /// That program is to be killed.
    ends: Cell<bool>,
    /// The control thread blocks until this descriptor is ready.
    awaits: RefCell<Option<(OwnedFd, PollFlags)>>,
}

/// The wait(2) status of a killed process.
const KILLED: i32 = libc::SIGKILL;

impl Process {
    /// The exit code, once the process has left by itself.
    pub(crate) fn exit_code(&self) -> Option<i32> {
        self.status.get().filter(|status| *status != KILLED).map(|status| status >> 8)
    }

    /// Records that the process was killed.
    pub(crate) fn is_killed(&self) {
        self.status.set(Some(self.status.get().unwrap_or(KILLED)));
    }

    /// The hand-over's end of a program that is to be started, once.
    pub(crate) fn to_start(&self) -> Option<OwnedFd> {
        self.to_start.take()
    }

    /// Records the program that was started.
    pub(crate) fn has_started(&self, other: Rc<Process>) {
        self.started.replace(Some(other));
    }

    /// Whether the control thread blocks and its descriptor is not ready.
    pub(crate) fn is_blocked(&self) -> bool {
        self.awaits.borrow().as_ref().is_some_and(|(fd, events)| {
            poll(&mut [PollFd::new(fd.as_fd(), *events)], PollTimeout::ZERO) == Ok(0)
        })
    }

    /// Whether the program that was started is to be killed; true once per request.
    pub(crate) fn ends_other(&self) -> bool {
        self.ends.take()
    }
}

/// A loop and the actor that runs it.
pub(crate) struct Loop {
    pub(crate) actor: ActorId,
    pub(crate) ring: MachineRing,
    pub(crate) handle: LoopHandle,
    wakes: Cell<u64>,
    pub(crate) ended: Rc<Cell<bool>>,
}

impl Loop {
    /// Makes a loop, and an actor that calls `run` with it.
    pub(crate) fn new(
        machines: &Machines,
        name: &str,
        poll_max_ns: u64,
        faults: Faults,
        run: impl FnOnce(&EventLoop) + 'static,
    ) -> Result<Rc<Self>, event_loop::SetupError> {
        let Machines { machine, plan, storage, .. } = machines;
        let seed = machine.random().next();
        let preemption = Preemption { calls: plan.preempt, pushes: plan.preempt };
        let ring = MachineRing::new(machine, seed, faults, preemption, storage);
        let config = LoopConfig {
            name: name.into(),
            entries: plan.entries,
            poll: PollParams { max_ns: poll_max_ns, ..PollParams::default() },
            ..LoopConfig::default()
        };
        let (boxed, clock) = (Box::new(ring.clone()), Box::new(ring.clone()));
        let event_loop = EventLoop::with_ring(config, boxed, ring.sim.chosen(), clock)?;
        let handle = event_loop.handle();
        let ended = Rc::new(Cell::new(false));
        let end = ended.clone();
        let actor = machine.spawn(name.into(), move || {
            run(&event_loop);
            end.set(true);
        });
        Ok(Rc::new(Loop { actor, ring, handle, wakes: Cell::new(0), ended }))
    }

    /// Wakes the loop, which checks its descriptors.
    pub(crate) fn poke(&self, machine: &Machine) {
        if !self.ended.get() {
            self.ring.sim.look_at_descriptors();
            machine.wake(self.actor);
        }
    }

    /// Whether [`poke`](Self::poke) would change nothing.
    pub(crate) fn is_poked(&self, machine: &Machine) -> bool {
        self.ring.sim.will_look_at_descriptors() && machine.is_ready(self.actor)
    }

    /// Returns whether the loop was woken since the last call.
    pub(crate) fn was_woken(&self) -> bool {
        let wakes = self.handle.stats().wakes.get();
        self.wakes.replace(wakes) != wakes
    }
}

/// The loops of a daemon: the control loop, then those of I/O threads in the order of their start.
pub(crate) type Loops = Rc<RefCell<Vec<Rc<Loop>>>>;

/// The machine that a daemon runs on: its I/O threads are actors.
pub(crate) struct Machines {
    pub(crate) machine: Machine,
    pub(crate) plan: Plan,
    pub(crate) storage: Storage,
    pub(crate) loops: Loops,
    pub(crate) process: Rc<Process>,
}

impl fmt::Debug for Machines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a simulated machine")
    }
}

impl Host for Machines {
    fn start_io_thread(
        &self,
        config: IoThreadConfig,
        prepare: Box<dyn FnOnce() + Send>,
    ) -> Result<Box<dyn HostThread>, SpawnError> {
        let LoopConfig { name, poll, .. } = config.event_loop;
        let (ended, end) = oneshot::channel();
        let run = move |event_loop: &EventLoop| {
            event_loop.run().expect("a loop that runs");
            ended.send(ThreadEnd::Stopped);
        };
        let faults = self.plan.faults.clone();
        let on = Loop::new(self, &name, poll.max_ns, faults, run).map_err(SpawnError::Loop)?;
        prepare();
        let (machine, chosen) = (self.machine.clone(), on.ring.sim.chosen());
        self.loops.borrow_mut().push(on.clone());
        Ok(Box::new(Thread { machine, on, chosen, end: Some(end) }))
    }

    /// Does the work at once: it takes no virtual time.
    fn start_thread(&self, _name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        work();
        Ok(())
    }

    fn threads(&self) -> Threads {
        Threads::new(|work| {
            work();
            Ok(())
        })
    }

    fn time_of_day(&self) -> SystemTime {
        UNIX_EPOCH
            + Duration::from_secs(1_800_000_000)
            + Duration::from_nanos(self.machine.now_ns())
    }

    fn successor(&self) -> Option<Rc<dyn Successor>> {
        Some(self.process.clone())
    }

    fn wait(&self, fd: BorrowedFd<'_>, events: PollFlags) {
        let mut pause_ns = 500;
        let copy = fd.try_clone_to_owned().expect("a descriptor");
        self.process.awaits.replace(Some((copy, events)));
        while self.process.is_blocked() {
            self.machine.sleep(pause_ns);
            pause_ns = (pause_ns * 2).min(200_000);
        }
        self.process.awaits.take();
    }

    /// Simulated control threads do not block.
    fn unless_ended(&self, _time: Duration, _late: Box<dyn FnOnce() + Send>) -> Box<dyn Any> {
        Box::new(())
    }

    fn exit(&self, code: i32) -> ! {
        self.process.status.set(Some(code << 8));
        // The world removes what is left of the process.
        loop {
            self.machine.wait_until(FOREVER);
        }
    }
}

/// The number of any daemon's process. That of the simulation would make runs differ.
const PID: u32 = 1;

/// Interval at which the end of a process is checked, nanoseconds. Longer than any polling window: a loop that polls for
/// its next timer would never let the other process run.
const LOOK_NS: u64 = 200_000;

impl Successor for Process {
    fn start<'a>(
        &'a self,
        _control: &'a EventLoop,
        to: OwnedFd,
    ) -> Pin<Box<dyn Future<Output = io::Result<u32>> + 'a>> {
        // The world starts the program after this step.
        self.to_start.replace(Some(to));
        Box::pin(async { Ok(PID) })
    }

    fn end(&self) -> io::Result<()> {
        self.ends.set(true);
        Ok(())
    }

    fn ended<'a>(
        &'a self,
        control: &'a EventLoop,
    ) -> Pin<Box<dyn Future<Output = io::Result<ExitStatus>> + 'a>> {
        Box::pin(async move {
            loop {
                let status = match &*self.started.borrow() {
                    Some(other) => other.status.get(),
                    // The program was never started.
                    None => Some(KILLED),
                };
                if let Some(status) = status {
                    return Ok(ExitStatus::from_raw(status));
                }
                control.sleep_until(control.now_ns() + LOOK_NS).await;
            }
        })
    }
}

/// An I/O thread.
struct Thread {
    machine: Machine,
    on: Rc<Loop>,
    chosen: Chosen,
    /// `None` once it was taken.
    end: Option<oneshot::Receiver<ThreadEnd>>,
}

impl HostThread for Thread {
    fn handle(&self) -> &LoopHandle {
        &self.on.handle
    }

    fn ring(&self) -> &Chosen {
        &self.chosen
    }

    fn end(&mut self) -> Pin<Box<dyn Future<Output = ThreadEnd>>> {
        let end = self.end.take();
        Box::pin(async move {
            match end {
                Some(end) => end.await.unwrap_or(ThreadEnd::Panicked),
                None => std::future::pending().await,
            }
        })
    }
}

impl Drop for Thread {
    /// Waits as a join does.
    fn drop(&mut self) {
        self.on.handle.stop();
        while !self.on.ended.get() {
            self.on.poke(&self.machine);
            self.machine.sleep(1_000);
        }
    }
}
