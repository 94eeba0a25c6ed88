//! Iterations of the loop: prepare, wait, dispatch.
//!
//! An iteration makes at most one system call for the ring (one-call contract): the call that waits also submits
//! all queued operations and polls. While the loop polls, an iteration either submits or spins, never both.

use std::cell::Cell;
use std::io;

use crate::event_loop::EventLoop;
use crate::executor::Turning;
use crate::handle::Message;
use crate::handlers::Progress;
use crate::probes;
use crate::ring::{Completion, Ready, Wait, is_transient};
use crate::slots::{InFlight, UserData};
use trace::trace;

/// Messages dispatched per iteration (fairness contract).
const MESSAGE_BATCH: usize = 256;

/// An iteration in progress, see [`EventLoop::enter_iteration`].
pub(crate) struct Turn<'a>(&'a Cell<bool>, #[expect(dead_code, reason = "its drop")] Turning);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Completions taken from the ring and not dispatched.
pub(crate) struct Reaped<'a> {
    event_loop: &'a EventLoop,
    pub(crate) list: Vec<Completion>,
    dispatched: usize,
}

impl<'a> Reaped<'a> {
    /// An empty list with room for a batch.
    pub(crate) fn new(event_loop: &'a EventLoop) -> Self {
        Reaped { event_loop, list: event_loop.0.reaped.take(), dispatched: 0 }
    }

    /// Dispatches them in order, each after a call of `trace`.
    #[inline]
    pub(crate) fn dispatch(mut self, trace: impl Fn(Completion)) {
        while let Some(completion) = self.list.get(self.dispatched).copied() {
            self.dispatched += 1;
            trace(completion);
            self.event_loop.dispatch_completion(completion);
        }
    }
}

impl Drop for Reaped<'_> {
    /// Keeps undispatched completions after a callback's panic: the kernel does not report them again.
    fn drop(&mut self) {
        let inner = &self.event_loop.0;
        if self.dispatched < self.list.len() {
            inner.refused.borrow_mut().extend(self.list.drain(self.dispatched..));
        }
        self.list.clear();
        inner.reaped.replace(std::mem::take(&mut self.list));
    }
}

/// Abandons the loop if a callback panics.
struct Unwound<'a>(&'a EventLoop);

impl Drop for Unwound<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abandon();
        }
    }
}

impl EventLoop {
    /// Runs until [`stop`](crate::LoopHandle::stop), then shuts the loop down.
    ///
    /// Operations in flight are finished or cancelled, and everything that the loop holds is dropped (stop
    /// contract). A panic of a callback or a task also drops everything; handles then return [`LoopGone`](crate::LoopGone).
    ///
    /// # Errors
    ///
    /// The ring failed permanently. Everything that the kernel does not use was dropped.
    pub fn run(&self) -> io::Result<()> {
        let result = self.turn_until_stopped();
        let shut_down = self.shut_down();
        result.and(shut_down)
    }

    /// Runs until a stop, without shutting down.
    pub(crate) fn turn_until_stopped(&self) -> io::Result<()> {
        let _unwound = Unwound(self);
        while !self.0.stopping.get() {
            self.iterate(true)?;
        }
        Ok(())
    }

