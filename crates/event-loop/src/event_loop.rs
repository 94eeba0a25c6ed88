//! The loop's state and its public interface. Iterations are in [`crate::iteration`].

#![allow(unsafe_code)]

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use log::Level;
use nix::errno::Errno;
use nix::sys::stat::fstat;
use nix::unistd::{Whence, lseek};

use crate::ablation::Ablation;
use crate::blocking::BlockingOp;
use crate::buf::IoBufs;
use crate::clock::{Clock, MonotonicClock};
use crate::deferred::{Deferred, DeferredCall};
use crate::executor::Tasks;
use crate::handle::{LoopHandle, Message, Shared};
use crate::handlers::{Entry, Handler, HandlerId, Handlers, Trigger};
use crate::lanes::Lane;
use crate::linux_aio::LinuxAio;
use crate::meter::{Budget, Meter};
use crate::oneshot;
use crate::op::{Engine, FileInner, IoOp, IoTarget, LoopFile};
use crate::polling::Poller;
use crate::polling::policy::PollParams;
use crate::probes;
use crate::ring::setup::{self, Chosen, RingChoice, SetupError};
use crate::ring::{Completion, Ring, RingOp};
use crate::slots::{InFlight, SlotId, Slots, UserData};
use crate::stats::LoopStats;
use crate::task::take_turns;
use crate::thread_pool::{Job, ThreadBirth, ThreadPool, ThreadPoolConfig};
use crate::timers::{TimerId, Timers};
use trace::trace;

/// Maximum completions taken from the ring per iteration (fairness contract).
pub(crate) const REAP_BATCH: usize = 256;

/// How to create a loop.
#[derive(Debug, Clone)]
pub struct LoopConfig {
    /// Name for logs and the thread, of which the kernel keeps 15 bytes.
    pub name: String,
    /// io_uring with which flags, or epoll.
    pub ring: RingChoice,
    /// Maximum operations per system call of the ring and of Linux AIO (QEMU's `aio-max-batch`).
    ///
    /// From 1 to 32768; other values mean the nearest of these. More operations wait for the next call.
    pub entries: u32,
    /// Size of the ring's completion queue: from `entries` to 65536. When the queue is full, the kernel
    /// allocates memory for further completions, and the loop needs a call to fetch them. 0: eight times
    /// `entries`, at least 1024.
    pub completions: u32,
    /// Threads for operations that would block. Its maximum also limits the kernel's own threads for the
    /// ring (io-wq), separately for files and for everything else, on the CPUs of the loop's thread. A
    /// lower limit of the kernel, four per CPU for files, remains in force.
    pub thread_pool: ThreadPoolConfig,
    /// What each of these threads does before its first job.
    pub pool_birth: ThreadBirth,
    /// Adaptive polling.
    pub poll: PollParams,
    /// Mechanisms to switch off, for measurements.
    #[doc(hidden)]
    pub ablation: Ablation,
}

impl Default for LoopConfig {
    fn default() -> Self {
        LoopConfig {
            name: "event-loop".into(),
            ring: RingChoice::default(),
            entries: 256,
            completions: 0,
            thread_pool: ThreadPoolConfig::default(),
            pool_birth: ThreadBirth::default(),
            poll: PollParams::default(),
            ablation: Ablation::default(),
        }
    }
}

/// One thread's event loop.
///
/// Clones share the loop. It never leaves its thread; other threads use a [`LoopHandle`].
#[derive(Clone)]
pub struct EventLoop(pub(crate) Rc<Inner>);

