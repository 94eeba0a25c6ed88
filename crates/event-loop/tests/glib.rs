//! The foreign-loop contract with GLib's main loop: a loop on a real `GMainContext`, with other sources on it.

use crate::common;

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, mpsc};
use std::time::Duration;

use common::*;
use event_loop::foreign::glib::LoopSource;
use event_loop::sync::lock;
use event_loop::{AlignedBuf, Engine, EventLoop, IoOp, Progress, RingChoice, RingFlags, Trigger};
use glib::{ControlFlow, IOCondition, MainContext, Priority};

/// Descriptors are counted: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

type Outcome = Rc<RefCell<Option<io::Result<()>>>>;

/// A loop on a context.
struct Attached {
    name: &'static str,
    event_loop: EventLoop,
    context: MainContext,
    source: LoopSource,
    ended: Outcome,
}

/// One on each ring that a descriptor shows.
fn attached() -> impl Iterator<Item = Attached> {
    embeddable_loops().map(|(name, event_loop)| {
        let context = MainContext::new();
        let (source, ended) = attach(&event_loop, &context, Priority::DEFAULT);
        Attached { name, event_loop, context, source, ended }
    })
}

fn attach(
    event_loop: &EventLoop,
    context: &MainContext,
    priority: Priority,
) -> (LoopSource, Outcome) {
    let ended = Outcome::default();
    let tell = ended.clone();
    let tell = move |result| assert!(tell.replace(Some(result)).is_none(), "ended twice");
    (LoopSource::attach(event_loop, context, priority, tell).unwrap(), ended)
}

/// Iterates until `done`; the iterations it took.
fn iterate_until(context: &MainContext, what: &str, mut done: impl FnMut() -> bool) -> u32 {
    let _watchdog = Watchdog::new(what);
    let mut iterations = 0;
    while !done() {
        context.iteration(true);
        iterations += 1;
    }
    iterations
}

fn alone() -> MutexGuard<'static, ()> {
    lock(&ALONE)
}

#[test]
fn foreign_loop_file_reads_complete_with_nothing_else_waking_the_context() {
    let _alone = alone();
    for Attached { name, event_loop, context, source: _source, .. } in attached() {
        for (direct, engine) in ENGINES {
            let file = event_loop.register_file(big_file(direct));
            let (results, target) = Results::new();
            let mut missed = 0;
            for batch in 1..=20 {
                for n in 0..16 {
                    let bufs = AlignedBuf::io_bufs(65536, 4096).unwrap();
                    let read = IoOp::Read { offset: n * 65536 };
                    event_loop.submit(&file, read, engine, bufs, &target, n as u32);
                }
                let _watchdog = Watchdog::new(name);
                while results.len() < batch * 16 {
                    missed += u32::from(!context.iteration(true));
                }
            }
            // What ends a wait is dispatched in the same iteration. A signal may end one, too.
            assert!(missed < 5, "{name}, direct: {direct}, {engine:?}: {missed} in vain");
            assert!(results.0.borrow().iter().all(|(_, result)| *result == 65536), "{name}");
        }
    }
}

/// What a handler of the context asks of the loop, and futures of the context's own.
#[test]
fn wake_up_other_sources_of_the_context_may_use_the_loop() {
    let _alone = alone();
    for Attached { name, event_loop, context, source: _source, .. } in attached() {
        let file = event_loop.register_file(tempfile(b"hello"));
        let done = Rc::new(Cell::new(false));
        let (flag, on_loop) = (done.clone(), event_loop.clone());
        context.spawn_local(async move {
            for _ in 0..10 {
                let bufs = AlignedBuf::io_bufs(5, 1).unwrap();
                let read = IoOp::Read { offset: 0 };
                let (n, bufs) = on_loop.operate(&file, read, Engine::Uring, bufs).await;
                let mut out = [0; 5];
                bufs.copy_out(0, &mut out);
                assert_eq!((n.unwrap(), &out), (5, b"hello"));
                on_loop.sleep_until(on_loop.now_ns() + 100_000).await;
            }
            flag.set(true);
        });
        iterate_until(&context, name, || done.get());
    }
}

#[test]
fn wake_up_another_thread_wakes_a_context_that_sleeps_with_one_call() {
    let _alone = alone();
    for Attached { name, event_loop, context, source: _source, .. } in attached() {
        let me = nix::unistd::gettid();
        let (go, is_asleep) = mpsc::channel::<()>();
        let (handle, stats) = (event_loop.handle(), event_loop.handle());
        let (done, is_done) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for n in 0..100 {
                    is_asleep.recv().unwrap();
                    spin_until(name, || sleeps_in_poll(me));
                    let done = done.clone();
                    handle.spawn(move |_| done.send(n).unwrap()).unwrap();
                }
            });
            let go = go;
            for n in 0..100 {
                let wakes = stats.stats().wakes.get();
                go.send(()).unwrap();
                iterate_until(&context, name, || is_done.try_recv() == Ok(n));
                // Counted by the other thread, after the fact.
                spin_until(name, || stats.stats().wakes.get() > wakes);
                assert_eq!(stats.stats().wakes.get(), wakes + 1, "{name}");
            }
        });
    }
}

