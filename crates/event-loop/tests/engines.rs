//! The engines behind one interface: the promises that io_uring, Linux AIO and the thread pool share, and
//! the particularities of each.

use crate::common;

use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::rc::Rc;
use std::sync::Arc;

use common::*;
use event_loop::counting::locks_taken;
use event_loop::{
    AlignedBuf, BlockingCall, DeferredCall, Engine, EventLoop, IoBufs, IoOp, IoTarget, IoThread,
    IoThreadConfig, LoopConfig, LoopFile, RingChoice, RingFlags, ThreadPoolConfig,
};

const ENGINES: [Engine; 3] = [Engine::Uring, Engine::Native, Engine::Threads];
const BLOCK: usize = 4096;

/// An unlinked file opened with `O_DIRECT`, with `blocks` blocks, each filled with its number.
fn direct_file(blocks: u32) -> Arc<OwnedFd> {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path =
        dir.join(format!("engines-{}-{:?}", std::process::id(), std::thread::current().id()));
    let content: Vec<u8> = (0..blocks).flat_map(|n| [n as u8; BLOCK]).collect();
    std::fs::write(&path, content).unwrap();
    let mut options = std::fs::File::options();
    let file = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    Arc::new(file.into())
}

fn block() -> IoBufs {
    AlignedBuf::io_bufs(BLOCK, BLOCK).unwrap()
}

fn read(n: u32) -> IoOp {
    IoOp::Read { offset: u64::from(n) * BLOCK as u64 }
}

/// Counts completions, and defers a call for each.
struct Device {
    event_loop: EventLoop,
    call: Rc<dyn DeferredCall>,
    completed: Cell<u32>,
}

impl IoTarget for Device {
    fn complete(&self, _token: u32, _result: i32, _bufs: IoBufs) {
        self.completed.set(self.completed.get() + 1);
        self.event_loop.defer(&self.call);
    }
}

#[derive(Default)]
struct Signal {
    queued: Cell<bool>,
    ran: Cell<u32>,
}

impl DeferredCall for Signal {
    fn run(&self) {
        self.ran.set(self.ran.get() + 1);
    }
    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}

/// Completions available when a turn begins are one batch, with every engine.
#[test]
fn completions_that_are_reaped_together_defer_once() {
    const READS: u32 = 32;
    for (name, ring) in rings() {
        for engine in ENGINES {
            let thread_pool = ThreadPoolConfig { min: 0, max: 1 };
            let event_loop = EventLoop::new(LoopConfig { thread_pool, ..config(ring) }).unwrap();
            let _watchdog = Watchdog::new(name);
            event_loop.run_once(false).unwrap();
            let signal = Rc::new(Signal::default());
            let device = Rc::new(Device {
                event_loop: event_loop.clone(),
                call: signal.clone(),
                completed: Cell::new(0),
            });
            let target: Rc<dyn IoTarget> = device.clone();
            // Reads from the page cache are done when io_uring_enter or io_submit returns.
            let fd = tempfile(&[1; BLOCK]);
            let file = event_loop.register_file(fd.clone());
            for token in 0..READS {
                event_loop.submit(&file, read(0), engine, block(), &target, token);
            }
            // The only pool thread answers in order: the reads before this.
            let len = 2 * BLOCK as u64;
            let grow = IoOp::Fallocate { mode: 0, offset: 0, len };
            event_loop.submit(&file, grow, Engine::Threads, IoBufs::new(), &target, READS);
            let wakes = event_loop.stats().wakes.get();
            event_loop.prepare().unwrap();
            let size = || nix::sys::stat::fstat(&*fd).unwrap().st_size;
            spin_until("the pool's thread", || size() == len as i64);
            assert_eq!(device.completed.get(), 0, "{name}, {engine:?}: within the submission");
            let wakes = event_loop.stats().wakes.get() - wakes;
            assert!(wakes <= 1, "{name}, {engine:?}: woken {wakes} times");
            assert!(event_loop.check(), "{name}, {engine:?}");
            event_loop.dispatch().unwrap();
            // On epoll the reads, and everywhere the last one, may be in a separate batch.
            let own = engine != Engine::Threads && (engine == Engine::Native || name != "epoll");
            let completed = device.completed.get();
            assert!(completed >= READS, "{name}, {engine:?}: {completed} at once");
            let batches = 1 + u32::from(own && completed > READS);
            assert_eq!(signal.ran.get(), batches, "{name}, {engine:?}: {completed} at once");
            turn_until(&event_loop, name, || device.completed.get() == READS + 1);
        }
    }
}

