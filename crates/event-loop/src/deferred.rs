//! Deferred calls: collected now, made once at the end of the section (deferral contract).

use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Something to do once per batch, such as signalling a guest (deferral contract).
///
/// ```
/// use std::cell::Cell;
/// use std::rc::Rc;
///
/// use event_loop::{DeferredCall, EventLoop, LoopConfig};
///
/// #[derive(Default)]
/// struct Signal {
///     queued: Cell<bool>,
///     sent: Cell<u32>,
/// }
///
/// impl DeferredCall for Signal {
///     fn run(&self) {
///         self.sent.set(self.sent.get() + 1);
///     }
///     fn queued(&self) -> &Cell<bool> {
///         &self.queued
///     }
/// }
///
/// let event_loop = EventLoop::new(LoopConfig::default())?;
/// let signal = Rc::new(Signal::default());
/// let call: Rc<dyn DeferredCall> = signal.clone();
/// event_loop.section(|| (0..100).for_each(|_| event_loop.defer(&call)));
/// assert_eq!(signal.sent.get(), 1);
/// # Ok::<(), event_loop::SetupError>(())
/// ```
pub trait DeferredCall {
    /// Runs the call on the loop's thread, with no borrow of the loop held.
    ///
    /// It may defer calls, itself included: they run in the same section.
    fn run(&self);

    /// Returns the loop's flag: whether the call is collected.
    ///
    /// The implementor keeps the flag, initially false. One flag serves one loop.
    fn queued(&self) -> &Cell<bool>;
}

/// A loop's collected calls.
#[derive(Default)]
pub(crate) struct Deferred {
    /// Nothing is collected and each call runs at once, for measurements.
    no_batching: bool,
    depth: Cell<u32>,
    calls: RefCell<Vec<Rc<dyn DeferredCall>>>,
    /// The list being run, kept for its capacity.
    running: RefCell<Vec<Rc<dyn DeferredCall>>>,
}

impl Deferred {
    pub(crate) fn new(no_batching: bool) -> Self {
        Deferred { no_batching, ..Deferred::default() }
    }

    /// Collects `call`, or runs it at once outside of a section.
    pub(crate) fn defer(&self, call: &Rc<dyn DeferredCall>) {
        if self.no_batching || self.depth.get() == 0 {
            call.run();
        } else if !call.queued().replace(true) {
            self.calls.borrow_mut().push(call.clone());
        }
    }

    pub(crate) fn in_section(&self) -> bool {
        self.depth.get() > 0
    }

    pub(crate) fn enter(&self) {
        self.depth.set(self.depth.get() + 1);
    }

    /// Leaves a section. The outermost section runs the collected calls in the order of their first
    /// deferral, until none are left.
    pub(crate) fn leave(&self) {
        if self.depth.get() == 1 {
            while !self.calls.borrow().is_empty() {
                let mut running = self.running.take();
                std::mem::swap(&mut running, &mut *self.calls.borrow_mut());
                for call in running.drain(..) {
                    call.queued().set(false);
                    call.run();
                }
                self.running.replace(running);
            }
        }
        self.depth.set(self.depth.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Call {
        name: u32,
        log: Rc<RefCell<Vec<u32>>>,
        queued: Cell<bool>,
        again: Cell<u32>,
        deferred: Rc<Deferred>,
        next: RefCell<Option<Rc<dyn DeferredCall>>>,
    }

    impl DeferredCall for Call {
        fn run(&self) {
            self.log.borrow_mut().push(self.name);
            if self.again.get() > 0 {
                self.again.set(self.again.get() - 1);
                if let Some(next) = &*self.next.borrow() {
                    self.deferred.defer(next);
                }
            }
        }
        fn queued(&self) -> &Cell<bool> {
            &self.queued
        }
    }

    fn call(name: u32, log: &Rc<RefCell<Vec<u32>>>, deferred: &Rc<Deferred>) -> Rc<Call> {
        Rc::new(Call {
            name,
            log: log.clone(),
            queued: Cell::new(false),
            again: Cell::new(0),
            deferred: deferred.clone(),
            next: RefCell::new(None),
        })
    }

    #[test]
    fn deferral_calls_run_once_in_order_at_the_end_of_the_outermost_section() {
        let (log, deferred) = (Rc::default(), Rc::new(Deferred::default()));
        let calls: Vec<Rc<dyn DeferredCall>> =
            (0..3).map(|n| call(n, &log, &deferred) as Rc<dyn DeferredCall>).collect();
        deferred.enter();
        deferred.enter();
        for n in [2, 0, 2, 1, 0] {
            deferred.defer(&calls[n]);
        }
        deferred.leave();
        assert!(log.borrow().is_empty(), "an inner section's end runs nothing");
        deferred.leave();
        assert_eq!(*log.borrow(), [2, 0, 1]);
    }

    #[test]
    fn deferral_a_call_that_defers_again_runs_again_in_the_same_section() {
        let (log, deferred) = (Rc::default(), Rc::new(Deferred::default()));
        let first = call(1, &log, &deferred);
        let as_call = first.clone() as Rc<dyn DeferredCall>;
        *first.next.borrow_mut() = Some(as_call.clone());
        first.again.set(2);
        deferred.enter();
        deferred.defer(&as_call);
        deferred.leave();
        assert_eq!(*log.borrow(), [1, 1, 1]);
        first.next.take();
    }

    #[test]
    fn deferral_outside_a_section_a_call_runs_at_once() {
        let (log, deferred) = (Rc::default(), Rc::new(Deferred::default()));
        let only = call(7, &log, &deferred) as Rc<dyn DeferredCall>;
        deferred.defer(&only);
        assert_eq!(*log.borrow(), [7]);
    }

    #[test]
    fn without_batching_a_call_runs_at_once_each_time() {
        let (log, deferred) = (Rc::default(), Rc::new(Deferred::new(true)));
        let only = call(7, &log, &deferred) as Rc<dyn DeferredCall>;
        deferred.enter();
        for n in 1..=3 {
            deferred.defer(&only);
            assert_eq!(log.borrow().len(), n);
        }
        deferred.leave();
        assert_eq!(*log.borrow(), [7, 7, 7], "and not once more at the end");
    }
}
