//! A simulated ring: virtual time, seeded order, seeded and scripted faults.
//!
//! Operations on files are real system calls on real descriptors, usually [`Sim::file`]'s memory files. The
//! simulation decides when each is carried out, in what order, how far and with what result, within what
//! io_uring may do. It completes operations in any order, early or late, in part or not at all. It refuses
//! further operations, delays completions to the next call, returns from a wait without a reason, reports a
//! descriptor ready that is not, and ends multishot polls. From submission to completion it overwrites
//! memory to be read into, since the kernel may.
//!
//! [`Storage`] tracks what a power cut would leave of the files, with a write cache that loses, keeps and
//! tears writes.
//!
//! Descriptors are watched for real, so that other threads can wake the loop. Time is virtual. It advances
//! when the loop waits for pending operations, and a little with each reading of the clock, so that busy
//! polling ends.
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
mod random;
mod storage;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use self::faults::describe;
pub use self::faults::{Faults, Happened, SimOp, Verdict};
pub use self::random::Random;
pub use self::storage::{SECTOR, Storage, Unflushed};
use crate::clock::{Clock, CpuShare};
use crate::event_loop::{EventLoop, LoopConfig};
pub use crate::executor::elsewhere;
use crate::ring::epoll::EpollRing;
use crate::ring::setup::{Chosen, RingFlags, SetupError};
pub use crate::ring::socket::socket_transfers;
use crate::ring::{Completion, Ready, Ring, RingFile, RingOp, Wait};
use crate::sync::lock;
pub use crate::thread_pool::without_threads;

/// A simulated world: one ring, one clock, any number of files.
///
/// Clones are handles to the same world.
///
/// Equal seeds, faults and calls cause equal courses of events, unless other threads take part.
#[derive(Clone)]
pub struct Sim(Rc<RefCell<World>>);

/// The storage of loops that [`EventLoop::new`] makes; `None`: such loops are real.
static NEW_LOOPS: Mutex<Option<Storage>> = Mutex::new(None);

/// Makes [`EventLoop::new`] return simulated loops over `storage`, on all threads of the process. `None`: real loops.
///
/// A simulation has its own loops by [`Sim::event_loop`]. The code under test makes further ones, such as for opening an
/// image. The storage then knows what those write and flush. They have no faults. Each has a clock that no other loop moves.
pub fn simulate_new_loops(storage: Option<Storage>) {
    *lock(&NEW_LOOPS) = storage;
}

/// A simulated loop in place of a real one, if there is to be one.
pub(crate) fn new_loop(config: &LoopConfig) -> Option<Result<EventLoop, SetupError>> {
    let storage = lock(&NEW_LOOPS).clone()?;
    Some(Sim::with_storage(0, Faults::default(), storage).event_loop(config.clone()))
}

#[cfg(not(miri))]
fn memory_file() -> io::Result<File> {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    Ok(memfd_create("sim", MFdFlags::MFD_CLOEXEC)?.into())
}

/// Miri does not support memory files: an unlinked one.
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

/// An event outside of the loop, and its time.
type Outside = (u64, Box<dyn FnOnce()>);

struct World {
    now_ns: u64,
    clock_reads: u64,
    faults: Faults,
    random: Random,
    script: Option<Script>,
    /// By time, the next one last.
    outside: Vec<Outside>,
    /// Watches real descriptors.
    polls: EpollRing,
    from_polls: Vec<Completion>,
    /// Armed polls, for faults to pick from: `user_data`, and whether it is multishot.
    armed: Vec<(u64, bool)>,
    queue: VecDeque<(RingOp, u64)>,
    pending: Vec<Pending>,
    completions: VecDeque<Completion>,
    fixed: Vec<Option<RawFd>>,
    storage: Storage,
    max_in_flight: usize,
    /// Bytes of reads and writes of files since the last call, and the most so far.
    begun: u64,
    max_begun: u64,
    happened: Happened,
    /// When to check real descriptors: always, or (`Some`) only after a call of
    /// [`look_at_descriptors`](Sim::look_at_descriptors).
    touched: Option<bool>,
}

/// Due time of held operations.
const HELD: u64 = u64::MAX;

/// An operation in flight.
struct Pending {
    due_ns: u64,
    fd: RawFd,
    op: RingOp,
    user_data: u64,
    verdict: Verdict,
    /// For a flush: the changes that it makes stable.
    flushes: u64,
}

impl Sim {
    /// Creates a world that begins at time 0. `seed`: any number.
    ///
    /// # Panics
    ///
    /// When the process is out of file descriptors: this is for tests.
    pub fn new(seed: u64, faults: Faults) -> Self {
        Self::with_storage(seed, faults, Storage::new())
    }