/// Depth 64 over a file of 32 blocks: reads return the file's contents, and each completes once (accounting contract).
#[test]
fn accounting_every_engine_reads_and_writes_and_counts() {
    struct Check {
        got: RefCell<Vec<Option<i32>>>,
        bufs: RefCell<Vec<IoBufs>>,
    }
    impl IoTarget for Check {
        fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
            let before = self.got.borrow_mut()[token as usize].replace(result);
            assert_eq!(before, None, "{token} came twice");
            let mut bytes = [0; BLOCK];
            bufs.copy_out(0, &mut bytes);
            assert_eq!(bytes, [(token % 32) as u8; BLOCK], "{token}");
            self.bufs.borrow_mut().push(bufs);
        }
    }
    for (name, event_loop) in loops() {
        for engine in ENGINES {
            let file = event_loop.register_file(direct_file(32));
            let check =
                Rc::new(Check { got: RefCell::new(vec![None; 64]), bufs: RefCell::default() });
            let target: Rc<dyn IoTarget> = check.clone();
            for token in 0..64 {
                let mut bufs = block();
                let offset = u64::from(token % 32) * BLOCK as u64;
                let op = if token % 2 == 0 {
                    bufs.copy_in(0, &[(token % 32) as u8; BLOCK]);
                    IoOp::Write { offset, dsync: token % 8 == 0 }
                } else {
                    IoOp::Read { offset }
                };
                event_loop.submit(&file, op, engine, bufs, &target, token);
            }
            let stats = event_loop.stats();
            let before = (stats.iterations.get(), stats.aio_submits.get());
            turn_until(&event_loop, name, || check.bufs.borrow().len() == 64);
            assert!(check.got.borrow().iter().all(|got| *got == Some(BLOCK as i32)));
            let submits = stats.aio_submits.get() - before.1;
            assert!(submits <= stats.iterations.get() - before.0);
            let (results, target) = Results::new();
            let sync = |data_only| IoOp::Fsync { data_only };
            for (token, data_only) in [(0, true), (1, false)] {
                event_loop.submit(&file, sync(data_only), engine, IoBufs::new(), &target, token);
            }
            let grow = IoOp::Fallocate { mode: 0, offset: 0, len: 64 * BLOCK as u64 };
            event_loop.submit(&file, grow, engine, IoBufs::new(), &target, 2);
            turn_until(&event_loop, name, || results.len() == 3);
            assert!(results.0.borrow().iter().all(|(_, result)| *result == 0), "{engine:?}");
            // The loop's wake-up poll, and the poll for Linux AIO.
            let polls = 1 + u64::from(engine != Engine::Uring);
            assert!(event_loop.in_flight() <= polls, "{name}, {engine:?}");
        }
        event_loop.shut_down().unwrap();
        assert_eq!(event_loop.in_flight(), 0, "{name}");
        let stats = event_loop.stats();
        assert_eq!(stats.submitted.get(), stats.completed.get(), "{name}");
    }
}

/// More operations than the context has room for, in batches of at most `entries`.
#[test]
fn accounting_native_operations_beyond_the_contexts_capacity_wait_for_room() {
    for (name, ring) in rings() {
        // From the page cache, more operations complete at once than a turn dispatches.
        for file in [direct_file(32), tempfile(&[1; 32 * BLOCK])] {
            let event_loop = EventLoop::new(LoopConfig { entries: 32, ..config(ring) }).unwrap();
            let file = event_loop.register_file(file);
            let (results, target) = Results::new();
            for token in 0..3000 {
                event_loop.submit(&file, read(token % 32), Engine::Native, block(), &target, token);
            }
            turn_until(&event_loop, name, || results.len() == 3000);
            assert!(results.0.borrow().iter().all(|(_, result)| *result == BLOCK as i32), "{name}");
            assert!(
                event_loop.stats().aio_submits.get() >= 3000 / 32,
                "{name}: batches have limits"
            );
        }
    }
}

