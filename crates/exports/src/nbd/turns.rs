//! Limits what an export's connections do per iteration of their I/O thread: the bytes that they begin to move, and the
//! cost of replies about dirty bitmaps.
//!
//! The kernel copies from the page cache within the loop's iteration, and a null node answers there, while
//! everything else on the thread waits. So once enough bytes are begun, further requests wait for the next
//! iteration, however many clients send them. Memory of clients that have left, whose pages the kernel takes back one by
//! one, is freed in turns, too.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};

use event_loop::{EventLoop, IoBufs, IoTarget, Meter};

use super::connection::Connection;

/// Bytes that the requests begun in one iteration may move, apart from the last of them.
const SHARE: usize = 512 << 10;

pub(super) struct Turns {
    me: Weak<Turns>,
    event_loop: EventLoop,
    /// Loop time of the iteration, constant within it, and the bytes begun in it.
    now_ns: Cell<u64>,
    begun: Cell<usize>,
    /// In order of arrival.
    waiting: RefCell<VecDeque<Weak<Connection>>>,
    /// What costly replies are charged to.
    pub(super) meter: Meter,
    /// Connections with costly replies to put together, in turns.
    costly: RefCell<VecDeque<Weak<Connection>>>,
    /// Memory of connections that have ended.
    graves: RefCell<VecDeque<IoBufs>>,
    /// A timer for the next iteration is submitted.
    armed: Cell<bool>,
}

impl Turns {
    pub(super) fn new(event_loop: &EventLoop) -> Rc<Self> {
        Rc::new_cyclic(|me| Turns {
            me: me.clone(),
            event_loop: event_loop.clone(),
            now_ns: Cell::new(0),
            begun: Cell::new(0),
            waiting: RefCell::default(),
            meter: event_loop.meter(),
            costly: RefCell::default(),
            graves: RefCell::default(),
            armed: Cell::new(false),
        })
    }

    /// Whether no connection waits and bytes are left.
    pub(super) fn is_open(&self, now_ns: u64) -> bool {
        self.waiting.borrow().is_empty() && !self.are_over(now_ns)
    }

    /// Whether enough is begun in this iteration.
    pub(super) fn are_over(&self, now_ns: u64) -> bool {
        self.now_ns.get() == now_ns && self.begun.get() >= SHARE
    }

    /// Whether a costly reply has to wait.
    pub(super) fn are_costly(&self) -> bool {
        !self.costly.borrow().is_empty() || self.meter.is_half_over()
    }

    /// Counts a request that moves this many `bytes`.
    pub(super) fn begin(&self, now_ns: u64, bytes: usize) {
        let before = if self.now_ns.replace(now_ns) == now_ns { self.begun.get() } else { 0 };
        self.begun.set(before.saturating_add(bytes));
    }

    /// Calls the connection when it is its turn.
    pub(super) fn wait(&self, connection: Weak<Connection>) {
        self.waiting.borrow_mut().push_back(connection);
        self.arm();
    }

    /// Has the connection put together its costly replies by and by.
    pub(super) fn wait_for_budget(&self, connection: Weak<Connection>) {
        self.costly.borrow_mut().push_back(connection);
        self.arm();
    }

    /// Frees a connection's memory: that of one connection in an iteration.
    pub(super) fn bury(&self, memory: IoBufs) {
        self.graves.borrow_mut().push_back(memory);
        self.arm();
    }

    fn arm(&self) {
        let Some(me) = self.me.upgrade().filter(|_| !self.armed.replace(true)) else { return };
        let me: Rc<dyn IoTarget> = me;
        // A timer that is due takes no lock, unlike a bottom half.
        self.event_loop.submit_timer(self.event_loop.now_ns(), &me, 0);
    }

    fn run(&self) {
        self.run_costly();
        self.run_waiting();
        drop(self.graves.borrow_mut().pop_front());
        let are_empty = self.waiting.borrow().is_empty() && self.costly.borrow().is_empty();
        if !are_empty || !self.graves.borrow().is_empty() {
            self.arm();
        }
    }

    /// One reply of each connection in turns. One in any case: other sources may spend the budget in every iteration.
    fn run_costly(&self) {
        loop {
            let Some(next) = self.costly.borrow_mut().pop_front() else { return };
            if let Some(connection) = next.upgrade() {
                let (units, has_more) = connection.answer_costly();
                self.meter.charge(units);
                if has_more {
                    self.costly.borrow_mut().push_back(next);
                }
            }
            if self.meter.is_half_over() {
                return;
            }
        }
    }

    fn run_waiting(&self) {
        while !self.are_over(self.event_loop.now_ns()) {
            let Some(next) = self.waiting.borrow_mut().pop_front() else { return };
            if let Some(connection) = next.upgrade() {
                connection.its_turn();
            }
        }
    }
}

impl IoTarget for Turns {
    fn complete(&self, _token: u32, result: i32, _bufs: IoBufs) {
        self.armed.set(false);
        // Not at the end of the loop.
        if result == 0 {
            self.run();
        }
    }
}
