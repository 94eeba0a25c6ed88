//! Permits for what strangers may do a few times at once. The others wait in the order in which they asked.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// A number of permits.
pub(super) struct Permits {
    free: Cell<usize>,
    /// Those that wait, the first one in front. Some may have gone.
    waiting: RefCell<VecDeque<Rc<Place>>>,
}

/// Returned on drop.
pub(super) struct Permit<'a>(&'a Permits);

#[derive(Default)]
struct Place {
    state: Cell<State>,
    waker: RefCell<Option<Waker>>,
}

#[derive(Default, Clone, Copy, PartialEq)]
enum State {
    #[default]
    Waits,
    /// The permit is its own.
    Granted,
    Gone,
}

impl Permits {
    pub(super) fn new(count: usize) -> Self {
        Permits { free: Cell::new(count), waiting: RefCell::default() }
    }

    /// Waits for a permit.
    pub(super) async fn take(&self) -> Permit<'_> {
        if let Some(left) = self.free.get().checked_sub(1) {
            self.free.set(left);
            return Permit(self);
        }
        let place = Rc::new(Place::default());
        self.waiting.borrow_mut().push_back(place.clone());
        let leaving = Leaving { permits: self, place };
        poll_fn(|cx| {
            if leaving.place.state.get() == State::Granted {
                return Poll::Ready(());
            }
            let before = leaving.place.waker.replace(Some(cx.waker().clone()));
            drop(before);
            Poll::Pending
        })
        .await;
        leaving.place.state.set(State::Gone);
        Permit(self)
    }

    /// Gives a permit to the next that waits.
    fn give(&self) {
        loop {
            let next = self.waiting.borrow_mut().pop_front();
            let Some(place) = next else { return self.free.set(self.free.get() + 1) };
            if place.state.get() == State::Waits {
                place.state.set(State::Granted);
                let waker = place.waker.take();
                return waker.into_iter().for_each(Waker::wake);
            }
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.give();
    }
}

/// Leaves a place that is not used.
struct Leaving<'a> {
    permits: &'a Permits,
    place: Rc<Place>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        match self.place.state.replace(State::Gone) {
            State::Granted => self.permits.give(),
            State::Waits => {
                let mut waiting = self.permits.waiting.borrow_mut();
                waiting.retain(|place| !Rc::ptr_eq(place, &self.place));
            }
            State::Gone => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::Context;

    use super::*;

    fn poll<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[test]
    fn permits_go_to_those_that_wait_in_their_order() {
        let permits = Permits::new(2);
        let first = poll(pin!(permits.take())).unwrap();
        let second = poll(pin!(permits.take())).unwrap();
        let (mut third, mut fourth) = (pin!(permits.take()), pin!(permits.take()));
        assert!(poll(third.as_mut()).is_none() && poll(fourth.as_mut()).is_none());
        drop(first);
        // It was the third's turn.
        assert!(poll(pin!(permits.take())).is_none());
        assert!(poll(fourth.as_mut()).is_none());
        let third = poll(third).unwrap();
        drop((second, third));
        let fourth = poll(fourth).unwrap();
        assert_eq!(permits.free.get(), 1);
        drop(fourth);
        assert_eq!(permits.free.get(), 2);
        assert!(permits.waiting.borrow().is_empty());
    }

    #[test]
    fn those_that_leave_keep_no_permit() {
        let permits = Permits::new(1);
        let first = poll(pin!(permits.take())).unwrap();
        let mut granted = Box::pin(permits.take());
        let mut next = Box::pin(permits.take());
        let mut last = Box::pin(permits.take());
        for future in [&mut granted, &mut next, &mut last] {
            assert!(poll(future.as_mut()).is_none());
        }
        drop(next);
        drop(first);
        // Granted, but not noticed.
        drop(granted);
        let last = poll(last.as_mut()).unwrap();
        assert_eq!(permits.free.get(), 0);
        drop(last);
        assert_eq!(permits.free.get(), 1);
    }
}