pub(crate) struct Inner {
    pub(crate) ring: RefCell<Box<dyn Ring>>,
    chosen: Chosen,
    does_file_io: bool,
    vectored_fixed: bool,
    pub(crate) clock: Box<dyn Clock>,
    /// The time of this iteration, once it was read.
    now: Cell<Option<u64>>,
    pub(crate) slots: RefCell<Slots<InFlight>>,
    /// Operations that found the submission queue full, in order (accounting contract).
    pub(crate) backlog: RefCell<VecDeque<(RingOp, u64)>>,
    pub(crate) handlers: RefCell<Handlers>,
    pub(crate) timers: RefCell<Timers>,
    pub(crate) deferred: Deferred,
    pub(crate) tasks: Tasks,
    pub(crate) budget: Rc<Budget>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) poller: Poller,
    pub(crate) pool: RefCell<Option<ThreadPool>>,
    pool_config: ThreadPoolConfig,
    pool_birth: ThreadBirth,
    /// Operations for the thread pool, submitted together.
    pub(crate) pool_jobs: RefCell<Vec<Job>>,
    /// Number of operations in the thread pool or queued for it.
    pub(crate) with_pool: Cell<usize>,
    /// Linux AIO, once it has been used.
    pub(crate) aio: OnceCell<LinuxAio>,
    /// See [`LoopConfig::entries`].
    pub(crate) max_batch: u32,
    /// Lists reused between iterations.
    pub(crate) polled: RefCell<Vec<(SlotId, Rc<Entry>)>>,
    pub(crate) reaped: RefCell<Vec<Completion>>,
    /// Messages taken from the inbox and not dispatched yet.
    pub(crate) messages: RefCell<VecDeque<Message>>,
    /// Completions from outside the ring: of refused operations, and those that a panicking callback left
    /// undispatched.
    pub(crate) refused: RefCell<VecDeque<Completion>>,
    /// By id. Ids are never reused, so a late message cannot run another bottom half.
    pub(crate) bottom_halves: RefCell<HashMap<u64, Rc<dyn Fn()>>>,
    pub(crate) next_bottom_half: Cell<u64>,
    /// The loop has been asked to stop.
    pub(crate) stopping: Cell<bool>,
    /// The loop is shutting down or has shut down. Nothing new begins.
    pub(crate) closing: Cell<bool>,
    /// An iteration is in progress.
    pub(crate) turning: Cell<bool>,
    /// The caller runs the iterations, by [`EventLoop::run_once`] or inside a foreign loop, and may do so
    /// again at any time.
    pub(crate) is_embedded: Cell<bool>,
    /// The errno with which the wake-up poll, or the poll for Linux AIO's completions, failed permanently.
    /// The loop would miss events.
    pub(crate) deaf: Cell<Option<i32>>,
}

/// Maximum of [`LoopConfig::entries`]: io_uring's own.
const MAX_ENTRIES: u32 = 32768;

impl EventLoop {
    /// Creates a loop on the calling thread, the only one that will enter its ring.
    ///
    /// # Errors
    ///
    /// Names the system call and its errno. A missing io_uring is no error: the loop then uses epoll, see
    /// [`EventLoop::ring`].
    pub fn new(config: LoopConfig) -> Result<Self, SetupError> {
        #[cfg(any(test, feature = "sim"))]
        if let Some(simulated) = crate::ring::sim::new_loop(&config) {
            return simulated;
        }
        let entries = config.entries.clamp(1, MAX_ENTRIES);
        let workers = config.thread_pool.max.clamp(1, ThreadPoolConfig::MOST) as u32;
        let (ring, chosen) = setup::set_up(config.ring, entries, config.completions, workers)?;
        // Without io_uring, requests cost more, so log at a level that operators see.
        let level = if chosen.flags.is_some() { Level::Debug } else { Level::Info };
        log::log!(level, "{}: {chosen}", config.name);
        Self::with_ring(config, ring, chosen, Box::new(MonotonicClock::new()))
    }