/// io_submit stops at an operation that it refuses: that one fails, the others are submitted in order.
#[test]
fn accounting_a_refused_native_operation_fails_alone() {
    for (name, event_loop) in loops() {
        let file = event_loop.register_file(tempfile(&[1; BLOCK]));
        let write_only = std::fs::File::options().write(true).open("/dev/null").unwrap();
        let write_only = event_loop.register_file(Arc::new(write_only.into()));
        let (results, target) = Results::new();
        let submit = |file: &LoopFile, token| {
            event_loop.submit(file, read(0), Engine::Native, block(), &target, token);
        };
        submit(&write_only, 0);
        submit(&file, 1);
        submit(&file, 2);
        submit(&write_only, 3);
        submit(&file, 4);
        turn_until(&event_loop, name, || results.len() == 5);
        let mut results = results.0.borrow().clone();
        results.sort_unstable();
        let (good, bad) = (BLOCK as i32, -libc::EBADF);
        assert_eq!(results, [(0, bad), (1, good), (2, good), (3, bad), (4, good)], "{name}");
    }
}

/// /dev/zero cannot be synced by any engine. A regular file still can.
#[test]
fn the_thread_pool_does_syncs_that_linux_aio_refuses() {
    for (name, event_loop) in loops() {
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let zero = event_loop.register_file(Arc::new(zero.into()));
        let file = event_loop.register_file(tempfile(&[1; BLOCK]));
        let (results, target) = Results::new();
        let sync = IoOp::Fsync { data_only: true };
        for (token, file) in [(0, &zero), (1, &file)] {
            event_loop.submit(file, sync, Engine::Native, IoBufs::new(), &target, token);
            let native = event_loop.stats().aio_submits.get();
            turn_until(&event_loop, name, || results.len() == token as usize + 1);
            // Also for a file submitted after the refusal.
            assert!(event_loop.stats().aio_submits.get() > native, "{name}, {token}");
        }
        assert_eq!(*results.0.borrow(), [(0, -libc::EINVAL), (1, 0)], "{name}");
    }
}

#[test]
fn memory_native_memory_outlives_the_loop_while_in_flight() {
    for (name, ring) in rings() {
        for submitted in [false, true] {
            let event_loop = EventLoop::new(config(ring)).unwrap();
            let _watchdog = Watchdog::new(name);
            let file = event_loop.register_file(direct_file(32));
            let owners: Vec<_> = (0..32)
                .map(|n| {
                    let bufs = block();
                    let owner = bufs.owner().unwrap().clone();
                    drop(event_loop.operate(&file, read(n), Engine::Native, bufs));
                    owner
                })
                .collect();
            if submitted {
                event_loop.prepare().unwrap();
            }
            let alive = |owners: &[Rc<dyn event_loop::MemoryOwner>]| {
                owners.iter().filter(|owner| Rc::strong_count(owner) == 2).count()
            };
            assert_eq!(alive(&owners), 32, "{name}: the loop keeps them");
            drop((event_loop, file));
            assert_eq!(alive(&owners), 0, "{name}");
        }
    }
}

/// A callback's panic ends the I/O thread even if undispatched completions are left.
#[test]
fn a_panic_among_completions_ends_the_thread() {
    struct Panic;
    impl IoTarget for Panic {
        fn complete(&self, _token: u32, _result: i32, _bufs: IoBufs) {
            panic!("a test's");
        }
    }
    for (name, ring) in rings() {
        for engine in ENGINES {
            let event_loop = config(ring);
            let config = IoThreadConfig { event_loop, ..IoThreadConfig::default() };
            let thread = IoThread::spawn(config).unwrap();
            let _watchdog = Watchdog::new(name);
            let submit = move |event_loop: &EventLoop| {
                let file = event_loop.register_file(tempfile(&[1; BLOCK]));
                let target: Rc<dyn IoTarget> = Rc::new(Panic);
                for token in 0..4 {
                    event_loop.submit(&file, read(0), engine, block(), &target, token);
                }
            };
            thread.handle().spawn(submit).unwrap();
            let error = thread.stop().unwrap_err();
            assert_eq!(error.to_string(), "the I/O thread panicked", "{name}, {engine:?}");
        }
    }
}