#[test]
fn timers_are_never_early_and_wait_without_spinning() {
    let _alone = alone();
    for Attached { name, event_loop, context, source: _source, .. } in attached() {
        // The first iteration arms the loop's own wake-up.
        context.iteration(false);
        for wait in [1, 999, 500_001, 1_000_000, 1_999_999, 3_000_001, 20_500_000] {
            let at = event_loop.now_ns() + wait;
            let fired = Rc::new(Cell::new(0));
            let (flag, on_loop) = (fired.clone(), event_loop.clone());
            event_loop.add_timer(at, move || flag.set(on_loop.now_ns()));
            let iterations = iterate_until(&context, name, || fired.get() > 0);
            assert!(fired.get() >= at, "{name}: {wait} ns: early");
            assert!(iterations <= 3, "{name}: {wait} ns: {iterations} iterations");
        }
    }
}

#[test]
fn fairness_the_loop_and_the_contexts_own_sources_take_turns() {
    let _alone = alone();
    for Attached { name, event_loop, context, source: _source, .. } in attached() {
        // Never done: by itself, it would be ready in each iteration.
        let (ours, fd) = (Count::new(), eventfd());
        ours.then(|| Progress::More);
        signal(&fd);
        let id = event_loop.add_handler(fd, 1, Trigger::Edge, ours.clone());
        let timeouts = Rc::new(Cell::new(0));
        let idles = Rc::new(Cell::new(0));
        let fds = Rc::new(Cell::new(0));
        let (reader, writer) = pipe();
        let sources = [
            {
                let count = timeouts.clone();
                let call = counting(count);
                glib::source::timeout_source_new(
                    Duration::from_millis(1),
                    None,
                    Priority::DEFAULT,
                    call,
                )
            },
            {
                let call = counting(idles.clone());
                glib::source::idle_source_new(None, Priority::DEFAULT, call)
            },
            {
                let call = counting(fds.clone());
                let raw = reader.as_raw_fd();
                let (wanted, priority) = (IOCondition::IN, Priority::DEFAULT);
                glib::source::unix_fd_source_new(raw, wanted, None, priority, move |_, _| call())
            },
        ];
        for source in &sources {
            source.attach(Some(&context));
        }
        nix::unistd::write(&writer, b"x").unwrap();
        let counts = || [ours.calls.get(), idles.get(), fds.get()];
        iterate_until(&context, name, || {
            timeouts.get() >= 3 && counts().iter().all(|count| *count >= 200)
        });
        let [least, most] = [counts().into_iter().min(), counts().into_iter().max()];
        assert!(most <= least.map(|least| 2 * least), "{name}: {:?}", counts());
        event_loop.remove_handler(id);
        sources.iter().for_each(glib::Source::destroy);
    }
}

/// `MainContext::spawn_local` and GLib's sources want `Send`: this stays on its thread all the same.
fn counting(count: Rc<Cell<u32>>) -> impl Fn() -> ControlFlow + Send {
    let count = glib::thread_guard::ThreadGuard::new(count);
    move || {
        let count = count.get_ref();
        count.set(count.get() + 1);
        ControlFlow::Continue
    }
}

/// GLib leaves out the `check` of what has a lower priority than something that is ready.
#[test]
fn wake_up_nothing_is_lost_behind_a_busy_source_of_a_higher_priority() {
    let _alone = alone();
    for Attached { name, event_loop, context, source, .. } in attached() {
        drop(source);
        let (_source, _) = attach(&event_loop, &context, Priority::DEFAULT_IDLE);
        context.iteration(false);
        let (gate, opened) = pipe();
        let raw = gate.as_raw_fd();
        let (wanted, priority) = (IOCondition::IN, Priority::HIGH);
        let busy = glib::source::unix_fd_source_new(raw, wanted, None, priority, |_, _| {
            ControlFlow::Continue
        });
        busy.attach(Some(&context));
        for n in 1..=20 {
            let done = Rc::new(Cell::new(false));
            let flag = done.clone();
            let (sender, receiver) = event_loop::oneshot::channel();
            event_loop.spawn(async move {
                receiver.await.unwrap();
                flag.set(true);
            });
            // The task waits; the busy source has the context to itself.
            iterate_until(&context, name, || !context.pending());
            nix::unistd::write(&opened, b"x").unwrap();
            for _ in 0..n {
                context.iteration(true);
            }
            std::thread::spawn(move || sender.send(())).join().unwrap();
            for _ in 0..n {
                context.iteration(true);
            }
            assert!(!done.get(), "{name}: behind a higher priority");
            nix::unistd::read(&*gate, &mut [0]).unwrap();
            iterate_until(&context, name, || done.get());
        }
        busy.destroy();
    }
}