    /// Creates a loop with a ring and a clock of the caller, as for a simulation.
    ///
    /// # Errors
    ///
    /// Names the system call and its errno.
    pub fn with_ring(
        config: LoopConfig,
        ring: Box<dyn Ring>,
        chosen: Chosen,
        clock: Box<dyn Clock>,
    ) -> Result<Self, SetupError> {
        let shared = Shared::new(&config.name, config.ablation.no_wake)
            .map(Arc::new)
            .map_err(|error| SetupError { call: "eventfd", error })?;
        let keep_sources = chosen.flags.is_none();
        let can_measure = clock.cpu_ns().is_some();
        let entries = config.entries.clamp(1, MAX_ENTRIES);
        let event_loop = EventLoop(Rc::new(Inner {
            does_file_io: ring.does_file_io(),
            vectored_fixed: ring.has_vectored_fixed(),
            ring: RefCell::new(ring),
            chosen,
            clock,
            now: Cell::new(None),
            slots: RefCell::new(Slots::with_capacity(entries)),
            backlog: RefCell::new(VecDeque::with_capacity(entries as usize)),
            handlers: RefCell::default(),
            timers: RefCell::default(),
            deferred: Deferred::new(config.ablation.no_batching),
            tasks: Tasks::new(shared.clone()),
            budget: Rc::default(),
            shared,
            poller: Poller::new(config.poll, keep_sources, can_measure),
            pool: RefCell::new(None),
            pool_config: config.thread_pool,
            pool_birth: config.pool_birth,
            pool_jobs: RefCell::default(),
            with_pool: Cell::new(0),
            aio: OnceCell::new(),
            max_batch: entries,
            polled: RefCell::default(),
            reaped: RefCell::new(Vec::with_capacity(REAP_BATCH)),
            messages: RefCell::default(),
            bottom_halves: RefCell::default(),
            next_bottom_half: Cell::new(0),
            refused: RefCell::default(),
            stopping: Cell::new(false),
            closing: Cell::new(false),
            turning: Cell::new(false),
            is_embedded: Cell::new(false),
            deaf: Cell::new(None),
        }));
        event_loop.arm_wake();
        if config.thread_pool.min > 0 {
            let started = event_loop.with_thread_pool(|pool| pool.start_minimum());
            started.map_err(|error| SetupError { call: "clone", error })?;
        }
        Ok(event_loop)
    }

    /// Returns the handle for other threads.
    pub fn handle(&self) -> LoopHandle {
        LoopHandle::new(self.0.shared.clone())
    }

    /// Returns the ring that the loop uses, and why not a better one.
    pub fn ring(&self) -> &Chosen {
        &self.0.chosen
    }

    /// Returns whether file I/O can use a ring, [`Engine::Uring`].
    ///
    /// On epoll it uses the thread pool.
    pub fn has_io_uring(&self) -> bool {
        self.0.does_file_io
    }

    /// Returns the loop's counters.
    pub fn stats(&self) -> &LoopStats {
        &self.0.shared.stats
    }

    /// Returns a tenant's share of what an iteration spends on metered work (fairness contract).
    pub fn meter(&self) -> Meter {
        Meter::new(&self.0.budget)
    }

    /// Returns whether [`LoopHandle::stop`] has taken effect.
    ///
    /// An embedder then calls [`shut_down`](Self::shut_down).
    pub fn is_stopping(&self) -> bool {
        self.0.stopping.get()
    }

    /// Returns loop time: monotonic, in nanoseconds.
    ///
    /// Loop time begins at about the creation of the process's first loop. It is the same in all callbacks of
    /// an iteration. All deadlines are in loop time.
    pub fn now_ns(&self) -> u64 {
        self.0.now.get().unwrap_or_else(|| {
            let now = self.0.clock.now_ns();
            self.0.now.set(Some(now));
            now
        })
    }

    /// Monotonic time, nanoseconds, read now.
    pub(crate) fn fresh_now_ns(&self) -> u64 {
        self.0.now.set(None);
        self.now_ns()
    }

    pub(crate) fn forget_now(&self) {
        self.0.now.set(None);
    }

    // ---- operations ----------------------------------------------------------------------------

