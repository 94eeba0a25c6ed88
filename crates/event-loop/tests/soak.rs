//! A soak test. Several threads create and drop loops, start and stop I/O threads, add and remove handlers,
//! start and retire pool threads, and run timers, until the time is up. Descriptors, threads and memory are
//! then as before (stop contract).
//!
//! Runs for some seconds by default. For a long run:
//! `EVENT_LOOP_SOAK=3600 cargo test --release -p ringmill-event-loop --test soak -- --nocapture`

#[allow(dead_code, reason = "uses a part")]
mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::*;
use event_loop::{
    AlignedBuf, Engine, EventLoop, IoOp, IoTarget, IoThread, IoThreadConfig, LoopConfig,
    PollParams, RingChoice, ThreadPoolConfig, Trigger, oneshot,
};

/// Bytes allocated and not freed.
static LIVE: AtomicIsize = AtomicIsize::new(0);

struct Counted;

// SAFETY: everything is passed on to the system's allocator; the counter itself allocates nothing.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size().cast_signed(), Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size().cast_signed(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

fn entries(of: &str) -> usize {
    std::fs::read_dir(of).unwrap().count()
}

/// Number of descriptors, threads, bytes.
fn held() -> (usize, usize, isize) {
    (entries("/proc/self/fd"), entries("/proc/self/task"), LIVE.load(Relaxed))
}

fn configs() -> impl Iterator<Item = LoopConfig> {
    let thread_pool = ThreadPoolConfig { min: 1, max: 4 };
    let polls = [NO_POLLING, PollParams::default()];
    let configs = rings().into_iter().flat_map(move |(_, ring)| {
        polls.map(|poll| LoopConfig { ring, poll, thread_pool, ..LoopConfig::default() })
    });
    configs.cycle()
}

/// A loop on this thread with work of every kind, run to the end or dropped half-way.
fn one_loop(config: LoopConfig, round: u64) {
    let event_loop = EventLoop::new(config).unwrap();
    let file = event_loop.register_file(tempfile(&[7; 4096]));
    let (results, target) = Results::new();
    let mut handlers = Vec::new();
    for token in 0..16 {
        let engine = if token % 2 == 0 { Engine::Uring } else { Engine::Threads };
        let bufs = AlignedBuf::io_bufs(512, 512).unwrap();
        event_loop.submit(&file, IoOp::Read { offset: 0 }, engine, bufs, &target, token);
        let (fd, trigger) = (eventfd(), [Trigger::Edge, Trigger::Level][token as usize / 2 % 2]);
        let handler = Count::new();
        handlers.push((event_loop.add_handler(fd.clone(), 1, trigger, handler), fd));
        event_loop.add_timer(event_loop.now_ns() + u64::from(token) * 10_000, || {});
        event_loop.cancel_timer(event_loop.add_timer(u64::MAX, || {}));
    }
    for (id, fd) in handlers.drain(..8) {
        signal(&fd);
        event_loop.run_once(false).unwrap();
        event_loop.remove_handler(id);
    }
    if round.is_multiple_of(4) {
        // Dropped with everything in flight.
        return;
    }
    let on_loop = event_loop.clone();
    let nap = async move { on_loop.sleep_until(on_loop.now_ns() + 100_000).await };
    event_loop.block_on(nap).unwrap();
    turn_until(&event_loop, "the soak's reads", || results.len() == 16);
    assert!(results.0.borrow().iter().all(|(_, result)| *result == 512));
    event_loop.handle().stop();
    event_loop.run().unwrap();
}

