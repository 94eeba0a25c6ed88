//! The foreign-loop contract with Tokio: a loop as a task of a real runtime, alongside other tasks.

use crate::common;

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, mpsc};
use std::time::Duration;

use common::*;
use event_loop::sync::lock;
use event_loop::{
    AlignedBuf, Engine, EventLoop, IoOp, Progress, Readiness, RingChoice, RingFlags, Trigger,
    foreign,
};
use tokio::net::UnixDatagram;
use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinHandle, LocalSet, spawn_local};

/// The tests count descriptors, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    lock(&ALONE)
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs `body` in a new runtime, alongside the loop.
fn beside<F: Future<Output = ()>>(
    name: &str,
    event_loop: &EventLoop,
    body: impl FnOnce(JoinHandle<io::Result<()>>) -> F,
) {
    let _watchdog = Watchdog::new(name);
    let on_loop = event_loop.clone();
    LocalSet::new().block_on(&runtime(), async move {
        let running = spawn_local(async move { foreign::tokio::run(&on_loop).await });
        body(running).await;
    });
}

/// Lets other tasks run until `done`.
async fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        tokio::task::yield_now().await;
    }
}

/// Lets the loop's task fall asleep: no wake-up is pending, and it has no work.
async fn until_it_sleeps(event_loop: &EventLoop) {
    let iterations = || event_loop.stats().iterations.get();
    let mut before = u64::MAX;
    until(|| std::mem::replace(&mut before, iterations()) == iterations()).await;
}

/// Tokio's tasks submit the operations, while the loop's task waits for its descriptor.
#[test]
fn foreign_loop_file_reads_complete_with_nothing_else_waking_the_runtime() {
    let _alone = alone();
    for (name, event_loop) in embeddable_loops() {
        for (direct, engine) in ENGINES {
            let file = event_loop.register_file(big_file(direct));
            let on_loop = event_loop.clone();
            let started = event_loop.stats().iterations.get();
            beside(name, &event_loop, |_| async move {
                for _ in 0..20 {
                    let reads: Vec<_> = (0..16)
                        .map(|n| {
                            let bufs = AlignedBuf::io_bufs(65536, 4096).unwrap();
                            let read = IoOp::Read { offset: n * 65536 };
                            on_loop.operate(&file, read, engine, bufs)
                        })
                        .collect();
                    for read in reads {
                        assert_eq!(read.await.0.unwrap(), 65536);
                    }
                }
            });
            let turns = event_loop.stats().iterations.get() - started;
            assert!(
                turns < 20 * 16 * 6,
                "{name}, direct: {direct}, {engine:?}: {turns} iterations"
            );
        }
    }
}