    /// Creates a world that shares files with other worlds.
    ///
    /// These are the worlds of other loops, or those before a power cut.
    ///
    /// # Panics
    ///
    /// As for [`new`](Self::new).
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
            begun: 0,
            max_begun: 0,
            happened: Happened::default(),
            touched: None,
        })))
    }

    /// Creates a loop in this world.
    ///
    /// # Errors
    ///
    /// Those of [`EventLoop::with_ring`].
    pub fn event_loop(&self, config: LoopConfig) -> Result<EventLoop, SetupError> {
        EventLoop::with_ring(config, self.ring(), self.chosen(), self.clock())
    }

    /// Returns the world's ring, for [`EventLoop::with_ring`].
    pub fn ring(&self) -> Box<dyn Ring> {
        Box::new(self.clone())
    }

    /// Returns the world's clock, for [`EventLoop::with_ring`].
    pub fn clock(&self) -> Box<dyn Clock> {
        Box::new(self.clone())
    }

    /// Returns the ring that a loop in this world reports: io_uring, best flags.
    pub fn chosen(&self) -> Chosen {
        Chosen { flags: Some(RingFlags::BEST), refused: Vec::new() }
    }

    /// Creates a file in memory with this content, which counts as durable.
    ///
    /// The file is real (memfd_create(2)), so all calls on descriptors work.
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

    /// Returns the storage, with its files.
    ///
    /// The files are those of [`file`](Self::file) and those [added](Storage::add).
    pub fn storage(&self) -> Storage {
        self.0.borrow().storage.clone()
    }

    /// Returns the minimum that a power cut now would leave of a file.
    ///
    /// See [`Storage::stable`].
    pub fn durable(&self, fd: &OwnedFd) -> Option<Vec<u8>> {
        self.0.borrow().storage.stable(fd)
    }

    /// Returns what a power cut now leaves of a file.
    ///
    /// Operations in flight are included: see [`Storage::cut`]. The simulation continues unchanged. Equal
    /// seeds give equal results.
    pub fn cut(&self, fd: &OwnedFd, seed: u64) -> Option<Vec<u8>> {
        let world = self.0.borrow();
        world.storage.cut_with(fd.as_fd(), seed, world.in_flight(fd))
    }

    /// Returns what a kill of the process now leaves of a file.
    ///
    /// The file has all completed changes, and of each operation in flight all, nothing or a part. The simulation
    /// continues unchanged. `None` if the file is not tracked. Equal seeds give equal results.
    pub fn killed(&self, fd: &OwnedFd, seed: u64) -> Option<Vec<u8>> {
        let world = self.0.borrow();
        world.storage.killed_with(fd.as_fd(), seed, world.in_flight(fd))
    }

    /// Sets a script that decides about each file operation at its submission.
    ///
    /// For [`Verdict::Seeded`] the seeded faults decide. The script must not call the `Sim` itself.
    pub fn script(&self, script: impl FnMut(&SimOp) -> Verdict + 'static) {
        self.0.borrow_mut().script = Some(Box::new(script));
    }

    /// Makes `call` once virtual time has reached `ns` nanoseconds.
    ///
    /// The call is made where the loop checks for events or sleeps, in place of another thread: it may signal
    /// a descriptor or use a [`LoopHandle`](crate::LoopHandle). The call comes at the same point in each run.
    /// It must not call the `Sim` or the loop.
    pub fn at(&self, ns: u64, call: impl FnOnce() + 'static) {
        let outside = &mut self.0.borrow_mut().outside;
        let place = outside.partition_point(|(due_ns, _)| *due_ns > ns);
        outside.insert(place, (ns, Box::new(call)));
    }

    /// Changes the faults from here on.
    pub fn set_faults(&self, faults: Faults) {
        self.0.borrow_mut().faults = faults;
    }

    /// Completes operations held by [`Verdict::Hold`]. Returns their number.
    pub fn release(&self) -> usize {
        let world = &mut *self.0.borrow_mut();
        let held = world.pending.iter_mut().filter(|pending| pending.due_ns == HELD);
        held.map(|pending| pending.due_ns = world.now_ns).count()
    }

    /// Checks real descriptors from now on only after a call of this.
    ///
    /// Saves the system calls if all changes of descriptors are made by the simulation.
    pub fn look_at_descriptors(&self) {
        self.0.borrow_mut().touched = Some(true);
    }

    /// Returns whether the next call of the loop checks real descriptors.
    pub fn will_look_at_descriptors(&self) -> bool {
        self.0.borrow().touched != Some(false)
    }

    /// Returns whether a real descriptor has an event.
    pub fn has_events(&self) -> bool {
        let world = self.0.borrow();
        let mut fds = [PollFd::new(world.polls.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Returns when the next operation in flight is due, in virtual nanoseconds.
    ///
    /// Held operations do not count. `None` if there is no other.
    pub fn next_due_ns(&self) -> Option<u64> {
        let world = self.0.borrow();
        let due = world.pending.iter().map(|pending| pending.due_ns).min();
        due.filter(|due_ns| *due_ns != HELD)
    }

    /// Returns the number of file operations in flight.
    pub fn in_flight(&self) -> usize {
        self.0.borrow().pending.len()
    }

    /// Returns how often this ring has caused each fault.
    pub fn happened(&self) -> Happened {
        self.0.borrow().happened.clone()
    }

    /// Kills the process: each operation in flight is carried out or not.
    ///
    /// Nothing happens in this world any more.
    pub fn kill(&self) {
        let world = &mut *self.0.borrow_mut();
        world.queue.clear();
        for pending in std::mem::take(&mut world.pending) {
            if world.random.percent(50) {
                pending.carry_out(&world.storage);
            }
        }
    }

    /// Returns the maximum number of file operations in flight so far.
    pub fn max_in_flight(&self) -> usize {
        self.0.borrow().max_in_flight
    }

    /// Returns the maximum number of bytes of file reads and writes that were begun between two calls so far.
    ///
    /// The kernel copies from the page cache within a call: all others on the thread wait for so many bytes.
    pub fn max_begun(&self) -> u64 {
        self.0.borrow().max_begun
    }

    /// Returns virtual time, nanoseconds. Does not count as a reading of the clock.
    pub fn now_ns(&self) -> u64 {
        self.0.borrow().now_ns
    }

    /// Advances time by `ns` nanoseconds.
    pub fn advance(&self, ns: u64) {
        self.0.borrow_mut().now_ns += ns;
    }

    /// Returns how often the loop has read the clock.
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
        // An empty queue takes at least one operation, as no progress would be possible otherwise.
        if full || (!world.queue.is_empty() && world.random.percent(world.faults.full)) {
            world.happened.full += 1;
            return false;
        }
        world.queue.push_back((*op, user_data));
        let (RingOp::Rw { socket, .. } | RingOp::RwVectored { socket, .. }) = op else {
            return true;
        };
        if !socket {
            world.begun += carry_out::segments(op).iter().map(|v| v.iov_len as u64).sum::<u64>();
            world.max_begun = world.max_begun.max(world.begun);
        }
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
        // Completions that are due can be fetched, like flagged task work.
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

    /// `None`: no descriptor signals virtual time.
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
    /// The changes that operations in flight will make to a file.
    fn in_flight(&self, file: &OwnedFd) -> Vec<storage::InFlight> {
        self.pending.iter().filter_map(|pending| pending.in_flight(file)).collect()
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        self.begun = 0;
        if self.random.percent(self.faults.early_return) {
            // A signal, or a lack of memory for requests, ends the call before or after the submission.
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
        // The descriptor may be ready already.
        self.touched = self.touched.map(|_| true);
        // SAFETY: a poll names no memory. Descriptors, and a socket's memory, are the promise of
        // `Ring::push`'s caller.
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
            // A real socket, with only the faults of polls.
            *file = RingFile::Fd(fd);
            return self.push_poll(&op, user_data);
        }
        let verdict = match &mut self.script {
            Some(script) => script(&sim_op),
            None => Verdict::Seeded,
        };
        let verdict = match verdict {
            Verdict::Seeded => self.faults.verdict(&sim_op, &self.random),
            scripted => scripted,
        };
        let delay = match verdict {
            Verdict::Hold => HELD,
            Verdict::Delay(ns) | Verdict::FailLate(ns, _) => ns,
            _ => self.faults.latency(&self.random, &mut self.happened),
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
            // The target is a poll, or has completed.
            return self.push_poll(&RingOp::PollRemove { user_data: target }, user_data);
        };
        if comes_late {
            // Too late to cancel: the operation completes soon.
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

    /// Carries out operations that are due, in random order, while the completion queue has room.
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
                // In order, as the last completion of a poll must come last.
                let completion = self.from_polls.remove(0);
                self.completions.push_back(completion);
                continue;
            }
            let nth = pick - self.from_polls.len();
            let at = (0..self.pending.len())
                .filter(|&at| self.pending[at].due_ns <= self.now_ns)
                .nth(nth)
                .unwrap_or(0);
            // Keeps the order of submission, so that the first is the oldest.
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

    /// Takes the events of the real descriptors.
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

    /// Removes an armed poll without a completion.
    fn forget_poll(&mut self, user_data: u64) {
        self.armed.retain(|(armed, _)| *armed != user_data);
        self.polls.forget(user_data);
    }

    /// Causes spurious events of polls, and ends polls as for a lack of memory.
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