/// Inside a foreign loop, the completion makes the descriptor readable (foreign-loop contract).
#[test]
fn foreign_loop_native_completions_wake_it() {
    for choice in [RingChoice::Ladder(RingFlags::BEST), RingChoice::Epoll] {
        let event_loop = EventLoop::new(config(choice)).unwrap();
        let file = event_loop.register_file(direct_file(1));
        let (results, target) = Results::new();
        for round in 1..=100 {
            event_loop.submit(&file, read(0), Engine::Native, block(), &target, 0);
            let _watchdog = Watchdog::new("a foreign loop");
            while results.len() < round {
                let timeout = event_loop.prepare().unwrap();
                assert!(timeout.is_none_or(|ns| ns == 0));
                let fd = event_loop.pollable_fd().unwrap();
                let flags = nix::poll::PollFlags::POLLIN;
                let mut fds = [nix::poll::PollFd::new(fd.as_fd(), flags)];
                let timeout = match timeout {
                    Some(_) => nix::poll::PollTimeout::ZERO,
                    None => nix::poll::PollTimeout::NONE,
                };
                nix::poll::poll(&mut fds, timeout).unwrap();
                if event_loop.check() {
                    event_loop.dispatch().unwrap();
                }
            }
        }
    }
}

/// All pool jobs of an iteration take the pool's lock once.
#[test]
fn jobs_of_an_iteration_take_one_lock() {
    // All threads exist from the beginning, as starting one takes the lock again.
    let thread_pool = ThreadPoolConfig { min: 4, max: 4 };
    let config = LoopConfig { thread_pool, ..config(RingChoice::default()) };
    let event_loop = EventLoop::new(config).unwrap();
    let file = event_loop.register_file(tempfile(&[1; BLOCK]));
    let (results, target) = Results::new();
    for _ in 0..10 {
        let done = results.len() + 64;
        for token in 0..64 {
            event_loop.submit(&file, read(0), Engine::Threads, block(), &target, token);
        }
        let before = locks_taken();
        event_loop.prepare().unwrap();
        assert_eq!(locks_taken() - before, 1, "the pool's");
        turn_until(&event_loop, "the pool", || results.len() == done);
    }
}

/// Linux AIO missing or exhausted: an error that names the call.
#[test]
fn missing_linux_aio_is_an_error() {
    for errno in [libc::ENOSYS, libc::EAGAIN] {
        denied(&[libc::SYS_io_setup], errno, || {
            let event_loop = EventLoop::new(config(RingChoice::default())).unwrap();
            let error = event_loop.set_up_linux_aio().unwrap_err();
            assert_eq!((error.call, error.error.raw_os_error()), ("io_setup", Some(errno)));
            let file = event_loop.register_file(tempfile(&[1; BLOCK]));
            let (results, target) = Results::new();
            event_loop.submit(&file, read(0), Engine::Native, block(), &target, 7);
            turn_until(&event_loop, "the refusal", || results.len() == 1);
            assert_eq!(*results.0.borrow(), [(7, -errno)]);
        });
    }
}

/// A pool thread survives a panic: the operation fails, a call has no result, and later jobs and the end wait for nobody.
#[test]
fn an_operation_that_panics_on_the_pool_fails() {
    static PANICS: BlockingCall =
        BlockingCall { name: c"panics", run: |_, _, _, _| panic!("as the test wants") };
    let thread_pool = ThreadPoolConfig { min: 0, max: 1 };
    let config = LoopConfig { thread_pool, ..config(RingChoice::default()) };
    let event_loop = EventLoop::new(config).unwrap();
    let _watchdog = Watchdog::new("panics");
    let file = event_loop.register_file(tempfile(&[1; BLOCK]));
    let run = |op| {
        let operation = event_loop.operate(&file, op, Engine::Threads, IoBufs::new());
        raw(event_loop.block_on(operation).unwrap().0)
    };
    let panics = IoOp::Call { call: &PANICS, offset: 0, len: 1 };
    assert_eq!([run(panics), run(panics)], [-libc::EIO; 2]);
    let call = event_loop.offload::<u8>(|| panic!("as the test wants"));
    assert!(event_loop.block_on(call).unwrap().is_err());
    assert_eq!(run(IoOp::Fsync { data_only: true }), 0);
    event_loop.shut_down().unwrap();
}
