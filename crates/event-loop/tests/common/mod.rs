//! Helpers for the contract tests.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use event_loop::ring::sim::{Faults, Sim};
use event_loop::{
    Engine, EventLoop, Handler, IoBufs, IoTarget, IoThread, LoopConfig, PollParams, Progress,
    RingChoice, RingFlags,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// Converts a result to the kernel's form: a count or a negated errno.
pub(crate) fn raw(result: std::io::Result<usize>) -> i32 {
    match result {
        Ok(count) => count as i32,
        Err(error) => -error.raw_os_error().expect("an errno"),
    }
}

/// Time limit of a wait, after which a test fails.
pub(crate) const LOST: Duration = Duration::from_secs(if cfg!(miri) { 600 } else { 60 });

/// Polling off: an idle loop sleeps.
pub(crate) const NO_POLLING: PollParams = PollParams::OFF;

/// Every kind of ring, with its name.
pub(crate) fn rings() -> [(&'static str, RingChoice); 4] {
    [
        ("DEFER_TASKRUN", RingChoice::Exactly(RingFlags::DEFERRING)),
        ("COOP_TASKRUN", RingChoice::Exactly(RingFlags::BEST)),
        ("no flags", RingChoice::Exactly(RingFlags::PLAIN)),
        ("epoll", RingChoice::Epoll),
    ]
}

pub(crate) fn config(ring: RingChoice) -> LoopConfig {
    LoopConfig { ring, poll: NO_POLLING, ..LoopConfig::default() }
}

/// A loop on each ring, without polling.
pub(crate) fn loops() -> impl Iterator<Item = (&'static str, EventLoop)> {
    rings().into_iter().map(|(name, ring)| (name, EventLoop::new(config(ring)).unwrap()))
}

/// Those loops that have a pollable descriptor.
pub(crate) fn embeddable_loops() -> impl Iterator<Item = (&'static str, EventLoop)> {
    loops().filter(|(_, event_loop)| event_loop.pollable_fd().is_some())
}

/// A loop in a simulation, without polling.
pub(crate) fn simulated(seed: u64, faults: Faults) -> (Sim, EventLoop) {
    let sim = Sim::new(seed, faults);
    let config = LoopConfig { poll: NO_POLLING, ..LoopConfig::default() };
    let event_loop = sim.event_loop(config).unwrap();
    (sim, event_loop)
}

/// Runs the loop until `done`; panics after too long. A loop that sleeps without a wake-up hangs until the
/// watchdog ends the test.
pub(crate) fn turn_until(event_loop: &EventLoop, what: &str, mut done: impl FnMut() -> bool) {
    let _watchdog = Watchdog::new(what);
    while !done() {
        event_loop.run_once(true).unwrap();
    }
}

/// Stops a thread that gets no more messages, and checks that it was woken at most once per sleep or
/// announced sleep. Counted after its end, as a wake-up may come before the loop has counted the sleep.
pub(crate) fn stop_and_count_wakes(thread: IoThread) {
    let handle = thread.handle().clone();
    thread.stop().unwrap();
    let stats = handle.stats();
    let (wakes, sleeps) = (stats.wakes.get(), stats.sleeps.get());
    let called_off = stats.sleeps_called_off.get();
    assert!(wakes <= sleeps + called_off, "{wakes} wake-ups for {sleeps} + {called_off} sleeps");
}

/// Whether a thread sleeps in poll(2) or epoll_wait(2).
pub(crate) fn sleeps_in_poll(thread: nix::unistd::Pid) -> bool {
    let wchan = std::fs::read_to_string(format!("/proc/self/task/{thread}/wchan")).unwrap();
    wchan.contains("poll")
}

/// Number of the process's open descriptors.
pub(crate) fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Ends the process with a message when a test hangs.
pub(crate) struct Watchdog {
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(crate) fn new(what: &str) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let (flag, what) = (done.clone(), what.to_owned());
        let deadline = Instant::now() + LOST;
        let thread = std::thread::spawn(move || {
            while !flag.load(Ordering::Acquire) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    let _ = writeln!(std::io::stderr(), "LOST: {what}");
                    std::process::abort();
                }
                std::thread::park_timeout(left);
            }
        });
        Watchdog { done, thread: Some(thread) }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Waits for an effect of another thread or the kernel that has no event: spins, with a limit.
pub(crate) fn spin_until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < LOST, "LOST: {what}");
        std::thread::yield_now();
    }
}

