//! Tasks: results for their awaiters, and wakers that outlive their task.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use event_loop::{EventLoop, LoopConfig, LoopGone};

fn new_loop() -> EventLoop {
    EventLoop::new(LoopConfig::default()).unwrap()
}

#[test]
fn a_result_is_waited_for_before_and_after_it_is_there() {
    let event_loop = new_loop();
    let on_loop = event_loop.clone();
    let sum = event_loop.block_on(async move {
        let early = on_loop.spawn(async { 1 });
        let inner = on_loop.clone();
        let late = on_loop.spawn(async move {
            inner.sleep_until(inner.now_ns() + 1_000_000).await;
            20
        });
        let late = late.await.unwrap();
        early.await.unwrap() + late
    });
    assert_eq!(sum.unwrap(), 21);
}

#[test]
fn a_task_runs_on_without_its_handle_and_its_result_is_dropped_at_once() {
    struct Noted(Rc<Cell<u32>>);
    impl Drop for Noted {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    let (event_loop, dropped) = (new_loop(), Rc::new(Cell::new(0)));
    for handle_goes_first in [true, false] {
        let noted = Noted(dropped.clone());
        let handle = event_loop.spawn(async move { noted });
        let before = dropped.get();
        if handle_goes_first {
            drop(handle);
            assert_eq!(dropped.get(), before, "the task was dropped with its handle");
            event_loop.run_once(false).unwrap();
        } else {
            event_loop.run_once(false).unwrap();
            assert_eq!(dropped.get(), before, "the handle may still be awaited");
            drop(handle);
        }
        assert_eq!(dropped.get(), before + 1);
    }
}

#[test]
fn awaiting_a_task_of_a_stopped_loop_fails() {
    let event_loop = new_loop();
    let handle = event_loop.spawn(std::future::pending::<()>());
    event_loop.run_once(false).unwrap();
    event_loop.shut_down().unwrap();
    let other = new_loop();
    assert_eq!(other.block_on(handle).unwrap(), Err(LoopGone));
    let late = event_loop.spawn(std::future::pending::<()>());
    assert_eq!(other.block_on(late).unwrap(), Err(LoopGone));
}

/// Stores its waker, and is done when polled again.
fn park(kept: &Rc<RefCell<Option<Waker>>>) -> impl Future<Output = ()> + use<> {
    let kept = kept.clone();
    poll_fn(move |cx| match kept.replace(Some(cx.waker().clone())) {
        Some(_) => Poll::Ready(()),
        None => Poll::Pending,
    })
}

#[test]
fn an_old_waker_wakes_no_later_task() {
    let event_loop = new_loop();
    let kept = Rc::new(RefCell::new(None));
    let handle = event_loop.spawn(park(&kept));
    event_loop.run_once(false).unwrap();
    kept.borrow().as_ref().unwrap().wake_by_ref();
    event_loop.block_on(handle).unwrap().unwrap();
    let old = kept.take().unwrap();
    // Reuse all free slots.
    let polls = Rc::new(Cell::new(0));
    for _ in 0..4 {
        let polls = polls.clone();
        event_loop.spawn(poll_fn(move |_| {
            polls.set(polls.get() + 1);
            Poll::<()>::Pending
        }));
    }
    event_loop.run_once(false).unwrap();
    assert_eq!(polls.get(), 4);
    old.wake_by_ref();
    std::thread::scope(|scope| {
        scope.spawn(|| old.wake_by_ref());
    });
    event_loop.run_once(false).unwrap();
    event_loop.run_once(false).unwrap();
    assert_eq!(polls.get(), 4, "another task was woken");
    event_loop.shut_down().unwrap();
}

#[test]
fn a_task_is_woken_again_by_either_way_after_each_poll() {
    let event_loop = new_loop();
    let waker: Rc<RefCell<Option<Waker>>> = Rc::default();
    let polls = Rc::new(Cell::new(0));
    {
        let (waker, polls) = (waker.clone(), polls.clone());
        event_loop.spawn(poll_fn(move |cx| {
            waker.replace(Some(cx.waker().clone()));
            polls.set(polls.get() + 1);
            Poll::<()>::Pending
        }));
    }
    event_loop.run_once(false).unwrap();
    for round in 1..=3 {
        let outside = waker.borrow().clone().unwrap();
        // From another thread, twice: one poll.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                outside.wake_by_ref();
                outside.wake_by_ref();
            });
        });
        event_loop.run_once(true).unwrap();
        assert_eq!(polls.get(), 2 * round, "woken from another thread");
        // From a task of the same iteration, twice: one poll.
        let inside = outside.clone();
        event_loop.spawn(async move {
            inside.wake_by_ref();
            inside.wake_by_ref();
        });
        event_loop.run_once(true).unwrap();
        event_loop.run_once(false).unwrap();
        assert_eq!(polls.get(), 2 * round + 1, "woken from the loop's own thread");
    }
    event_loop.shut_down().unwrap();
}

/// A late wake-up of an ended task does not reach the slot's next task.
#[test]
fn a_task_that_wakes_itself_as_it_ends_does_not_keep_the_next_from_running() {
    let event_loop = new_loop();
    let ran = Rc::new(Cell::new(0));
    for turn in 1..=3 {
        let count = ran.clone();
        event_loop.spawn(poll_fn(move |cx| {
            count.set(count.get() + 1);
            cx.waker().wake_by_ref();
            Poll::Ready(())
        }));
        for _ in 0..3 {
            event_loop.run_once(false).unwrap();
        }
        assert_eq!(ran.get(), turn);
    }
}
