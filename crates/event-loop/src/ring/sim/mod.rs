//! A simulated ring: virtual time, seeded order, seeded and scripted faults.
//!
//! Operations on files are real system calls on real descriptors, [`Sim::file`]'s memory files as
//! a rule, but *when* each is carried out, in what order, how far and with what result is up to the
//! simulation. What it may do is what io_uring may do: complete in any order, early or late, in part or
//! not at all; refuse to take more; have completions that only the next call fetches; return from
//! a wait for no reason; report a descriptor ready that is not; end a multishot poll. From submission
//! to completion it scribbles over memory to be read into, since the kernel may.
//!
//! What a power cut would leave of the files is kept track of, with a write cache that loses, keeps and
//! tears: [`Storage`].
//!
//! Descriptors are watched for real, so that other threads can wake the loop. Time is virtual: it
//! passes when the loop waits with operations pending, by leaps, and a little with each reading of
//! the clock, so that busy polling ends.
//!
//! ```
//! use event_loop::ring::sim::{Faults, Sim};
//! use event_loop::{AlignedBuf, Engine, IoOp, LoopConfig};
//!
//! let sim = Sim::new(7, Faults { short: 30, ..Faults::default() });
//! let event_loop = sim.event_loop(LoopConfig::default())?;
//! let file = event_loop.register_file(sim.file(b"hello")?);
//! let bufs = AlignedBuf::io_bufs(5, 1).unwrap();
//! let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
//! let (n, _) = event_loop.block_on(read)?;
//! assert!((1..=5).contains(&n?));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod carry_out;
mod faults;
mod storage;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

pub use self::faults::{Faults, Happened, SimOp, Verdict};
use self::faults::{Random, describe};
pub use self::storage::{SECTOR, Storage, Unflushed};
use crate::clock::{Clock, CpuShare};
use crate::event_loop::{EventLoop, LoopConfig};
pub use crate::executor::elsewhere;
use crate::ring::epoll::EpollRing;
use crate::ring::setup::{Chosen, RingFlags, SetupError};
pub use crate::ring::socket::socket_transfers;
use crate::ring::{Completion, Ready, Ring, RingFile, RingOp, Wait};
pub use crate::thread_pool::without_threads;

/// A simulated world: one ring, one clock, any number of files. Clones are handles to the same.
///
/// The same seed, faults and calls give the same course of events, as long as no other thread takes
/// part.
#[derive(Clone)]
pub struct Sim(Rc<RefCell<World>>);

#[cfg(not(miri))]
fn memory_file() -> io::Result<File> {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    Ok(memfd_create("sim", MFdFlags::MFD_CLOEXEC)?.into())
}

/// Miri knows no memory files: one without a name.
#[cfg(miri)]
fn memory_file() -> io::Result<File> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("sim-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let name = std::env::temp_dir().join(name);
    let file = File::options().read(true).write(true).create_new(true).open(&name)?;
    std::fs::remove_file(name)?;
    Ok(file)
}

type Script = Box<dyn FnMut(&SimOp) -> Verdict>;

/// What happens outside of the loop, and when.
type Outside = (u64, Box<dyn FnOnce()>);

struct World {
    now_ns: u64,
    clock_reads: u64,
    faults: Faults,
    random: Random,
    script: Option<Script>,
    /// By time, the next one last.
    outside: Vec<Outside>,
    /// Real descriptors.
    polls: EpollRing,
    from_polls: Vec<Completion>,
    /// Polls that are armed, for faults to pick from: `user_data`, and whether it is multishot.
    armed: Vec<(u64, bool)>,
    queue: VecDeque<(RingOp, u64)>,
    pending: Vec<Pending>,
    completions: VecDeque<Completion>,
    fixed: Vec<Option<RawFd>>,
    storage: Storage,
    max_in_flight: usize,
    happened: Happened,
    /// Real descriptors are looked at: always, or (`Some`) only once somebody has said that there is
    /// something to see.
    touched: Option<bool>,
}

/// When held operations are due.
const HELD: u64 = u64::MAX;

/// An operation under way.
struct Pending {
    due_ns: u64,
    fd: RawFd,
    op: RingOp,
    user_data: u64,
    verdict: Verdict,
    /// Of a flush: the changes that it makes stable.
    flushes: u64,
}

impl Sim {
    /// A world that begins at time 0.
    ///
    /// # Panics
    ///
    /// When the process is out of file descriptors: this is for tests.
    pub fn new(seed: u64, faults: Faults) -> Self {
        Self::with_storage(seed, faults, Storage::new())
    }

