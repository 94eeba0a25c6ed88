//! How the loop turns: prepare, wait, dispatch.
//!
//! One iteration makes at most one system call for the ring (contract E6): what was queued, polls to
//! be armed included, is submitted by the call that waits. While the loop polls, an iteration either
//! submits or spins, never both.

use std::io;

use crate::event_loop::EventLoop;
use crate::handle::Message;
use crate::handlers::Progress;
use crate::ring::{Completion, Ready, Wait};
use crate::slots::UserData;

impl EventLoop {
    /// Turns until [`stop`](crate::LoopHandle::stop), then finishes or cancels what is in flight and
    /// lets go of everything the loop holds (contract E12).
    ///
    /// # Errors
    ///
    /// The ring failed for good; everything has been let go of as far as that was possible.
    pub fn run(&self) -> io::Result<()> {
        let result = loop {
            if self.0.stopping.get() {
                break Ok(());
            }
            if let Err(error) = self.run_once(true) {
                break Err(error);
            }
        };
        let shut_down = self.shut_down();
        result.and(shut_down)
    }

    /// One iteration: waits for events, if `may_wait`, and dispatches them.
    ///
    /// # Errors
    ///
    /// Those of io_uring_enter(2) or epoll_pwait2(2) that do not pass by themselves.
    pub fn run_once(&self, may_wait: bool) -> io::Result<()> {
        self.stats().iterations.add(1);
        self.forget_now();
        let waited = self.wait(may_wait);
        self.0.shared.inbox.end_sleep();
        waited?;
        self.forget_now();
        self.dispatch_all();
        Ok(())
    }

    /// The first half: submit, and poll, sleep or neither.
    fn wait(&self, may_wait: bool) -> io::Result<()> {
        self.arm_and_refill();
        let poller = &self.0.poller;
        self.poll_wait_begins();
        let has_work = !may_wait || self.has_work_now();
        let deadline = self.0.timers.borrow_mut().next_deadline();
        if !has_work {
            if poller.wants_to_poll() {
                // What is queued goes out first; the iteration after this one polls.
                if self.0.ring.borrow_mut().queued() == 0 {
                    self.poll_for_window(deadline);
                    return self.enter_if_needed();
                }
                return self.enter(Wait::No);
            }
            if !self.poll_end() && self.0.shared.inbox.begin_sleep() {
                let wait = match deadline {
                    None => Wait::Forever,
                    Some(deadline) => Wait::For(deadline.saturating_sub(self.fresh_now_ns())),
                };
                self.stats().sleeps.add(1);
                return self.enter(wait);
            }
        }
        self.enter_if_needed()
    }

    /// Enters without waiting when there is something to submit or to fetch.
    fn enter_if_needed(&self) -> io::Result<()> {
        let needed = {
            let mut ring = self.0.ring.borrow_mut();
            ring.queued() > 0 || ring.ready() == Ready::NeedsEnter || !self.has_io_uring()
        };
        if needed { self.enter(Wait::No) } else { Ok(()) }
    }

    fn enter(&self, wait: Wait) -> io::Result<()> {
        self.stats().enters.add(1);
        self.0.ring.borrow_mut().enter(wait)
    }

    fn arm_and_refill(&self) {
        if !self.0.backlog.borrow().is_empty() {
            self.refill();
        }
        if self.0.handlers.borrow().must_arm() {
            loop {
                let next = self.0.handlers.borrow_mut().take_arming();
                let Some((op, user_data)) = next else { break };
                self.push(op, user_data);
            }
        }
    }

    /// Whether there is something to do without waiting.
    fn has_work_now(&self) -> bool {
        !self.0.handlers.borrow().ready.is_empty()
            || self.0.shared.inbox.has_messages()
            || self.0.tasks.has_ready()
            || !self.0.backlog.borrow().is_empty()
            || self.0.stopping.get()
            || self.0.ring.borrow_mut().ready() == Ready::Completions
    }

    /// The second half: everything that has happened, in one section of deferred calls. Each source
    /// gets a bounded turn (contract E11): what comes in meanwhile is for the next iteration.
    pub(crate) fn dispatch_all(&self) {
        self.0.deferred.enter();
        let polled = self.0.poller.has_begun();
        let events_at = if polled { self.fresh_now_ns() } else { 0 };
        let mut had_events = self.dispatch_completions();
        had_events |= self.dispatch_ready();
        had_events |= self.dispatch_messages();
        had_events |= self.dispatch_timers();
        self.0.tasks.run_ready();
        if polled {
            self.poll_adapt(events_at, had_events);
        }
        self.0.deferred.leave();
    }

    fn dispatch_completions(&self) -> bool {
        let mut reaped = self.0.reaped.take();
        self.0.ring.borrow_mut().reap(&mut reaped);
        let any = !reaped.is_empty();
        for completion in reaped.drain(..) {
            self.dispatch_completion(completion);
        }
        self.0.reaped.replace(reaped);
        any
    }

    fn dispatch_completion(&self, completion: Completion) {
        let Completion { user_data, result, more } = completion;
        if !more {
            self.stats().completed.add(1);
        }
        match UserData::unpack(user_data) {
            UserData::Op(id) => {
                let done = self.0.slots.borrow_mut().remove(id);
                if let Some(op) = done {
                    self.0.poller.ring.had_event.set(true);
                    op.target.complete(op.token, result, op.bufs);
                }
            }
            UserData::Poll(id) => self.0.handlers.borrow_mut().fired(id, result, more),
            // The inbox is looked at in every iteration.
            UserData::Wake => {
                if !more && result >= 0 && !self.0.stopping.get() {
                    self.rearm_wake();
                }
            }
            UserData::Ignored => {}
        }
    }

