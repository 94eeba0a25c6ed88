//! The channel of one loop to a throttle node.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{BottomHalf, EventLoop, IoBufs, IoTarget, TimerId};
use nix::errno::Errno;

use super::ThrottleNode;
use super::schedule::{Direction, Schedule};
use crate::node::Channel;
use crate::request::{Op, Request};

/// Initial capacity for held requests; unused memory is not touched.
const FIRST: usize = 256;
/// Most requests that one timer releases in a row (fairness contract).
const BATCH: usize = 64;

const DIRECTIONS: [Direction; 2] = [Direction::Read, Direction::Write];

/// A channel. Reads wait for reads and writes for writes.
pub(super) struct ThrottleChannel {
    me: Weak<ThrottleChannel>,
    event_loop: EventLoop,
    node: Arc<ThrottleNode>,
    child: Rc<dyn Channel>,
    schedule: RefCell<Arc<Schedule>>,
    held: [RefCell<HeldRequests>; 2],
    /// Drains that wait for the end of all requests.
    draining: Cell<u32>,
    /// Scheduled when the limits have changed; the number is that with the group.
    bottom_half: OnceCell<(BottomHalf, u64)>,
}

/// Held requests in order. The first one has been counted, and `timer` is for it.
struct HeldRequests {
    requests: VecDeque<Request>,
    timer: Option<TimerId>,
}

impl ThrottleChannel {
    pub(super) fn new(
        node: Arc<ThrottleNode>,
        event_loop: &EventLoop,
        child: Rc<dyn Channel>,
    ) -> Rc<Self> {
        let held =
            || RefCell::new(HeldRequests { requests: VecDeque::with_capacity(FIRST), timer: None });
        let channel = Rc::new_cyclic(|me: &Weak<ThrottleChannel>| ThrottleChannel {
            me: me.clone(),
            event_loop: event_loop.clone(),
            schedule: RefCell::new(node.group.schedule()),
            node,
            child,
            held: [held(), held()],
            draining: Cell::new(0),
            bottom_half: OnceCell::new(),
        });
        let me = channel.me.clone();
        let bottom_half = event_loop.bottom_half(move || {
            if let Some(me) = me.upgrade() {
                me.limits_changed();
            }
        });
        let number = channel.node.group.join(bottom_half.clone());
        // The cell is empty so far.
        let _ = channel.bottom_half.set((bottom_half, number));
        // The limits may have changed since the schedule was read.
        channel.schedule.replace(channel.node.group.schedule());
        channel
    }

    fn held(&self, direction: Direction) -> &RefCell<HeldRequests> {
        let [reads, writes] = &self.held;
        match direction {
            Direction::Read => reads,
            Direction::Write => writes,
        }
    }

    /// Counts a request. `Some`: the earliest time at which it may be sent on.
    fn count(&self, direction: Direction, bytes: u64) -> Option<u64> {
        let now = self.event_loop.now_ns();
        let when = self.schedule.borrow().take(now, direction, bytes);
        (when > now && self.draining.get() == 0).then_some(when)
    }

    fn wait(&self, direction: Direction, held: &mut HeldRequests, when: u64) {
        let Some(me) = self.me.upgrade() else { return };
        let target = me as Rc<dyn IoTarget>;
        held.timer = Some(self.event_loop.submit_timer(when, &target, direction as u32));
    }

    /// Counts the first held request. Returns whether it may be sent on now.
    fn count_first(&self, direction: Direction) -> bool {
        let mut held = self.held(direction).borrow_mut();
        let Some(first) = held.requests.front() else { return false };
        match self.count(direction, bytes(first)) {
            Some(when) => {
                self.wait(direction, &mut held, when);
                false
            }
            None => true,
        }
    }

    /// Sends on the first held request, which has been counted, and all later ones that are due.
    fn go_on(&self, direction: Direction) {
        for _ in 0..BATCH {
            let first = self.held(direction).borrow_mut().requests.pop_front();
            let Some(first) = first else { return };
            self.child.submit(first);
            // A request that arrived while none was held may have armed the timer.
            if self.held(direction).borrow().timer.is_some() || !self.count_first(direction) {
                return;
            }
        }
        let now = self.event_loop.now_ns();
        self.wait(direction, &mut self.held(direction).borrow_mut(), now);
    }

    fn cancel_timer(&self, direction: Direction) {
        let timer = self.held(direction).borrow_mut().timer.take();
        if let Some(timer) = timer {
            self.event_loop.cancel_timer(timer);
        }
    }

    fn limits_changed(&self) {
        self.schedule.replace(self.node.group.schedule());
        for direction in DIRECTIONS {
            self.cancel_timer(direction);
            if self.count_first(direction) {
                self.go_on(direction);
            }
        }
    }

    /// Answers the held requests without carrying them out.
    fn cancel(&self, direction: Direction) {
        loop {
            let first = self.held(direction).borrow_mut().requests.pop_front();
            let Some(first) = first else { return };
            first.complete(Err(Errno::ECANCELED));
        }
    }
}

/// The bytes of a request that count.
fn bytes(request: &Request) -> u64 {
    match request.op {
        Op::BlockStatus => 0,
        _ => request.len,
    }
}

impl Channel for ThrottleChannel {
    fn submit(&self, request: Request) {
        let Some(request) = self.node.common.admit(request) else { return };
        // Block status and flushes count as operations of no bytes, as an empty read does: all of them cost time.
        let direction = match request.op {
            Op::Read | Op::BlockStatus => Direction::Read,
            Op::Write { .. } | Op::Discard | Op::WriteZeroes { .. } | Op::Flush => Direction::Write,
        };
        let mut held = self.held(direction).borrow_mut();
        if !held.requests.is_empty() {
            self.node.group.count_held();
            return held.requests.push_back(request);
        }
        match self.count(direction, bytes(&request)) {
            None => {
                drop(held);
                self.child.submit(request);
            }
            Some(when) => {
                self.node.group.count_held();
                held.requests.push_back(request);
                self.wait(direction, &mut held, when);
            }
        }
    }

    fn in_flight(&self) -> usize {
        let held = self.held.iter().map(|held| held.borrow().requests.len());
        held.sum::<usize>() + self.child.in_flight()
    }

    fn drain_begin(&self) {
        self.draining.set(self.draining.get() + 1);
        for direction in DIRECTIONS {
            self.cancel_timer(direction);
            loop {
                let first = self.held(direction).borrow_mut().requests.pop_front();
                let Some(first) = first else { break };
                self.child.submit(first);
                self.count_first(direction);
            }
        }
        self.child.drain_begin();
    }

    fn drain_end(&self) {
        self.draining.set(self.draining.get().saturating_sub(1));
        self.child.drain_end();
    }
}

impl IoTarget for ThrottleChannel {
    fn complete(&self, token: u32, result: i32, _bufs: IoBufs) {
        let Some(direction) = DIRECTIONS.into_iter().find(|&d| d as u32 == token) else { return };
        self.held(direction).borrow_mut().timer = None;
        match result {
            0 => self.go_on(direction),
            // The loop ends.
            _ => self.cancel(direction),
        }
    }
}

impl Drop for ThrottleChannel {
    fn drop(&mut self) {
        if let Some((bottom_half, number)) = self.bottom_half.get() {
            self.node.group.leave(*number);
            self.event_loop.delete_bottom_half(bottom_half);
        }
        DIRECTIONS.into_iter().for_each(|direction| self.cancel(direction));
    }
}