    /// The same, with files that other worlds have too: those of other loops, or those before a power
    /// cut.
    ///
    /// # Panics
    ///
    /// As of [`new`](Self::new).
    #[expect(clippy::expect_used, reason = "for tests")]
    pub fn with_storage(seed: u64, faults: Faults, storage: Storage) -> Self {
        Sim(Rc::new(RefCell::new(World {
            now_ns: 0,
            clock_reads: 0,
            faults,
            random: Random::new(seed),
            script: None,
            outside: Vec::new(),
            polls: EpollRing::new().expect("epoll_create1"),
            from_polls: Vec::with_capacity(256),
            armed: Vec::new(),
            queue: VecDeque::new(),
            pending: Vec::new(),
            completions: VecDeque::new(),
            fixed: Vec::new(),
            storage,
            max_in_flight: 0,
            happened: Happened::default(),
            touched: None,
        })))
    }

    /// A loop over this world.
    ///
    /// # Errors
    ///
    /// As of [`EventLoop::with_ring`].
    pub fn event_loop(&self, config: LoopConfig) -> Result<EventLoop, SetupError> {
        EventLoop::with_ring(config, self.ring(), self.chosen(), self.clock())
    }

    /// The world's ring, for [`EventLoop::with_ring`].
    pub fn ring(&self) -> Box<dyn Ring> {
        Box::new(self.clone())
    }

    /// The world's clock, for [`EventLoop::with_ring`].
    pub fn clock(&self) -> Box<dyn Clock> {
        Box::new(self.clone())
    }

    /// What a loop over this world says that it runs on: io_uring at its best.
    pub fn chosen(&self) -> Chosen {
        Chosen { flags: Some(RingFlags::BEST), refused: Vec::new() }
    }

    /// A file in memory with this content, which counts as durable. A real one (memfd_create(2)):
    /// whatever works on a descriptor works on it.
    ///
    /// # Errors
    ///
    /// Those of memfd_create(2) and write(2).
    pub fn file(&self, content: &[u8]) -> io::Result<Arc<OwnedFd>> {
        let file = memory_file()?;
        std::os::unix::fs::FileExt::write_all_at(&file, content, 0)?;
        let fd = OwnedFd::from(file);
        self.0.borrow().storage.add(&fd)?;
        Ok(Arc::new(fd))
    }

    /// The files that a power cut concerns: [`file`](Self::file)'s, and those that are
    /// [added](Storage::add).
    pub fn storage(&self) -> Storage {
        self.0.borrow().storage.clone()
    }

    /// What a power cut now would leave at least: see [`Storage::stable`].
    pub fn durable(&self, fd: &OwnedFd) -> Option<Vec<u8>> {
        self.0.borrow().storage.stable(fd)
    }

    /// What a power cut now leaves of a file, with operations of this world in flight: see
    /// [`Storage::cut`]. The simulation goes on as if nothing had been.
    pub fn cut(&self, fd: &OwnedFd, seed: u64) -> Option<Vec<u8>> {
        let world = self.0.borrow();
        world.storage.cut_with(fd.as_fd(), seed, world.in_flight(fd))
    }

    /// What a process leaves of a file that is killed now: all that has completed, and of each operation that this
    /// world has in flight all, nothing or a part. The simulation goes on as if nothing had been. `None`: the file
    /// is not kept track of.
    pub fn killed(&self, fd: &OwnedFd, seed: u64) -> Option<Vec<u8>> {
        let world = self.0.borrow();
        world.storage.killed_with(fd.as_fd(), seed, world.in_flight(fd))
    }

    /// Decides about each file operation as it is submitted, instead of the seeded faults where it
    /// does not say [`Verdict::Seeded`]. It must not call the `Sim` itself.
    pub fn script(&self, script: impl FnMut(&SimOp) -> Verdict + 'static) {
        self.0.borrow_mut().script = Some(Box::new(script));
    }

    /// Has something happen at a time, while the loop looks for events or sleeps: what another thread
    /// would do, a descriptor signalled or something asked of a [`LoopHandle`](crate::LoopHandle),
    /// but at the same point in each run. It must not call the `Sim` itself, nor the loop.
    pub fn at(&self, ns: u64, call: impl FnOnce() + 'static) {
        let outside = &mut self.0.borrow_mut().outside;
        let place = outside.partition_point(|(due_ns, _)| *due_ns > ns);
        outside.insert(place, (ns, Box::new(call)));
    }