    /// Registers an open file with the ring, if the ring's table has room.
    ///
    /// Without room, operations use the descriptor (io_uring_register(2)). The file stays open, and keeps its
    /// table entry, until the last clone is dropped and no operation on it is in flight.
    pub fn register_file(&self, fd: Arc<OwnedFd>) -> LoopFile {
        let index = self.0.ring.borrow_mut().register_file(fd.as_raw_fd());
        let kind = fstat(&fd).map_or(0, |stat| stat.st_mode & libc::S_IFMT);
        let is_socket = kind == libc::S_IFSOCK;
        // The ring waits for any file. Its replacement waits for those without an offset.
        let is_stream = is_socket
            || kind == libc::S_IFIFO
            || !self.0.does_file_io && lseek(&fd, 0, Whence::SeekCur) == Err(Errno::ESPIPE);
        let (inner, no_aio_fsync) = (Rc::downgrade(&self.0), Cell::new(false));
        LoopFile(Rc::new(FileInner { inner, fd, index, is_socket, is_stream, no_aio_fsync }))
    }

    /// Registers an open file with the ring, as [`register_file`](Self::register_file).
    ///
    /// Takes what owns a descriptor: a `File`, a `TcpStream`, a `UnixListener`.
    pub fn file(&self, file: impl Into<OwnedFd>) -> LoopFile {
        self.register_file(Arc::new(file.into()))
    }

    /// Starts an operation.
    ///
    /// `target` receives the completion under `token`, and gets `bufs` back.
    ///
    /// The operation is submitted before the loop next waits. The thread pool carries out what `engine`
    /// cannot do, and what was meant for io_uring on a loop without. If [`Engine::Native`] is unavailable,
    /// the completion has the errno. The loop keeps file and memory until the completion, whatever the
    /// caller drops (memory contract). Once the loop is [shutting down](Self::shut_down), operations complete
    /// with `-ECANCELED`. An offset beyond 2^63 - 1 completes with `-EINVAL`, and so does a command whose memory is
    /// too small. Commands complete with `-EOPNOTSUPP` if the loop has no io_uring.
    pub fn submit(
        &self,
        file: &LoopFile,
        op: IoOp,
        engine: Engine,
        bufs: IoBufs,
        target: &Rc<dyn IoTarget>,
        token: u32,
    ) {
        self.start(file, op, engine, bufs, target, token);
    }

    /// [`submit`](Self::submit), with the operation's slot as the result.
    #[inline(always)]
    pub(crate) fn start(
        &self,
        file: &LoopFile,
        op: IoOp,
        engine: Engine,
        bufs: IoBufs,
        target: &Rc<dyn IoTarget>,
        token: u32,
    ) -> SlotId {
        let by_ring = engine == Engine::Uring && self.0.does_file_io || file.waits_for(op);
        let refused = match op {
            _ if self.0.closing.get() => Some(libc::ECANCELED),
            // preadv2(2) takes -1 for the file's own position.
            IoOp::Read { offset } | IoOp::Write { offset, .. } if offset > i64::MAX as u64 => {
                Some(libc::EINVAL)
            }
            IoOp::Command { .. } if !by_ring => Some(libc::EOPNOTSUPP),
            IoOp::Command { command, .. }
                if bufs.iovecs().first().map_or(0, |segment| segment.iov_len) < command.reach =>
            {
                Some(libc::EINVAL)
            }
            _ => None,
        };
        let in_flight = |engine| {
            let (file, target) = (file.clone(), target.clone());
            InFlight { op, engine, file, bufs, target, token }
        };
        if !by_ring || refused.is_some() {
            return self.submit_elsewhere(in_flight(engine), refused);
        }
        let mut slots = self.0.slots.borrow_mut();
        let (id, in_flight) = slots.insert(in_flight(Engine::Uring));
        // A file registered with another loop is used by its descriptor.
        let fixed = in_flight.file.0.index.filter(|_| in_flight.file.is_of(&self.0));
        let buffer = self.registered_place(&in_flight.bufs);
        let ring_op = in_flight.ring_op(fixed, buffer);
        drop(slots);
        match ring_op {
            Some(op) => self.push(op, UserData::Op(id)),
            // This ring has no entry for the operation.
            None => self.hand_over(id, Ok(Engine::Threads)),
        }
        id
    }