/// An I/O thread with work from here, stopped or dropped with some of it in flight.
fn one_thread(event_loop: LoopConfig, round: u64) {
    let config = IoThreadConfig { event_loop, ..IoThreadConfig::default() };
    let thread = IoThread::spawn(config).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let work = move |event_loop: &EventLoop| {
        let bottom_half = event_loop.bottom_half(move || _ = sender.send(()));
        let fd = eventfd();
        event_loop.add_handler(fd, 1, Trigger::Edge, Count::new());
        let (tell, told) = oneshot::channel();
        let on_loop = event_loop.clone();
        event_loop.spawn(async move {
            on_loop.sleep_until(on_loop.now_ns() + 50_000).await;
            tell.send(());
        });
        event_loop.spawn(async move {
            told.await.unwrap();
            bottom_half.schedule();
        });
        // Work whose result is not awaited.
        let (reader, _writer) = pipe();
        let reader = event_loop.register_file(reader);
        let target: Rc<dyn IoTarget> = Rc::new(Results::default());
        if event_loop.has_io_uring() {
            let bufs = AlignedBuf::io_bufs(64, 64).unwrap();
            event_loop.submit(&reader, IoOp::Read { offset: 0 }, Engine::Uring, bufs, &target, 0);
        }
        event_loop.add_timer(u64::MAX, || {});
    };
    thread.handle().spawn(work).unwrap();
    if !round.is_multiple_of(3) {
        receiver.recv_timeout(LOST).unwrap();
    }
    if round.is_multiple_of(2) {
        thread.stop().unwrap();
    }
}

fn soak(length: Duration) -> u64 {
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for start in 0..3 {
            let (stop, rounds) = (&stop, &rounds);
            scope.spawn(move || {
                for (config, round) in configs().skip(start).zip(0..) {
                    one_loop(config.clone(), round);
                    one_thread(config, round);
                    rounds.fetch_add(1, Relaxed);
                    if stop.load(Relaxed) {
                        return;
                    }
                }
            });
        }
        let began = Instant::now();
        while began.elapsed() < length {
            std::thread::sleep((length - began.elapsed()).min(Duration::from_secs(60)));
            say(format_args!("{:?}: {} rounds", began.elapsed(), rounds.load(Relaxed)));
        }
        stop.store(true, Relaxed);
    });
    rounds.load(Relaxed)
}

/// Lets pool threads beyond the minimum retire after ten seconds without work, and starts them again.
fn retire_pool_threads() {
    let thread_pool = ThreadPoolConfig { min: 1, max: 4 };
    let config = LoopConfig { thread_pool, ..config(RingChoice::Epoll) };
    let event_loop = EventLoop::new(config).unwrap();
    let before = entries("/proc/self/task");
    let file = event_loop.register_file(tempfile(&[7; 512]));
    let work = || {
        let (results, target) = Results::new();
        for token in 0..64 {
            let bufs = AlignedBuf::io_bufs(512, 512).unwrap();
            event_loop.submit(
                &file,
                IoOp::Read { offset: 0 },
                Engine::Threads,
                bufs,
                &target,
                token,
            );
        }
        turn_until(&event_loop, "the pool's reads", || results.len() == 64);
    };
    work();
    let began = Instant::now();
    while entries("/proc/self/task") > before + 1 {
        assert!(began.elapsed() < 3 * LOST, "LOST: retirement");
        std::thread::sleep(Duration::from_millis(10));
    }
    work();
}

/// Prints a line. `println` would allocate its captured output, which counts as a leak.
fn say(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[test]
fn stop_a_soak_ends_as_it_began() {
    let seconds = std::env::var("EVENT_LOOP_SOAK").map_or(4, |text| text.parse().unwrap());
    // Initialises lazy state of the standard library, and of each thread.
    let threads = entries("/proc/self/task");
    soak(Duration::ZERO);
    spin_until("the threads' end", || entries("/proc/self/task") == threads);
    let ended = |before: (usize, usize, isize)| {
        // A joined thread leaves the list, and frees its last bytes, with a delay.
        spin_until("fds, threads and memory back to where they were", || {
            let now = held();
            now.0 <= before.0 && now.1 <= before.1 && now.2 <= before.2
        });
    };
    let before = held();
    let rounds = soak(Duration::from_secs(seconds));
    say(format_args!("(fds, threads, bytes): {before:?}, after {rounds} rounds {:?}", held()));
    ended(before);
    assert!(rounds >= 3);
    retire_pool_threads();
    ended(before);
}