    fn dispatch_ready(&self) -> bool {
        let turns = self.0.handlers.borrow().ready.len();
        for turn in 0..turns {
            let id = self.0.handlers.borrow().ready.get(turn).copied();
            let Some(id) = id else { break };
            // Removed by an earlier callback: not called (contract E9).
            let entry = self.0.handlers.borrow().get(id).cloned();
            let Some(entry) = entry else { continue };
            entry.listed.set(false);
            self.poll_join(id, &entry);
            if entry.handler.ready(entry.fired.replace(0)) == Progress::More {
                self.0.handlers.borrow_mut().list_ready(id);
            }
        }
        let mut handlers = self.0.handlers.borrow_mut();
        let turns = turns.min(handlers.ready.len());
        handlers.ready.drain(..turns);
        turns > 0
    }

    fn dispatch_messages(&self) -> bool {
        if !self.0.shared.inbox.has_messages() {
            return false;
        }
        let mut messages = self.0.messages.take();
        self.0.shared.inbox.take(&mut messages);
        self.0.poller.inbox.had_event.set(true);
        for message in messages.drain(..) {
            self.dispatch_message(message);
        }
        self.0.messages.replace(messages);
        true
    }

    pub(crate) fn dispatch_message(&self, message: Message) {
        match message {
            Message::Call(call) => call(self),
            Message::BottomHalf(id, flag) => self.run_bottom_half(id, &flag),
            Message::WakeTask(waker) => self.0.tasks.make_ready(&waker),
            Message::PoolResult { user_data, result } => {
                self.0.with_pool.set(self.0.with_pool.get() - 1);
                self.dispatch_completion(Completion { user_data, result, more: false });
            }
            Message::Stop => self.0.stopping.set(true),
        }
    }

    fn dispatch_timers(&self) -> bool {
        let newest = self.0.timers.borrow().newest();
        if self.0.timers.borrow_mut().next_deadline().is_none() {
            return false;
        }
        let now = self.now_ns();
        let mut any = false;
        loop {
            let due = self.0.timers.borrow_mut().take_due(now, newest);
            let Some((target, token)) = due else { return any };
            any = true;
            target.complete(token, 0, crate::buf::IoBufs::new());
        }
    }

    // ---- inside a foreign loop -----------------------------------------------------------------

    /// Inside a foreign loop: submits what is queued and says how long that loop may wait at most,
    /// in nanoseconds (`None`: for ever), for [`pollable_fd`](Self::pollable_fd) to become readable
    /// (contract E2). To be followed by [`check`](Self::check), without fail.
    ///
    /// # Errors
    ///
    /// As of [`run_once`](Self::run_once).
    pub fn prepare(&self) -> io::Result<Option<u64>> {
        self.stats().iterations.add(1);
        self.forget_now();
        self.arm_and_refill();
        self.enter_if_needed()?;
        if self.has_work_now()
            || self.0.ring.borrow_mut().ready() != Ready::Nothing
            || !self.0.shared.inbox.begin_sleep()
        {
            return Ok(Some(0));
        }
        let deadline = self.0.timers.borrow_mut().next_deadline();
        Ok(deadline.map(|deadline| deadline.saturating_sub(self.fresh_now_ns())))
    }

    /// Inside a foreign loop: whether there is something to [`dispatch`](Self::dispatch). Looks at
    /// the completion ring itself: completions may have been posted while
    /// [`prepare`](Self::prepare) submitted, and then the descriptor shows nothing new; flagged task
    /// work counts as well.
    pub fn check(&self) -> bool {
        self.0.shared.inbox.end_sleep();
        self.forget_now();
        let due = self.0.timers.borrow_mut().next_deadline().is_some_and(|d| d <= self.now_ns());
        due || self.has_work_now() || self.0.ring.borrow_mut().ready() != Ready::Nothing
    }

    /// Inside a foreign loop: runs what has come.
    ///
    /// # Errors
    ///
    /// As of [`run_once`](Self::run_once).
    pub fn dispatch(&self) -> io::Result<()> {
        self.forget_now();
        self.enter_if_needed()?;
        self.dispatch_all();
        Ok(())
    }

    // ---- stop ----------------------------------------------------------------------------------

    /// Lets go of everything: handlers and timers are dropped, operations in flight are cancelled
    /// where they can be and waited for, tasks are dropped.
    fn shut_down(&self) -> io::Result<()> {
        self.0.stopping.set(true);
        let ids = self.0.handlers.borrow().ids();
        ids.into_iter().for_each(|id| self.remove_handler(id));
        let timers = self.0.timers.borrow_mut().clear();
        drop(timers);
        self.0.tasks.clear();
        let result = self.drain();
        self.close_pool();
        for message in self.0.shared.inbox.close() {
            drop(message);
        }
        let bottom_halves = self.0.bottom_halves.take();
        drop(bottom_halves);
        result
    }

    /// Waits for what is in flight.
    fn drain(&self) -> io::Result<()> {
        use crate::ring::RingOp;
        self.push(RingOp::PollRemove { user_data: UserData::Wake.pack() }, UserData::Ignored);
        for id in self.0.slots.borrow().ids() {
            let op = UserData::Op(id).pack();
            self.push(RingOp::Cancel { user_data: op }, UserData::Ignored);
        }
        while self.in_flight() > 0 {
            self.arm_and_refill();
            let with_pool = self.0.with_pool.get() as u64;
            if self.in_flight() > with_pool {
                self.enter(Wait::Forever)?;
            } else {
                // Only pool threads are left, and the wake-up poll is gone: they answer by the
                // inbox, and closing the pool waits for them.
                self.close_pool();
            }
            self.dispatch_all();
        }
        Ok(())
    }
}
