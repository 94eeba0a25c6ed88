//! The end of a loop (stop contract), and of memory in flight then (memory contract).

#![allow(unsafe_code)]

use std::io;

use crate::event_loop::{EventLoop, Inner, REAP_BATCH};
use crate::linux_aio::LinuxAio;
use crate::op::Engine;
use crate::ring::{RingOp, Wait};
use crate::slots::{Slots, UserData};

/// Maximum rounds of dropping: what is dropped may leave new work behind, but not for ever.
const ROUNDS: u32 = 16;

impl EventLoop {
    /// Shuts the loop down, and waits for operations in flight.
    ///
    /// Drops handlers and tasks, and cancels operations where possible. Timers complete with `-ECANCELED`
    /// (those of [`add_timer`](Self::add_timer) are dropped), and so does everything submitted from now on.
    /// [`run`](Self::run) ends with this. A loop that runs otherwise needs it if tasks or targets hold the
    /// loop.
    ///
    /// # Errors
    ///
    /// Those of [`run_once`](Self::run_once); memory in flight is not freed then.
    pub fn shut_down(&self) -> io::Result<()> {
        let turn = self.enter_iteration()?;
        self.0.stopping.set(true);
        if !self.0.closing.replace(true) {
            let wake = RingOp::Cancel { user_data: UserData::Wake.pack() };
            self.push(wake, UserData::Ignored);
        }
        self.let_go();
        let result = self.drain();
        self.close_pool();
        drop(self.0.messages.take());
        drop(self.0.shared.inbox.close());
        self.let_go();
        drop(turn);
        result
    }

    /// Returns whether the loop is [shutting down](Self::shut_down).
    ///
    /// Operations that complete with `-ECANCELED` may then not have been carried out.
    pub fn is_shut_down(&self) -> bool {
        self.0.closing.get()
    }

    /// Drops all but operations in flight: their memory lives until the loop is dropped. Tasks and handlers may hold the loop,
    /// and other threads wait for the answers that they would have sent.
    pub(crate) fn abandon(&self) {
        self.0.stopping.set(true);
        self.0.closing.set(true);
        drop(self.0.messages.take());
        drop(self.0.shared.inbox.close());
        self.let_go();
    }

    fn let_go(&self) {
        for _ in 0..ROUNDS {
            let handlers = self.0.handlers.borrow().ids();
            let mut timers = self.0.timers.borrow_mut().clear();
            let bottom_halves = self.0.bottom_halves.take();
            let mut any = !handlers.is_empty() || !bottom_halves.is_empty();
            handlers.into_iter().for_each(|id| self.remove_handler(id));
            drop(bottom_halves);
            self.section(|| {
                for timer in timers.iter_mut().filter_map(Option::take) {
                    any = true;
                    timer.cancel();
                }
            });
            any |= self.0.tasks.clear();
            if !any {
                return;
            }
        }
    }

    /// Waits for operations in flight.
    fn drain(&self) -> io::Result<()> {
        let in_flight = self.0.slots.borrow().ids();
        for id in in_flight {
            self.push(RingOp::Cancel { user_data: UserData::Op(id).pack() }, UserData::Ignored);
        }
        while self.in_flight() > 0 {
            self.stats().iterations.add(1);
            self.arm_and_refill();
            let with_pool = self.0.with_pool.get() as u64;
            let with_aio = self.with_aio();
            let refused = self.0.refused.borrow().len() as u64;
            if self.in_flight() > with_pool + with_aio + refused {
                // Operations still in the backlog may include the cancellations of others.
                let more = refused > 0 || !self.0.backlog.borrow().is_empty();
                self.enter(if more { Wait::No } else { Wait::Forever })?;
            } else if with_aio > 0 {
                // They cannot be cancelled, and their eventfd is not watched any more.
                self.wait_for_aio()?;
            } else {
                // Only pool threads are left. They answer by the inbox, whose wake-up poll has ended. Closing
                // the pool waits for them.
                self.close_pool();
            }
            self.dispatch_all();
        }
        Ok(())
    }
}

impl Drop for Inner {
    /// Frees memory in slots once its operations are done. If the ring fails, the memory is leaked, as the
    /// kernel may still write to it (memory contract).
    fn drop(&mut self) {
        drop(self.pool.take());
        // Waits for the operations of Linux AIO.
        let aio_ended = self.aio.take().is_none_or(LinuxAio::end);
        drop(self.shared.inbox.close());
        let slots = self.slots.get_mut();
        for completion in self.refused.get_mut().drain(..) {
            if let UserData::Op(id) = UserData::unpack(completion.user_data) {
                drop(slots.remove(id));
            }
        }
        let ring = self.ring.get_mut();
        let backlog = self.backlog.get_mut();
        for id in slots.ids() {
            let engine = slots.get(id).map(|op| op.engine);
            if engine == Some(Engine::Native) && !aio_ended {
                std::mem::forget(slots.remove(id));
            } else if engine != Some(Engine::Uring) {
                // Pool threads are joined and AIO has ended, so these operations are done.
                drop(slots.remove(id));
            } else {
                let cancel = RingOp::Cancel { user_data: UserData::Op(id).pack() };
                backlog.push_back((cancel, UserData::Ignored.pack()));
            }
        }
        let mut reaped = Vec::with_capacity(REAP_BATCH);
        while slots.in_flight() > 0 {
            while let Some((op, user_data)) = backlog.front() {
                // SAFETY: the memory and descriptors of `op` are still in its slot.
                if !unsafe { ring.push(op, *user_data) } {
                    break;
                }
                backlog.pop_front();
            }
            // As in `drain`.
            let wait = if backlog.is_empty() { Wait::Forever } else { Wait::No };
            if ring.enter(wait).is_err() {
                std::mem::forget(std::mem::replace(slots, Slots::with_capacity(0)));
                return;
            }
            ring.reap(&mut reaped);
            for completion in reaped.drain(..) {
                if let UserData::Op(id) = UserData::unpack(completion.user_data) {
                    drop(slots.remove(id));
                }
            }
        }
    }
}