/// Runs `test` on a thread where these system calls fail with `errno`.
pub(crate) fn denied<R: Send>(
    calls: &[nix::libc::c_long],
    errno: i32,
    test: impl FnOnce() -> R + Send,
) -> R {
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            deny(calls, errno);
            test()
        });
        thread.join().unwrap()
    })
}

/// Makes these system calls of this thread fail with `errno` from now on.
pub(crate) fn deny(calls: &[nix::libc::c_long], errno: i32) {
    let rules = calls.iter().map(|call| (*call, Vec::new())).collect::<BTreeMap<_, _>>();
    let deny = SeccompAction::Errno(errno as u32);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, deny, arch).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&filter).unwrap();
}

/// An unlinked file with this content.
pub(crate) fn tempfile(content: &[u8]) -> Arc<OwnedFd> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name =
        format!("event-loop-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let options = std::fs::File::options().read(true).write(true).create_new(true).clone();
    let mut file = options.open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.write_all(content).unwrap();
    Arc::new(file.into())
}

/// Variants of reading [`big_file`]: with `O_DIRECT` or without, and the engine.
pub(crate) const ENGINES: [(bool, Engine); 5] = [
    (false, Engine::Uring),
    (true, Engine::Uring),
    (true, Engine::Native),
    (false, Engine::Threads),
    (true, Engine::Threads),
];

/// A file of 1 MiB, read from the page cache (completed at submission) or from the disk (completed later by
/// task work).
pub(crate) fn big_file(direct: bool) -> Arc<OwnedFd> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let fd = tempfile(&vec![7; 1 << 20]);
    if direct {
        nix::unistd::fsync(&*fd).unwrap();
        fcntl(&*fd, FcntlArg::F_SETFL(OFlag::O_DIRECT)).unwrap();
    }
    fd
}

pub(crate) fn eventfd() -> Arc<OwnedFd> {
    let flags = nix::sys::eventfd::EfdFlags::EFD_NONBLOCK;
    Arc::new(nix::sys::eventfd::EventFd::from_flags(flags).unwrap().into())
}

pub(crate) fn signal(eventfd: &OwnedFd) {
    nix::unistd::write(eventfd, &1u64.to_ne_bytes()).unwrap();
}

/// A pipe: its read end and its write end.
pub(crate) fn pipe() -> (Arc<OwnedFd>, OwnedFd) {
    let (read, write) = nix::unistd::pipe().unwrap();
    (Arc::new(read), write)
}

/// A handler that counts its calls and then runs a closure.
pub(crate) struct Count {
    pub(crate) calls: Cell<u32>,
    pub(crate) events: Cell<u32>,
    pub(crate) then: RefCell<Option<Box<dyn Fn() -> Progress>>>,
}

impl Count {
    pub(crate) fn new() -> Rc<Self> {
        Rc::new(Count { calls: Cell::new(0), events: Cell::new(0), then: RefCell::new(None) })
    }

    pub(crate) fn then(&self, then: impl Fn() -> Progress + 'static) {
        *self.then.borrow_mut() = Some(Box::new(then));
    }
}

impl Handler for Count {
    fn ready(&self, events: u32) -> Progress {
        self.calls.set(self.calls.get() + 1);
        self.events.set(self.events.get() | events);
        match &*self.then.borrow() {
            Some(then) => then(),
            None => Progress::Done,
        }
    }
}

/// A target that stores its results as (token, result).
#[derive(Default)]
pub(crate) struct Results(pub RefCell<Vec<(u32, i32)>>);

impl Results {
    pub(crate) fn new() -> (Rc<Self>, Rc<dyn IoTarget>) {
        let results = Rc::new(Results::default());
        let target = results.clone() as Rc<dyn IoTarget>;
        (results, target)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.borrow().len()
    }
}

impl IoTarget for Results {
    fn complete(&self, token: u32, result: i32, _bufs: IoBufs) {
        self.0.borrow_mut().push((token, result));
    }
}