#[test]
fn a_main_loop_within_a_callback_turns_other_loops_but_not_the_callbacks_own() {
    let _alone = alone();
    for Attached { name, event_loop: outer, context, source: _outer_source, .. } in attached() {
        let inner = EventLoop::new(config(RingChoice::Ladder(RingFlags::BEST))).unwrap();
        let (_inner_source, _) = attach(&inner, &context, Priority::DEFAULT);
        let done = Rc::new(Cell::new(false));
        let (count, fd) = (Count::new(), eventfd());
        let (flag, nested, on_inner) = (done.clone(), context.clone(), inner.clone());
        let (again, calls) = (fd.clone(), Rc::downgrade(&count));
        count.then(move || {
            if calls.upgrade().unwrap().calls.get() > 1 {
                flag.set(true);
                return Progress::Done;
            }
            let fired = Rc::new(Cell::new(false));
            let tell = fired.clone();
            on_inner.add_timer(on_inner.now_ns() + 1_000_000, move || tell.set(true));
            // Ready anew, yet it is not for this nested loop to call us within ourselves.
            signal(&again);
            let iterations = iterate_until(&nested, "the nested loop", || fired.get());
            assert!(iterations < 10, "{iterations}: our descriptor keeps it from sleeping");
            assert_eq!(calls.upgrade().unwrap().calls.get(), 1);
            Progress::Done
        });
        outer.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        signal(&fd);
        iterate_until(&context, name, || done.get());
        assert_eq!(count.calls.get(), 2, "{name}");
    }
}

#[test]
fn stop_ends_the_source_and_nothing_stays_behind() {
    let _alone = alone();
    // What GLib itself sets up, it keeps.
    drop(attached().collect::<Vec<_>>());
    let before = open_descriptors();
    for Attached { name, event_loop, context, source, ended } in attached() {
        let (reader, writer) = pipe();
        let reader = event_loop.register_file(reader);
        if event_loop.has_io_uring() {
            // A read that never ends by itself.
            let bufs = AlignedBuf::io_bufs(4096, 4096).unwrap();
            let read = event_loop.operate(&reader, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
            event_loop.spawn(async move { drop(read.await) });
        }
        event_loop.add_handler(eventfd(), 1, Trigger::Level, Count::new());
        context.iteration(false);
        let handle = event_loop.handle();
        std::thread::spawn(move || handle.stop()).join().unwrap();
        iterate_until(&context, name, || ended.borrow().is_some());
        assert!(ended.take().is_some_and(|result| result.is_ok()), "{name}");
        assert!(source.source().is_destroyed(), "{name}");
        assert_eq!(event_loop.in_flight(), 0, "{name}");
        assert!(!context.iteration(false), "{name}");
        drop((reader, writer));
    }
    assert_eq!(open_descriptors(), before);
}

#[test]
fn a_dropped_source_leaves_its_loop_usable() {
    let _alone = alone();
    for Attached { name, event_loop, context, source, ended } in attached() {
        // By the loop's own callback, within its dispatch.
        let (fd, count) = (eventfd(), Count::new());
        let source = RefCell::new(Some(source));
        count.then(move || {
            drop(source.take());
            Progress::Done
        });
        event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        signal(&fd);
        iterate_until(&context, name, || count.calls.get() == 1);
        signal(&fd);
        assert!(!context.iteration(false), "{name}: the context has forgotten it");
        turn_until(&event_loop, name, || count.calls.get() == 2);
        assert!(ended.borrow().is_none(), "{name}: it has not ended");
        // And on to another context.
        let other = MainContext::new();
        let (_source, _) = attach(&event_loop, &other, Priority::DEFAULT);
        signal(&fd);
        iterate_until(&other, name, || count.calls.get() == 3);
    }
}

#[test]
fn failed_attachments_have_a_reason() {
    let _alone = alone();
    let context = MainContext::new();
    let refused = |event_loop: &EventLoop, context: &MainContext| {
        LoopSource::attach(event_loop, context, Priority::DEFAULT, |_| ()).err().unwrap()
    };
    let deferring = EventLoop::new(config(RingChoice::Exactly(RingFlags::DEFERRING))).unwrap();
    let error = refused(&deferring, &context);
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    let says = error.to_string();
    assert!(says.contains("DEFER_TASKRUN") && says.contains("RingFlags::BEST"), "{says}");

    let embedded = EventLoop::new(config(RingChoice::Ladder(RingFlags::BEST))).unwrap();
    let (owned, is_owned) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let there = context.clone();
        scope.spawn(move || {
            let _guard = there.acquire().unwrap();
            owned.send(()).unwrap();
            released.recv().unwrap();
        });
        is_owned.recv().unwrap();
        let error = refused(&embedded, &context);
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
        release.send(()).unwrap();
    });

    // One-thread contract: another thread that iterates the context later enters no ring of ours.
    let (_source, _) = attach(&embedded, &context, Priority::DEFAULT);
    let done = Rc::new(Cell::new(false));
    let flag = done.clone();
    embedded.spawn(async move { flag.set(true) });
    let iterations = embedded.stats().iterations.get();
    let there = context.clone();
    std::thread::spawn(move || (0..10).for_each(|_| _ = there.iteration(false))).join().unwrap();
    assert_eq!(embedded.stats().iterations.get(), iterations);
    iterate_until(&context, "the loop's own thread", || done.get());
}