/// More completions than an iteration takes, all present before the loop waits. The rest is not signalled
/// again.
#[test]
fn foreign_loop_completions_that_no_event_announces_are_seen() {
    let _alone = alone();
    for (name, event_loop) in embeddable_loops() {
        let file = event_loop.register_file(tempfile(&[7; 4096]));
        let (results, target) = Results::new();
        beside(name, &event_loop.clone(), |_| async move {
            for round in 1..=5 {
                for token in 0..2000 {
                    let bufs = AlignedBuf::io_bufs(4096, 4096).unwrap();
                    let read = IoOp::Read { offset: 0 };
                    event_loop.submit(&file, read, Engine::Uring, bufs, &target, token);
                }
                while results.len() < round * 2000 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        });
    }
}

/// More ready descriptors than one epoll_pwait2(2) returns.
#[test]
fn foreign_loop_events_that_no_event_announces_are_seen() {
    let _alone = alone();
    for (name, event_loop) in embeddable_loops() {
        let count = Count::new();
        let fds: Vec<_> = (0..700).map(|_| eventfd()).collect();
        for fd in &fds {
            event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        }
        let calls = count.clone();
        beside(name, &event_loop.clone(), |_| async move {
            for round in 1..=10 {
                until_it_sleeps(&event_loop).await;
                fds.iter().for_each(|fd| signal(fd));
                while calls.calls.get() < round * 700 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        });
    }
}

/// Tokio's tasks use the loop while its task waits.
#[test]
fn foreign_loop_other_tasks_can_use_a_waiting_loop() {
    let _alone = alone();
    for (name, event_loop) in embeddable_loops() {
        let on_loop = event_loop.clone();
        beside(name, &event_loop, |_| async move {
            let done = Rc::new(Cell::new(0));
            let tell = |n| {
                let done = done.clone();
                move || done.set(n)
            };
            for n in 1..=10 {
                until_it_sleeps(&on_loop).await;
                on_loop.add_timer(0, tell(10 * n));
                until(|| done.get() == 10 * n).await;

                until_it_sleeps(&on_loop).await;
                let call = tell(10 * n + 1);
                on_loop.spawn(async move { call() });
                until(|| done.get() == 10 * n + 1).await;

                until_it_sleeps(&on_loop).await;
                let (count, call) = (Count::new(), tell(10 * n + 2));
                count.then(move || {
                    call();
                    Progress::Done
                });
                let fd = eventfd();
                signal(&fd);
                let id = on_loop.add_handler(fd, 1, Trigger::Edge, count);
                until(|| done.get() == 10 * n + 2).await;

                until_it_sleeps(&on_loop).await;
                done.set(0);
                on_loop.call_again(id);
                until(|| done.get() == 10 * n + 2).await;
                on_loop.remove_handler(id);

                until_it_sleeps(&on_loop).await;
                let bottom_half = on_loop.bottom_half(tell(10 * n + 3));
                bottom_half.schedule();
                until(|| done.get() == 10 * n + 3).await;
                on_loop.delete_bottom_half(&bottom_half);

                // The loop's futures in a task of Tokio.
                let (reader, writer) = pipe();
                let readiness = Readiness::new(&on_loop, reader, 1);
                until_it_sleeps(&on_loop).await;
                nix::unistd::write(&writer, b"x").unwrap();
                readiness.wait().await;
            }
        });
    }
}

#[test]
fn wake_up_another_thread_wakes_a_runtime_that_sleeps_with_one_call() {
    let _alone = alone();
    for (name, event_loop) in embeddable_loops() {
        let me = nix::unistd::gettid();
        let (go, is_asleep) = mpsc::channel::<()>();
        let handle = event_loop.handle();
        let stats = event_loop.handle();
        std::thread::scope(|scope| {
            let (give, take) = mpsc::channel();
            scope.spawn(move || {
                for _ in 0..100 {
                    is_asleep.recv().unwrap();
                    let sender: event_loop::oneshot::Sender<()> = take.recv().unwrap();
                    spin_until(name, || sleeps_in_poll(me));
                    handle.spawn(move |_| sender.send(())).unwrap();
                }
            });
            let go = go;
            beside(name, &event_loop.clone(), |_| async move {
                for _ in 0..100 {
                    until_it_sleeps(&event_loop).await;
                    let wakes = stats.stats().wakes.get();
                    let (sender, receiver) = event_loop::oneshot::channel();
                    give.send(sender).unwrap();
                    go.send(()).unwrap();
                    receiver.await.unwrap();
                    // The other thread counts the wake-up after making it.
                    spin_until(name, || stats.stats().wakes.get() > wakes);
                    assert_eq!(stats.stats().wakes.get(), wakes + 1, "{name}");
                }
            });
        });
    }
}

#[test]
fn timers_are_never_early_and_wait_without_spinning() {
    let _alone = alone();
    for (name, event_loop) in embeddable_loops() {
        beside(name, &event_loop.clone(), |_| async move {
            for wait in [1, 999, 500_001, 1_000_000, 1_999_999, 3_000_001, 20_500_000] {
                until_it_sleeps(&event_loop).await;
                let iterations = event_loop.stats().iterations.get();
                let at = event_loop.now_ns() + wait;
                let (sender, receiver) = event_loop::oneshot::channel();
                let on_loop = event_loop.clone();
                event_loop.add_timer(at, move || sender.send(on_loop.now_ns()));
                let fired = receiver.await.unwrap();
                assert!(fired >= at, "{name}: {wait} ns: early");
                // What adding it wakes, what it wakes itself, and each of the two once for nothing.
                let iterations = event_loop.stats().iterations.get() - iterations;
                assert!(iterations <= 6, "{name}: {wait} ns: {iterations} iterations");
            }
        });
    }
}

#[test]
fn fairness_the_loop_and_tokios_own_tasks_take_turns() {
    let _alone = alone();
    for (name, event_loop) in embeddable_loops() {
        // Always ready: alone, it would keep the loop from ever waiting.
        let (count, fd) = (Count::new(), eventfd());
        count.then(|| Progress::More);
        event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        signal(&fd);
        beside(name, &event_loop, |_| async move {
            // A Tokio task that is always ready.
            let busy = spawn_local(async { until(|| false).await });
            let (here, there) = UnixDatagram::pair().unwrap();
            let echo = spawn_local(async move {
                let mut buf = [0; 8];
                while let Ok(len) = there.recv(&mut buf).await {
                    there.send(&buf[..len]).await.unwrap();
                }
            });
            for n in 0..200_u64 {
                let before = count.calls.get();
                here.send(&n.to_ne_bytes()).await.unwrap();
                let mut buf = [0; 8];
                here.recv(&mut buf).await.unwrap();
                assert_eq!(u64::from_ne_bytes(buf), n);
                until(|| count.calls.get() > before).await;
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
            busy.abort();
            echo.abort();
        });
    }
}

#[test]
fn two_loops_run_in_one_runtime() {
    let _alone = alone();
    for (name, first) in embeddable_loops() {
        let second = EventLoop::new(config(RingChoice::Ladder(RingFlags::BEST))).unwrap();
        let on_second = second.clone();
        beside(name, &first.clone(), |running| async move {
            let also = spawn_local(async move { foreign::tokio::run(&on_second).await });
            for n in 0..50 {
                let [here, there] = if n % 2 == 0 { [&first, &second] } else { [&second, &first] };
                let (sender, receiver) = event_loop::oneshot::channel();
                let send = move |_: &EventLoop| sender.send(n);
                let to = there.handle();
                here.spawn(async move { to.spawn(send).unwrap() });
                assert_eq!(receiver.await, Ok(n));
            }
            // One loop ends, the other continues.
            first.handle().stop();
            running.await.unwrap().unwrap();
            second.sleep_until(second.now_ns() + 1000).await;
            second.handle().stop();
            also.await.unwrap().unwrap();
        });
    }
}

#[test]
fn stop_ends_the_task_and_nothing_stays_behind() {
    let _alone = alone();
    let before = open_descriptors();
    for (name, event_loop) in embeddable_loops() {
        let (reader, _writer) = pipe();
        let reader = event_loop.register_file(reader);
        let stats = event_loop.handle();
        beside(name, &event_loop.clone(), |running| async move {
            if event_loop.has_io_uring() {
                // A read that never completes.
                let (bufs, read) =
                    (AlignedBuf::io_bufs(4096, 4096).unwrap(), IoOp::Read { offset: 0 });
                let read = event_loop.operate(&reader, read, Engine::Uring, bufs);
                event_loop.spawn(async move { drop(read.await) });
            }
            event_loop.add_handler(eventfd(), 1, Trigger::Level, Count::new());
            until_it_sleeps(&event_loop).await;
            let handle = event_loop.handle();
            let stopper = std::thread::spawn(move || handle.stop());
            running.await.unwrap().unwrap();
            // The handle holds a descriptor.
            stopper.join().unwrap();
            assert_eq!(event_loop.in_flight(), 0);
        });
        assert_eq!(stats.stats().submitted.get(), stats.stats().completed.get(), "{name}");
    }
    assert_eq!(open_descriptors(), before);
}

#[test]
fn a_dropped_task_leaves_its_loop_usable() {
    let _alone = alone();
    for (name, event_loop) in embeddable_loops() {
        let (fd, count) = (eventfd(), Count::new());
        event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        let seen = count.clone();
        let on_loop = event_loop.clone();
        let there = fd.clone();
        beside(name, &event_loop, |running| async move {
            signal(&there);
            until(|| seen.calls.get() == 1).await;
            until_it_sleeps(&on_loop).await;
            running.abort();
            assert!(running.await.unwrap_err().is_cancelled());
        });
        signal(&fd);
        turn_until(&event_loop, name, || count.calls.get() == 2);
        let seen = count.clone();
        beside(name, &event_loop, |_| async move {
            signal(&fd);
            until(|| seen.calls.get() == 3).await;
        });
    }
}

#[test]
fn a_loop_without_a_descriptor_is_an_error() {
    let _alone = alone();
    let deferring = EventLoop::new(config(RingChoice::Exactly(RingFlags::DEFERRING))).unwrap();
    let error = runtime().block_on(foreign::tokio::run(&deferring)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    let says = error.to_string();
    assert!(says.contains("DEFER_TASKRUN") && says.contains("RingFlags::BEST"), "{says}");
}