    /// The system call or operation whose failure ended an iteration.
    pub(crate) fn failed_call(&self) -> &'static str {
        match (self.0.deaf.get(), &self.ring().flags) {
            (Some(_), _) => "watching for wake-ups and completions",
            (None, Some(_)) => "io_uring_enter",
            (None, None) => "epoll_pwait2",
        }
    }

    /// Runs one iteration: waits for events, if `may_wait`, and dispatches them.
    ///
    /// # Errors
    ///
    /// Permanent errors of io_uring_enter(2) or epoll_pwait2(2), and of the polls for wake-ups and Linux
    /// AIO's completions. [`Deadlock`](io::ErrorKind::Deadlock) within a callback of the same loop, or
    /// within a section.
    pub fn run_once(&self, may_wait: bool) -> io::Result<()> {
        self.0.is_embedded.set(true);
        self.iterate(may_wait)
    }

    /// As [`run_once`](Self::run_once), for the loop's own use.
    pub(crate) fn iterate(&self, may_wait: bool) -> io::Result<()> {
        let _turn = self.enter_iteration()?;
        self.stats().iterations.add(1);
        self.forget_now();
        let waited = self.wait(may_wait);
        self.0.shared.inbox.end_sleep();
        waited?;
        self.forget_now();
        self.dispatch_all();
        self.check_hearing()
    }

    /// Begins an iteration. Fails within another one, which it would take completions from, and within a
    /// section, which must end before the loop can sleep (deferral contract).
    pub(crate) fn enter_iteration(&self) -> io::Result<Turn<'_>> {
        if !self.can_turn() {
            let why = "the event loop was turned from within one of its own callbacks or sections";
            return Err(io::Error::new(io::ErrorKind::Deadlock, why));
        }
        self.0.turning.set(true);
        Ok(Turn(&self.0.turning, self.0.tasks.enter_iteration()))
    }

    /// Whether [`enter_iteration`](Self::enter_iteration) would succeed.
    pub(crate) fn can_turn(&self) -> bool {
        !self.0.deferred.in_section() && !self.0.turning.get()
    }

    /// The deadline of the nearest timer, loop time.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.0.timers.borrow_mut().next_deadline()
    }

    fn check_hearing(&self) -> io::Result<()> {
        match self.0.deaf.get() {
            None => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// First half of an iteration: submits, then polls, sleeps or neither.
    fn wait(&self, may_wait: bool) -> io::Result<()> {
        self.arm_and_refill();
        self.poll_wait_begins();
        // Sources in the polling set do not signal, so each iteration checks them, even a busy one (fairness contract).
        let mut has_work = self.poll_once();
        has_work |= !may_wait || self.has_work_now();
        if has_work {
            return self.enter_if_needed();
        }
        if self.0.poller.wants_to_poll() {
            // Queued operations are submitted first; the next iteration polls.
            if self.0.ring.borrow_mut().queued() > 0 {
                return self.enter(Wait::No);
            }
            let deadline = self.next_deadline();
            self.poll_for_window(deadline);
            return self.enter_if_needed();
        }
        if self.poll_end() {
            return self.enter_if_needed();
        }
        // Callbacks of `poll_end` may have queued operations.
        self.arm_and_refill();
        if self.has_work_now() {
            return self.enter_if_needed();
        }
        if !self.0.shared.inbox.begin_sleep() {
            self.stats().sleeps_called_off.add(1);
            return self.enter_if_needed();
        }
        let deadline = self.next_deadline();
        let wait = match deadline {
            None => Wait::Forever,
            Some(deadline) => Wait::For(deadline.saturating_sub(self.fresh_now_ns())),
        };
        self.stats().sleeps.add(1);
        self.enter_asleep(wait)
    }

    /// Enters the ring without waiting if operations are queued or completions must be fetched.
    fn enter_if_needed(&self) -> io::Result<()> {
        let needed = {
            let mut ring = self.0.ring.borrow_mut();
            ring.queued() > 0 || ring.ready() == Ready::NeedsEnter || !self.has_io_uring()
        };
        if needed { self.enter(Wait::No) } else { Ok(()) }
    }

    /// Enters the ring without waiting if operations are queued.
    fn submit_queued(&self) -> io::Result<()> {
        let queued = self.0.ring.borrow_mut().queued();
        if queued > 0 { self.enter(Wait::No) } else { Ok(()) }
    }

    pub(crate) fn enter(&self, wait: Wait) -> io::Result<()> {
        self.stats().enters.add(1);
        self.0.ring.borrow_mut().enter(wait)
    }

    pub(crate) fn arm_and_refill(&self) {
        if !self.0.backlog.borrow().is_empty() {
            self.refill();
        }
        self.submit_aio();
        self.start_jobs();
        if self.0.handlers.borrow().must_arm() && !self.0.closing.get() {
            loop {
                let next = self.0.handlers.borrow_mut().take_arming();
                let Some((op, user_data)) = next else { break };
                self.push(op, user_data);
            }
        }
    }

    /// Whether work can be done without waiting.
    fn has_work_now(&self) -> bool {
        !self.0.handlers.borrow().ready.is_empty()
            || !self.0.refused.borrow().is_empty()
            || self.has_messages()
            || self.0.tasks.has_ready()
            || !self.0.backlog.borrow().is_empty()
            || self.0.stopping.get()
            || self.0.ring.borrow_mut().ready() == Ready::Completions
    }

    fn has_messages(&self) -> bool {
        self.0.shared.inbox.has_messages() || !self.0.messages.borrow().is_empty()
    }

    /// Second half of an iteration: dispatches all events. The turn of each source is bounded (fairness
    /// contract); what arrives meanwhile is for the next iteration. A turn is one section of deferred calls, so
    /// the results of a batch are published before the next source's batch begins.
    pub(crate) fn dispatch_all(&self) {
        let polled = self.0.poller.has_begun();
        let events_at = if polled { self.fresh_now_ns() } else { 0 };
        let mut had_events = self.section(|| self.dispatch_completions());
        had_events |= self.dispatch_ready();
        had_events |= self.has_messages() && self.section(|| self.dispatch_messages());
        had_events |= self.next_deadline().is_some() && self.section(|| self.dispatch_timers());
        if self.0.tasks.has_ready() {
            self.section(|| self.0.tasks.run_ready());
        }
        self.0.budget.refill();
        if polled {
            self.poll_adapt(events_at, had_events);
        }
    }

    fn dispatch_completions(&self) -> bool {
        let mut reaped = Reaped::new(self);
        self.0.ring.borrow_mut().reap(&mut reaped.list);
        let any = !reaped.list.is_empty();
        reaped.dispatch(|Completion { user_data, result, .. }| {
            trace!(probes::cqe_handler(self.trace_ctx(), user_data, result));
        });
        let refused = self.0.refused.borrow().len();
        for _ in 0..refused {
            let completion = self.0.refused.borrow_mut().pop_front();
            if let Some(completion) = completion {
                self.dispatch_completion(completion);
            }
        }
        any || refused > 0
    }

    #[inline(always)]
    pub(crate) fn dispatch_completion(&self, completion: Completion) {
        let Completion { user_data, result, more } = completion;
        let UserData::Op(id) = UserData::unpack(user_data) else {
            return self.dispatch_own(completion);
        };
        debug_assert!(!more, "operations complete once");
        // A duplicate completion finds its slot empty or reused, and is ignored.
        let done = self.0.slots.borrow_mut().remove(id);
        if let Some(InFlight { target, token, bufs, file: _file, .. }) = done {
            self.stats().completed.add(1);
            self.poll_note(&self.0.poller.ring);
            target.complete(token, result, bufs);
        }
    }

    /// Dispatches a completion of the loop's own operations.
    #[inline(never)]
    fn dispatch_own(&self, completion: Completion) {
        let Completion { user_data, result, more } = completion;
        if !more {
            self.stats().completed.add(1);
        }
        match UserData::unpack(user_data) {
            UserData::Poll(id) => self.0.handlers.borrow_mut().fired(id, result, more),
            // The inbox is checked in every iteration.
            UserData::Wake => {
                if !more && !self.0.stopping.get() {
                    if result < 0 && !is_transient(-result) {
                        self.0.deaf.set(Some(-result));
                    } else {
                        self.arm_wake();
                    }
                }
            }
            UserData::Op(_) | UserData::Ignored => {}
        }
    }

    fn dispatch_ready(&self) -> bool {
        let turns = self.0.handlers.borrow().ready.len();
        for turn in 0..turns {
            let id = self.0.handlers.borrow().ready.get(turn).copied();
            let Some(id) = id else { break };
            // An earlier callback may have removed it (removal contract).
            let entry = self.0.handlers.borrow().get(id).cloned();
            let Some(entry) = entry else { continue };
            entry.listed.set(false);
            if !self.poll_join(id, &entry) {
                continue;
            }
            let ready = || entry.handler.ready(entry.fired.replace(0));
            if self.section(ready) == Progress::More {
                self.0.handlers.borrow_mut().list_ready(id);
            }
        }
        let mut handlers = self.0.handlers.borrow_mut();
        let turns = turns.min(handlers.ready.len());
        handlers.ready.drain(..turns);
        turns > 0
    }

    fn dispatch_messages(&self) -> bool {
        {
            let mut messages = self.0.messages.borrow_mut();
            if messages.is_empty() {
                self.0.shared.inbox.take(&mut messages);
            }
        }
        self.poll_note(&self.0.poller.inbox);
        for _ in 0..MESSAGE_BATCH {
            let message = self.0.messages.borrow_mut().pop_front();
            let Some(message) = message else { break };
            self.dispatch_message(message);
        }
        true
    }

    fn dispatch_message(&self, message: Message) {
        match message {
            // Shutting down: nothing new begins.
            Message::Call(_) | Message::BottomHalf(..) | Message::WakeTask(_)
                if self.0.closing.get() => {}
            Message::Call(call) => call(self),
            Message::BottomHalf(id, flag) => self.run_bottom_half(id, &flag),
            Message::WakeTask(waker) => self.0.tasks.make_ready(&waker),
            Message::PoolResult { user_data, result, answer } => {
                trace!(probes::thread_pool_complete_aio(self.trace_ctx(), user_data, result));
                self.0.with_pool.set(self.0.with_pool.get() - 1);
                if let (Some(answer), UserData::Op(id)) = (answer, UserData::unpack(user_data))
                    && let Some(call) = self.0.slots.borrow_mut().get_mut(id)
                {
                    call.bufs.copy_in(0, &answer);
                }
                self.dispatch_completion(Completion { user_data, result, more: false });
            }
            Message::Stop => self.0.stopping.set(true),
        }
    }

    fn dispatch_timers(&self) -> bool {
        let now = self.now_ns();
        self.0.timers.borrow_mut().list_due(now);
        let mut any = false;
        loop {
            let due = self.0.timers.borrow_mut().take_due();
            let Some((target, token)) = due else { return any };
            any = true;
            target.complete(token, 0, crate::buf::IoBufs::new());
        }
    }

    // ---- inside a foreign loop -----------------------------------------------------------------

    /// Submits queued operations before a foreign loop waits.
    ///
    /// Returns how long that loop may wait for [`pollable_fd`](Self::pollable_fd), in nanoseconds; `None` for
    /// ever (foreign-loop contract). Call [`check`](Self::check) after the wait.
    ///
    /// Between the two calls, other code on the thread may use the loop, such as other tasks of an executor.
    /// New work makes the descriptor readable as well.
    ///
    /// # Errors
    ///
    /// Those of [`run_once`](Self::run_once).
    pub fn prepare(&self) -> io::Result<Option<u64>> {
        self.0.is_embedded.set(true);
        let _turn = self.enter_iteration()?;
        self.check_hearing()?;
        self.stats().iterations.add(1);
        // `check` may have been skipped, as by GLib if a source of a higher priority is ready.
        self.0.shared.inbox.end_sleep();
        self.forget_now();
        // Polling mode ends here, as a foreign loop does not poll.
        let raced = self.poll_end();
        self.arm_and_refill();
        self.submit_queued()?;
        if raced
            || self.has_work_now()
            || self.0.ring.borrow_mut().ready() != Ready::Nothing
            || !self.0.shared.inbox.begin_sleep()
        {
            return Ok(Some(0));
        }
        let deadline = self.next_deadline();
        Ok(deadline.map(|deadline| deadline.saturating_sub(self.fresh_now_ns())))
    }

    /// Returns whether there is something to dispatch inside a foreign loop.
    ///
    /// Call [`dispatch`](Self::dispatch) then. Checks the completion ring itself: the descriptor does not
    /// signal completions posted while [`prepare`](Self::prepare) submitted. Flagged task work counts too.
    pub fn check(&self) -> bool {
        self.0.shared.inbox.end_sleep();
        self.forget_now();
        let deadline = self.next_deadline();
        let due = deadline.is_some_and(|deadline| deadline <= self.now_ns());
        // epoll's events show only by a system call. If it fails, `dispatch` returns the error.
        let blind = !self.has_io_uring() && self.enter(Wait::No).is_err();
        due || blind || self.has_work_now() || self.0.ring.borrow_mut().ready() != Ready::Nothing
    }

    /// Dispatches events inside a foreign loop.
    ///
    /// # Errors
    ///
    /// Those of [`run_once`](Self::run_once).
    pub fn dispatch(&self) -> io::Result<()> {
        let _turn = self.enter_iteration()?;
        self.forget_now();
        self.enter_if_needed()?;
        self.dispatch_all();
        self.check_hearing()
    }
}