    /// The part of [`submit`](Self::submit) for operations that do not use the ring.
    #[inline(never)]
    fn submit_elsewhere(&self, mut in_flight: InFlight, refused: Option<i32>) -> SlotId {
        let engine = match (refused, in_flight.engine) {
            (Some(errno), _) => Err(errno),
            (None, Engine::Native) => self.native_engine(&in_flight.file, &in_flight.op),
            (None, _) => Ok(Engine::Threads),
        };
        in_flight.engine = engine.unwrap_or(Engine::Threads);
        let (id, _) = self.0.slots.borrow_mut().insert(in_flight);
        self.hand_over(id, engine);
        id
    }

    /// Hands the operation in slot `id` over to Linux AIO or the thread pool, or completes it with an errno.
    #[cold]
    fn hand_over(&self, id: SlotId, engine: Result<Engine, i32>) {
        self.stats().submitted.add(1);
        match engine {
            Ok(Engine::Native) => self.submit_native(id),
            Ok(_) => self.submit_to_pool(id),
            Err(errno) => self.refuse(UserData::Op(id).pack(), errno),
        }
        self.0.shared.notify();
    }

    /// The entry of the operation's memory in this ring's table, if the operation can use it.
    #[inline]
    fn registered_place(&self, bufs: &IoBufs) -> Option<u16> {
        let place = bufs.place()?;
        let of_use = match bufs.iovecs() {
            [] => false,
            [_] => true,
            _ => self.0.vectored_fixed,
        };
        (of_use && place.ring == self.ring_id()).then_some(place.index)
    }

    /// Completes an operation with an error in the next iteration.
    pub(crate) fn refuse(&self, user_data: u64, errno: i32) {
        let completion = Completion { user_data, result: -errno, more: false };
        self.0.refused.borrow_mut().push_back(completion);
        self.0.shared.notify();
    }

    /// Queues a ring operation, in the backlog if the ring's queue is full.
    #[inline(always)]
    pub(crate) fn push(&self, op: RingOp, user_data: UserData) {
        self.stats().submitted.add(1);
        trace!(probes::add_sqe(
            self.trace_ctx(),
            user_data.pack(),
            op.trace_opcode(),
            self.trace_fd(&op, user_data),
            op.trace_offset(),
        ));
        let user_data = user_data.pack();
        let mut backlog = self.0.backlog.borrow_mut();
        // SAFETY: the memory and descriptors of `op` are owned by its slot (`slots.rs`), or by its handler's
        // entry, until the completion is reaped.
        if !backlog.is_empty() || !unsafe { self.0.ring.borrow_mut().push(&op, user_data) } {
            backlog.push_back((op, user_data));
        }
        self.0.shared.notify();
    }

    /// Moves operations from the backlog to the ring's queue, oldest first.
    pub(crate) fn refill(&self) {
        let mut backlog = self.0.backlog.borrow_mut();
        let mut ring = self.0.ring.borrow_mut();
        while let Some((op, user_data)) = backlog.front() {
            // SAFETY: as in `push`: still in its slot, since it has not been completed.
            if !unsafe { ring.push(op, *user_data) } {
                return;
            }
            backlog.pop_front();
        }
    }

    /// Queues the operation in slot `id` for the thread pool.
    pub(crate) fn submit_to_pool(&self, id: SlotId) {
        let mut slots = self.0.slots.borrow_mut();
        let Some(in_flight) = slots.get_mut(id) else { return };
        in_flight.engine = Engine::Threads;
        let fd = in_flight.file.raw_fd();
        let user_data = UserData::Op(id).pack();
        let job = Job::Op(BlockingOp::new(in_flight), user_data);
        trace!(probes::thread_pool_submit_aio(self.trace_ctx(), user_data, fd));
        self.0.pool_jobs.borrow_mut().push(job);
        self.0.with_pool.set(self.0.with_pool.get() + 1);
    }

    /// Submits the queued operations to the thread pool.
    pub(crate) fn start_jobs(&self) {
        let mut jobs = self.0.pool_jobs.borrow_mut();
        if jobs.is_empty() {
            return;
        }
        if let Err(error) = self.with_thread_pool(|pool| pool.submit(&mut jobs)) {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            let refused: Vec<_> = jobs.drain(..).collect();
            drop(jobs);
            for job in refused {
                match job {
                    Job::Op(_, user_data) => {
                        self.0.with_pool.set(self.0.with_pool.get() - 1);
                        self.refuse(user_data, errno);
                    }
                    Job::Call(call) | Job::Compute(_, call) => call(),
                }
            }
        }
    }