    /// Changes the faults from here on.
    pub fn set_faults(&self, faults: Faults) {
        self.0.borrow_mut().faults = faults;
    }

    /// Lets operations go on that were held by [`Verdict::Hold`]; returns how many.
    pub fn release(&self) -> usize {
        let world = &mut *self.0.borrow_mut();
        let held = world.pending.iter_mut().filter(|pending| pending.due_ns == HELD);
        held.map(|pending| pending.due_ns = world.now_ns).count()
    }

    /// From here on real descriptors are looked at only after a call of this: where all that happens
    /// to them is the simulation's doing, which knows, and a system call per look would be most of
    /// what it does.
    pub fn look_at_descriptors(&self) {
        self.0.borrow_mut().touched = Some(true);
    }

    /// Whether a real descriptor has something to tell.
    pub fn has_events(&self) -> bool {
        let world = self.0.borrow();
        let mut fds = [PollFd::new(world.polls.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// When the next operation is due that is under way, and not held; `None`: none is.
    pub fn next_due_ns(&self) -> Option<u64> {
        let world = self.0.borrow();
        let due = world.pending.iter().map(|pending| pending.due_ns).min();
        due.filter(|due_ns| *due_ns != HELD)
    }

    /// File operations submitted and not yet completed.
    pub fn in_flight(&self) -> usize {
        self.0.borrow().pending.len()
    }

    /// What this ring has done to its loop so far.
    pub fn happened(&self) -> Happened {
        self.0.borrow().happened.clone()
    }

    /// The process is killed: of the operations under way each is carried out or not, and that is
    /// all that will ever happen here.
    pub fn kill(&self) {
        let world = &mut *self.0.borrow_mut();
        world.queue.clear();
        for pending in std::mem::take(&mut world.pending) {
            if world.random.percent(50) {
                pending.carry_out(&world.storage);
            }
        }
    }

    /// The most file operations that were under way at once so far.
    pub fn max_in_flight(&self) -> usize {
        self.0.borrow().max_in_flight
    }

    /// Virtual time, nanoseconds; does not count as a reading of the clock.
    pub fn now_ns(&self) -> u64 {
        self.0.borrow().now_ns
    }

    /// Lets time pass.
    pub fn advance(&self, ns: u64) {
        self.0.borrow_mut().now_ns += ns;
    }

    /// How often the loop has read the clock.
    pub fn clock_reads(&self) -> u64 {
        self.0.borrow().clock_reads
    }
}

impl Clock for Sim {
    fn now_ns(&self) -> u64 {
        let world = &mut *self.0.borrow_mut();
        world.clock_reads += 1;
        world.now_ns += world.faults.clock_step_ns;
        world.now_ns
    }

    fn cpu_ns(&self) -> Option<u64> {
        None
    }

    fn cpu_share(&self) -> Option<CpuShare> {
        None
    }
}

impl Ring for Sim {
    unsafe fn push(&mut self, op: &RingOp, user_data: u64) -> bool {
        let world = &mut *self.0.borrow_mut();
        let full = world.queue.len() >= world.faults.entries.max(1);
        // An empty queue takes something, else nothing would ever move.
        if full || (!world.queue.is_empty() && world.random.percent(world.faults.full)) {
            world.happened.full += 1;
            return false;
        }
        world.queue.push_back((*op, user_data));
        true
    }

    fn queued(&mut self) -> u32 {
        self.0.borrow().queue.len() as u32
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        self.0.borrow_mut().enter(wait)
    }

    fn ready(&mut self) -> Ready {
        let world = &mut *self.0.borrow_mut();
        world.let_outside_happen();
        if !world.completions.is_empty() {
            return Ready::Completions;
        }
        // What has come is there to be fetched, as flagged task work is.
        let due = world.pending.iter().any(|pending| pending.due_ns <= world.now_ns);
        if due || world.look_at_descriptors(Wait::No).is_err() || !world.from_polls.is_empty() {
            return Ready::NeedsEnter;
        }
        Ready::Nothing
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        let world = &mut *self.0.borrow_mut();
        let room = (into.capacity() - into.len()).min(world.completions.len());
        into.extend(world.completions.drain(..room));
    }

    /// None: no descriptor shows virtual time.
    fn pollable_fd(&self) -> Option<RawFd> {
        None
    }

    fn does_file_io(&self) -> bool {
        true
    }

    fn register_file(&mut self, fd: RawFd) -> Option<u32> {
        let world = &mut *self.0.borrow_mut();
        if world.random.percent(world.faults.no_fixed_file) {
            return None;
        }
        let free = world.fixed.iter().position(Option::is_none);
        let index = free.unwrap_or(world.fixed.len());
        match free {
            Some(index) => world.fixed[index] = Some(fd),
            None => world.fixed.push(Some(fd)),
        }
        u32::try_from(index).ok()
    }

    fn unregister_file(&mut self, index: u32) {
        if let Some(place) = self.0.borrow_mut().fixed.get_mut(index as usize) {
            *place = None;
        }
    }
}

impl World {
    /// What operations in flight will change of a file.
    fn in_flight(&self, file: &OwnedFd) -> Vec<storage::InFlight> {
        self.pending.iter().filter_map(|pending| pending.in_flight(file)).collect()
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        if self.random.percent(self.faults.early_return) {
            // As a signal has it, or a lack of memory for requests: before everything was submitted, or
            // after that.
            self.happened.early_returns += 1;
            let some = self.random.below(self.queue.len() as u64 + 1);
            self.submit(some as usize);
            return Ok(());
        }
        self.submit(self.queue.len());
        let deadline = match wait {
            Wait::No => self.now_ns,
            Wait::For(ns) => self.now_ns.saturating_add(ns),
            Wait::Forever => u64::MAX,
        };
        loop {
            self.let_outside_happen();
            self.look_at_descriptors(Wait::No)?;
            self.post();
            if !self.completions.is_empty() || wait == Wait::No {
                return Ok(());
            }
            let outside = self.outside.last().map(|(due_ns, _)| *due_ns);
            let next = self.pending.iter().map(|pending| pending.due_ns).chain(outside).min();
            match next {
                Some(due) if due <= deadline && due != HELD => self.now_ns = self.now_ns.max(due),
                _ if deadline == u64::MAX => self.look_at_descriptors(Wait::Forever)?,
                _ => {
                    self.now_ns = deadline;
                    return Ok(());
                }
            }
        }
    }

    fn let_outside_happen(&mut self) {
        while let Some((_, call)) = self.outside.pop_if(|(due_ns, _)| *due_ns <= self.now_ns) {
            elsewhere(call);
        }
    }

    fn submit(&mut self, count: usize) {
        for _ in 0..count {
            let Some((op, user_data)) = self.queue.pop_front() else { break };
            match op {
                RingOp::PollAdd { multishot, .. } => {
                    self.armed.push((user_data, multishot));
                    self.push_poll(&op, user_data);
                }
                RingOp::PollRemove { .. } => self.push_poll(&op, user_data),
                RingOp::Cancel { user_data: target } => self.cancel(target, user_data),
                _ => self.start(op, user_data),
            }
        }
        self.max_in_flight = self.max_in_flight.max(self.pending.len());
    }

    fn push_poll(&mut self, op: &RingOp, user_data: u64) {
        // It may be ready as it is armed.
        self.touched = self.touched.map(|_| true);
        // SAFETY: a poll names no memory; descriptors, and a socket's memory, are `Ring::push`'s
        // caller's promise.
        let taken = unsafe { self.polls.push(op, user_data) };
        debug_assert!(taken, "epoll takes any number");
    }

    fn start(&mut self, op: RingOp, user_data: u64) {
        let Some((sim_op, file)) = describe(&op) else {
            return self.complete(user_data, -libc::EINVAL);
        };
        let fd = match file {
            RingFile::Fd(fd) => Some(fd),
            RingFile::Fixed(index) => self.fixed.get(index as usize).copied().flatten(),
        };
        let Some(fd) = fd else { return self.complete(user_data, -libc::EBADF) };
        let mut op = op;
        if let RingOp::Rw { file, socket: true, .. }
        | RingOp::RwVectored { file, socket: true, .. } = &mut op
        {
            // A real socket, and no faults but those of polls.
            *file = RingFile::Fd(fd);
            return self.push_poll(&op, user_data);
        }
        let verdict = match &mut self.script {
            Some(script) => script(&sim_op),
            None => Verdict::Seeded,
        };
        let verdict = match verdict {
            Verdict::Seeded => self.faults.verdict(&sim_op, &mut self.random),
            scripted => scripted,
        };
        let delay = match verdict {
            Verdict::Hold => HELD,
            Verdict::Delay(ns) | Verdict::FailLate(ns, _) => ns,
            _ => self.faults.latency(&mut self.random, &mut self.happened),
        };
        match verdict {
            Verdict::Short(_) => self.happened.short += 1,
            Verdict::Fail(libc::EAGAIN | libc::EINTR) => self.happened.transient += 1,
            Verdict::Fail(_) | Verdict::FailLate(..) => self.happened.failed += 1,
            _ => {}
        }
        let due_ns = self.now_ns.saturating_add(delay);
        let flushes = match op {
            RingOp::Fsync { .. } => carry_out::begin_flush(&self.storage, fd),
            _ => 0,
        };
        let pending = Pending { due_ns, fd, op, user_data, verdict, flushes };
        if self.faults.scribble {
            pending.scribble();
        }
        self.pending.push(pending);
    }

    fn cancel(&mut self, target: u64, user_data: u64) {
        let comes_late = self.random.percent(self.faults.late_cancel);
        let Some(at) = self.pending.iter().position(|pending| pending.user_data == target) else {
            // A poll, then, or nothing at all.
            return self.push_poll(&RingOp::PollRemove { user_data: target }, user_data);
        };
        if comes_late {
            // It goes on, and completes soon.
            self.pending[at].due_ns = self.now_ns;
            return self.complete(user_data, -libc::EALREADY);
        }
        self.pending.remove(at);
        self.complete(target, -libc::ECANCELED);
        self.complete(user_data, 0);
    }

    fn complete(&mut self, user_data: u64, result: i32) {
        self.completions.push_back(Completion { user_data, result, more: false });
    }

    /// Carries out what is due, in random order, as far as the completion queue has room.
    fn post(&mut self) {
        self.disturb_polls();
        loop {
            let room = self.faults.completions.max(1).saturating_sub(self.completions.len());
            let due = self.pending.iter().filter(|pending| pending.due_ns <= self.now_ns).count();
            let all = due + self.from_polls.len();
            if room == 0 || all == 0 {
                self.happened.overflows += u64::from(all > 0);
                return;
            }
            let pick = self.random.below(all as u64) as usize;
            if pick < self.from_polls.len() {
                // In order: what a poll says last must come last.
                let completion = self.from_polls.remove(0);
                self.completions.push_back(completion);
                continue;
            }
            let nth = pick - self.from_polls.len();
            let at = (0..self.pending.len())
                .filter(|&at| self.pending[at].due_ns <= self.now_ns)
                .nth(nth)
                .unwrap_or(0);
            // In the order they were submitted, so that the first is the oldest.
            let pending = self.pending.remove(at);
            self.happened.reordered += u64::from(at > 0);
            let result = pending.carry_out(&self.storage);
            self.complete(pending.user_data, result);
            if self.random.percent(self.faults.duplicate) {
                self.happened.duplicates += 1;
                self.complete(pending.user_data, result);
            }
        }
    }

    /// Takes what the real descriptors have to say.
    fn look_at_descriptors(&mut self, wait: Wait) -> io::Result<()> {
        if let Some(touched) = &mut self.touched
            && !std::mem::take(touched)
            && wait == Wait::No
        {
            return Ok(());
        }
        self.polls.enter(wait)?;
        let before = self.from_polls.len();
        self.from_polls.reserve(64);
        self.polls.reap(&mut self.from_polls);
        for at in before..self.from_polls.len() {
            let Completion { user_data, result, more } = self.from_polls[at];
            if !more {
                self.armed.retain(|(armed, _)| *armed != user_data);
            } else if result >= 0 && self.random.percent(self.faults.multishot_ends) {
                self.happened.ended_multishots += 1;
                self.from_polls[at].more = false;
                self.forget_poll(user_data);
            }
        }
        Ok(())
    }

    /// Takes an armed poll away without the loop's knowledge.
    fn forget_poll(&mut self, user_data: u64) {
        self.armed.retain(|(armed, _)| *armed != user_data);
        self.polls.forget(user_data);
    }

    /// Polls that fire for nothing, or end as if memory had run out.
    fn disturb_polls(&mut self) {
        let fails = self.random.percent(self.faults.poll_fails);
        if self.armed.is_empty() || !(fails || self.random.percent(self.faults.spurious_poll)) {
            return;
        }
        let at = self.random.below(self.armed.len() as u64) as usize;
        let (user_data, multishot) = self.armed[at];
        let more = multishot && !fails;
        if !more {
            self.forget_poll(user_data);
        }
        self.happened.failed_polls += u64::from(fails);
        self.happened.spurious_polls += u64::from(!fails);
        let result = if fails { -libc::ENOMEM } else { i32::from(libc::POLLIN) };
        self.from_polls.push(Completion { user_data, result, more });
    }
}
