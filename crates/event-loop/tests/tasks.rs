//! Tasks: results for their awaiters, and wakers that outlive their task.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use event_loop::{Elapsed, EventLoop, JoinError, LoopConfig, take_turns};

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
    assert_eq!(other.block_on(handle).unwrap(), Err(JoinError::LoopGone));
    let late = event_loop.spawn(std::future::pending::<()>());
    assert_eq!(other.block_on(late).unwrap(), Err(JoinError::LoopGone));
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

/// Counts its drops.
struct Noted(Rc<Cell<u32>>);

impl Drop for Noted {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

#[test]
fn an_aborted_task_is_dropped_at_once_and_frees_its_slot() {
    let (event_loop, dropped) = (new_loop(), Rc::new(Cell::new(0)));
    for n in 1..=100 {
        let noted = Noted(dropped.clone());
        let task = event_loop.spawn(async move {
            std::future::pending::<()>().await;
            drop(noted);
        });
        // Before its first poll, and after.
        if n % 2 == 0 {
            event_loop.run_once(false).unwrap();
        }
        task.abort();
        task.abort();
        assert_eq!(dropped.get(), n, "not dropped at once");
        assert_eq!(event_loop.block_on(task).unwrap(), Err(JoinError::Aborted));
    }
    // The slots are used again by tasks that run.
    let tasks: Vec<_> = (0..4).map(|n| event_loop.spawn(async move { n })).collect();
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(event_loop.block_on(task).unwrap(), Ok(n));
    }
}

#[test]
fn a_task_that_has_ended_keeps_its_result_when_aborted() {
    let event_loop = new_loop();
    let task = event_loop.spawn(async { 7 });
    event_loop.run_once(false).unwrap();
    task.abort();
    let mut task = task;
    assert_eq!(event_loop.block_on(&mut task).unwrap(), Ok(7));
    assert_eq!(event_loop.block_on(task).unwrap(), Err(JoinError::Taken));
}

#[test]
fn a_task_that_aborts_itself_ends_at_its_next_wait() {
    let event_loop = new_loop();
    let own: Rc<RefCell<Option<event_loop::JoinHandle<()>>>> = Rc::default();
    let (handle, passed) = (own.clone(), Rc::new(Cell::new(0)));
    let passes = passed.clone();
    own.replace(Some(event_loop.spawn(async move {
        handle.borrow().as_ref().unwrap().abort();
        passes.set(1);
        take_turns().await;
        passes.set(2);
    })));
    event_loop.run_once(false).unwrap();
    let task = own.take().unwrap();
    assert_eq!(event_loop.block_on(task).unwrap(), Err(JoinError::Aborted));
    assert_eq!(passed.get(), 1);
}

#[test]
fn a_sleep_lasts_as_long_as_asked_from_its_call_on() {
    let event_loop = new_loop();
    let nap = Duration::from_millis(2);
    event_loop.run_once(false).unwrap();
    // Time that the loop does not see pass.
    std::thread::sleep(nap);
    let start = Instant::now();
    event_loop.block_on(event_loop.sleep(nap)).unwrap();
    assert!(start.elapsed() >= nap);
}

#[test]
fn a_timeout_drops_its_work_and_a_result_in_time_counts() {
    let (event_loop, dropped) = (new_loop(), Rc::new(Cell::new(0)));
    let noted = Noted(dropped.clone());
    let work = async move {
        std::future::pending::<()>().await;
        drop(noted);
    };
    let nothing = event_loop.timeout(Duration::from_millis(1), work);
    assert_eq!(event_loop.block_on(nothing).unwrap(), Err(Elapsed));
    assert_eq!(dropped.get(), 1);
    let error = std::io::Error::from(Elapsed);
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    for duration in [Duration::ZERO, Duration::MAX] {
        let in_time = event_loop.timeout(duration, async { 7 });
        assert_eq!(event_loop.block_on(in_time).unwrap(), Ok(7));
    }
}

#[test]
fn a_future_that_borrows_is_dropped_when_its_call_returns() {
    let (event_loop, dropped) = (new_loop(), Rc::new(Cell::new(0)));
    let mut log = Vec::new();
    let kept = Rc::new(RefCell::new(None));
    event_loop
        .block_on(async {
            log.push(1);
            event_loop.sleep(Duration::from_micros(100)).await;
            // Woken from a task, and from another thread.
            let (sender, receiver) = event_loop::oneshot::channel();
            event_loop.spawn(async move { sender.send(2) });
            log.push(receiver.await.unwrap());
            let (sender, receiver) = event_loop::oneshot::channel();
            std::thread::spawn(move || sender.send(3));
            log.push(receiver.await.unwrap());
        })
        .unwrap();
    assert_eq!(log, [1, 2, 3]);
    // A stop ends the call before the future. Its waker stays, and wakes nothing.
    let (borrowed, waker) = (Noted(dropped.clone()), kept.clone());
    let handle = event_loop.handle();
    let stopped = event_loop.block_on(async {
        let _borrowed = &borrowed;
        let _own = Noted(dropped.clone());
        handle.stop();
        poll_fn(|cx| {
            waker.replace(Some(cx.waker().clone()));
            Poll::<()>::Pending
        })
        .await;
    });
    assert!(stopped.is_err());
    assert_eq!(dropped.get(), 1);
    kept.take().unwrap().wake();
    event_loop.run_once(false).unwrap();
}

/// Within a callback of its loop, a call fails and drops its future.
#[test]
fn blocking_within_a_task_of_the_loop_fails() {
    let event_loop = new_loop();
    let on_loop = event_loop.clone();
    let kind = event_loop.block_on(async move {
        on_loop.block_on(std::future::pending::<()>()).map_err(|error| error.kind())
    });
    assert_eq!(kind.unwrap(), Err(std::io::ErrorKind::Deadlock));
}