    /// Runs a call that may block on a thread of the pool.
    ///
    /// The call starts before the loop next waits. Without a thread it runs on the loop.
    ///
    /// The receiver completes with [`LoopGone`](crate::LoopGone) if the loop ends before the call has begun, or if the call
    /// panics.
    pub fn offload<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (sender, receiver) = oneshot::channel();
        let call = Box::new(move || sender.send(work()));
        self.0.pool_jobs.borrow_mut().push(Job::Call(call));
        receiver
    }

    /// Runs a computation that would hold up the loop on a thread of the pool.
    ///
    /// At most as many computations run at once as there are CPUs, and lanes take turns. If the receiver is dropped
    /// before its computation's turn, the computation is left out. Otherwise as [`offload`](Self::offload).
    pub fn compute<T: Send + 'static>(
        &self,
        lane: &Lane,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (sender, receiver) = oneshot::channel();
        let call = Box::new(move || {
            if sender.is_awaited() {
                sender.send(work());
            }
        });
        self.0.pool_jobs.borrow_mut().push(Job::Compute(lane.clone(), call));
        receiver
    }

    fn with_thread_pool<R>(&self, body: impl FnOnce(&ThreadPool) -> R) -> R {
        let mut pool = self.0.pool.borrow_mut();
        body(pool.get_or_insert_with(|| {
            let (handle, birth) = (self.handle(), self.0.pool_birth.clone());
            ThreadPool::new(
                &self.0.shared.name,
                self.0.pool_config,
                birth,
                move |user_data, result, answer| {
                    handle.send_pool_result(user_data, result, answer);
                },
            )
        }))
    }

    /// Returns the number of operations in flight, armed polls included.
    pub fn in_flight(&self) -> u64 {
        self.stats().submitted.get() - self.stats().completed.get()
    }

    // ---- timers, handlers, deferred calls ------------------------------------------------------

    /// Completes under `token` once loop time has reached `deadline_ns` nanoseconds.
    ///
    /// The result is 0, without memory. A timer completes in the next iteration at the earliest (see
    /// [`now_ns`](Self::now_ns)), and with `-ECANCELED` when the loop shuts down.
    pub fn submit_timer(&self, deadline_ns: u64, target: &Rc<dyn IoTarget>, token: u32) -> TimerId {
        self.0.shared.notify();
        self.0.timers.borrow_mut().add(deadline_ns, target.clone(), token)
    }

    /// Calls `call` once, at `deadline_ns` nanoseconds of loop time.
    ///
    /// If the deadline has passed, the call is made in the next iteration. A loop that shuts down drops
    /// `call`.
    pub fn add_timer(&self, deadline_ns: u64, call: impl FnOnce() + 'static) -> TimerId {
        struct Once<F>(Cell<Option<F>>);
        impl<F: FnOnce()> IoTarget for Once<F> {
            fn complete(&self, _token: u32, result: i32, _bufs: IoBufs) {
                if let Some(call) = self.0.take()
                    && result == 0
                {
                    call();
                }
            }
        }
        let target: Rc<dyn IoTarget> = Rc::new(Once(Cell::new(Some(call))));
        self.submit_timer(deadline_ns, &target, 0)
    }

    /// Cancels a timer, without a completion.
    ///
    /// Returns `false` if it has run or was cancelled before.
    pub fn cancel_timer(&self, id: TimerId) -> bool {
        let timer = self.0.timers.borrow_mut().cancel(id);
        timer.is_some()
    }

    /// Watches a descriptor for `events` (`POLL*` bits).
    ///
    /// Its file stays open at least as long.
    ///
    /// A descriptor that cannot be polled shows as `POLLERR`.
    pub fn add_handler(
        &self,
        fd: Arc<OwnedFd>,
        events: u32,
        trigger: Trigger,
        handler: Rc<dyn Handler>,
    ) -> HandlerId {
        self.0.shared.notify();
        self.0.handlers.borrow_mut().add(fd, events, trigger, handler)
    }

    /// Stops watching a descriptor.
    ///
    /// The handler is not called again, not even for events that have fired. Its memory is freed when a call
    /// in progress returns. A handler of another loop stays.
    pub fn remove_handler(&self, id: HandlerId) {
        let Some(slot) = self.0.handlers.borrow().slot_of(id) else { return };
        let removed = self.0.handlers.borrow_mut().remove(slot);
        if let Some((entry, armed)) = removed {
            if entry.source.in_set.replace(false) {
                trace!(probes::poll_remove(self.trace_ctx(), entry.trace_node(), entry.raw_fd()));
                if self.0.poller.is_polling() {
                    entry.handler.poll_end();
                }
            }
            if armed {
                let poll = UserData::Poll(slot).pack();
                self.push(RingOp::PollRemove { user_data: poll }, UserData::Ignored);
            }
        }
    }

    /// Completes when the poll of a removed handler has ended.
    ///
    /// The loop has released the handler's descriptor then.
    pub async fn released(&self, id: HandlerId) {
        while self.is_leaving(id) {
            take_turns().await;
        }
    }

    pub(crate) fn is_leaving(&self, id: HandlerId) -> bool {
        let handlers = self.0.handlers.borrow();
        handlers.slot_of(id).is_some_and(|slot| handlers.is_leaving(slot))
    }

    /// Calls a handler in the next iteration, with or without an event.
    ///
    /// The handler is called as if it had returned [`Progress::More`](crate::Progress::More).
    pub fn call_again(&self, id: HandlerId) {
        let mut handlers = self.0.handlers.borrow_mut();
        if let Some(slot) = handlers.slot_of(id) {
            handlers.list_ready(slot);
        }
        drop(handlers);
        self.0.shared.notify();
    }

    /// Makes `call` once at the end of the outermost section: see [`DeferredCall`].
    ///
    /// Each handler's callback runs in a section. All completions of an iteration share a section. All messages, all
    /// timers and all tasks do, too.
    pub fn defer(&self, call: &Rc<dyn DeferredCall>) {
        self.0.deferred.defer(call);
    }

    /// Runs `body` as a section.
    ///
    /// Calls deferred in it run at its end, or at the end of the outermost section around it. An iteration
    /// cannot run within a section (deferral contract).
    pub fn section<R>(&self, body: impl FnOnce() -> R) -> R {
        self.0.deferred.enter();
        let result = body();
        self.0.deferred.leave();
        result
    }

    /// Sets the polling parameters, from the next iteration on.
    ///
    /// From another thread: `handle.spawn(move |event_loop| event_loop.set_poll_params(params))`.
    pub fn set_poll_params(&self, params: PollParams) {
        let window = self.0.poller.set_params(params);
        self.stats().poll_window_ns.set(window);
    }

    /// Returns a descriptor that becomes readable when the loop has something to do.
    ///
    /// A foreign loop watches it after [`prepare`](Self::prepare). `None` with DEFER_TASKRUN, which signals
    /// no descriptor. The default flags do not include it.
    pub fn pollable_fd(&self) -> Option<BorrowedFd<'_>> {
        let raw = self.0.ring.borrow().pollable_fd()?;
        self.0.is_embedded.set(true);
        // SAFETY: the ring's descriptor is open for as long as the ring, which `self` keeps.
        Some(unsafe { BorrowedFd::borrow_raw(raw) })
    }

    pub(crate) fn arm_wake(&self) {
        let fd = self.0.shared.wake_fd().as_fd().as_raw_fd();
        let op = RingOp::PollAdd { fd, events: libc::POLLIN as u32, multishot: true };
        self.push(op, UserData::Wake);
    }

    pub(crate) fn close_pool(&self) {
        let pool = self.0.pool.take();
        drop(pool);
    }
}
