//! Creation contract: a loop is created on its thread, or the thread ends with an error. Set-up contract: the
//! ladder of rings, down to epoll.
//!
//! Seccomp filters are put on threads of the test, never on the whole program.

use crate::common;

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use common::*;
use event_loop::sync::lock;
use event_loop::{
    AlignedBuf, Engine, EventLoop, IoOp, IoThread, IoThreadConfig, LoopConfig, RingChoice,
    RingFlags, Scheduling, SpawnError, ThreadEnd, ThreadPoolConfig, Trigger,
};

/// The tests count threads, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter(|task| {
            let comm = std::fs::read_to_string(task.as_ref().unwrap().path().join("comm"));
            comm.is_ok_and(|comm| comm.trim() == name)
        })
        .count()
}

fn born(name: &str, ring: RingChoice, cpus: Vec<usize>) -> Result<IoThread, SpawnError> {
    let event_loop = LoopConfig { name: name.into(), ring, ..LoopConfig::default() };
    IoThread::spawn(IoThreadConfig { event_loop, cpus, scheduling: None })
}

#[test]
fn creation_a_failed_loop_is_an_error_and_leaves_no_thread() {
    let _alone = lock(&ALONE);
    let best = RingChoice::Exactly(RingFlags::BEST);
    for errno in [libc::ENOMEM, libc::EPERM] {
        let error = denied(&[libc::SYS_io_uring_setup], errno, || {
            born("stillborn", best, vec![]).err().unwrap()
        });
        let SpawnError::Loop(setup) = &error else { panic!("{error}") };
        assert_eq!((setup.call, setup.error.raw_os_error()), ("io_uring_setup", Some(errno)));
        let text = error.to_string();
        let why = std::io::Error::from_raw_os_error(errno).to_string();
        assert!(text.contains("io_uring_setup") && text.contains(&why), "{text}");
        // The joined thread leaves the list with a delay.
        spin_until("the thread's end", || threads_named("stillborn") == 0);
    }
    let error = denied(&[libc::SYS_eventfd2], libc::EMFILE, || {
        born("stillborn", RingChoice::Epoll, vec![]).err().unwrap()
    });
    assert!(error.to_string().contains("eventfd"), "{error}");
    let error = denied(&[libc::SYS_epoll_create1], libc::EMFILE, || {
        born("stillborn", RingChoice::Epoll, vec![]).err().unwrap()
    });
    assert!(error.to_string().contains("epoll_create1"), "{error}");
    spin_until("the thread's end", || threads_named("stillborn") == 0);
}

fn scheduled(scheduling: Scheduling) -> Result<IoThread, SpawnError> {
    let event_loop =
        LoopConfig { name: "scheduled".into(), ring: RingChoice::Epoll, ..LoopConfig::default() };
    let scheduling = Some(scheduling);
    IoThread::spawn(IoThreadConfig { event_loop, cpus: vec![], scheduling })
}

/// Class, real-time priority and niceness of the calling thread, proc_pid_stat(5).
fn current_scheduling() -> [i32; 3] {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    // The third field follows the name, which may contain any characters.
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    [41, 40, 19].map(|field: usize| fields[field - 3].parse().unwrap())
}

#[test]
fn creation_scheduling_comes_from_the_options() {
    let _alone = lock(&ALONE);
    let real_time = [
        (Scheduling::Fifo { priority: 3 }, [libc::SCHED_FIFO, 3, 0]),
        (Scheduling::RoundRobin { priority: 99 }, [libc::SCHED_RR, 99, 0]),
    ];
    let for_all = [
        (Scheduling::Other { nice: 7 }, [libc::SCHED_OTHER, 0, 7]),
        (Scheduling::Batch { nice: 19 }, [libc::SCHED_BATCH, 0, 19]),
        (Scheduling::Idle, [libc::SCHED_IDLE, 0, current_scheduling()[2]]),
    ];
    for (scheduling, [class, priority, nice]) in real_time.into_iter().chain(for_all) {
        let thread = match scheduled(scheduling) {
            Ok(thread) => thread,
            // Without privileges it is refused.
            Err(SpawnError::Scheduling { call: "sched_setscheduler", error })
                if priority > 0 && error.raw_os_error() == Some(libc::EPERM) =>
            {
                continue;
            }
            Err(error) => panic!("{scheduling:?}: {error}"),
        };
        let (sender, receiver) = std::sync::mpsc::channel();
        thread.handle().spawn(move |_| sender.send(current_scheduling()).unwrap()).unwrap();
        let found = receiver.recv_timeout(LOST).unwrap();
        assert_eq!(found[..2], [class, priority], "{scheduling:?}");
        assert!(priority > 0 || found[2] == nice, "{scheduling:?}: {found:?}");
        thread.stop().unwrap();
    }
}

#[test]
fn creation_failed_scheduling_is_an_error_and_leaves_no_thread() {
    let _alone = lock(&ALONE);
    for (scheduling, name, number) in [
        (Scheduling::Fifo { priority: 0 }, "sched_setscheduler", libc::SYS_sched_setscheduler),
        (Scheduling::RoundRobin { priority: 100 }, "sched_setscheduler", 0),
        (Scheduling::Other { nice: 20 }, "setpriority", libc::SYS_setpriority),
        (Scheduling::Batch { nice: -21 }, "setpriority", 0),
    ] {
        let fails = |scheduling, errno| {
            let error = scheduled(scheduling).err().unwrap();
            let SpawnError::Scheduling { call, error: why } = &error else { panic!("{error}") };
            assert_eq!((*call, why.raw_os_error()), (name, Some(errno)));
            assert!(error.to_string().starts_with(&format!("{name} failed: ")), "{error}");
        };
        fails(scheduling, libc::EINVAL);
        if number != 0 {
            let valid = Scheduling::Other { nice: 19 };
            denied(&[number], libc::EPERM, || fails(valid, libc::EPERM));
        }
    }
    spin_until("the thread's end", || threads_named("scheduled") == 0);
}

#[test]
fn creation_name_and_cpus_come_from_the_options() {
    let _alone = lock(&ALONE);
    for cpu in [libc::CPU_SETSIZE as usize, 1_000_000, 1023] {
        let error = born("nowhere", RingChoice::Epoll, vec![cpu]).err().unwrap();
        assert!(matches!(&error, SpawnError::Affinity(_)), "{error}");
        assert!(error.to_string().contains("sched_setaffinity"), "{error}");
    }
    spin_until("the thread's end", || threads_named("nowhere") == 0);
    let thread = born("on-cpu-0", RingChoice::default(), vec![0]).unwrap();
    assert_eq!(threads_named("on-cpu-0"), 1);
    let (sender, receiver) = std::sync::mpsc::channel();
    let ask = move |_: &EventLoop| {
        let set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
        let cpus: Vec<usize> = (0..64).filter(|cpu| set.is_set(*cpu).unwrap()).collect();
        sender.send(cpus).unwrap();
    };
    thread.handle().spawn(ask).unwrap();
    assert_eq!(receiver.recv_timeout(LOST).unwrap(), [0]);
    thread.stop().unwrap();
}

/// Checks what a loop must do on any ring.
fn works(event_loop: &EventLoop) {
    let file = event_loop.register_file(tempfile(b"hello"));
    let on_loop = event_loop.clone();
    let read = async move {
        let bufs = AlignedBuf::io_bufs(5, 1).unwrap();
        on_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs).await.0
    };
    assert_eq!(event_loop.block_on(read).unwrap().unwrap(), 5);
    let (fd, count) = (eventfd(), Count::new());
    event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
    signal(&fd);
    turn_until(event_loop, "an event", || count.calls.get() == 1);
    let at = event_loop.now_ns() + 100_000;
    event_loop.block_on(event_loop.sleep_until(at)).unwrap();
    assert!(event_loop.now_ns() >= at);
}

#[test]
fn set_up_where_io_uring_is_denied_the_loop_runs_on_epoll_and_says_why() {
    let _alone = lock(&ALONE);
    let errnos = [libc::EPERM, libc::ENOSYS, libc::EACCES];
    // Creating rings may be permitted and entering them denied.
    let calls = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter];
    for (errno, call) in errnos.into_iter().flat_map(|errno| calls.map(|call| (errno, call))) {
        denied(&[call], errno, || {
            let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
            assert_eq!(event_loop.ring().flags, None);
            assert_eq!(event_loop.ring().refused, [(RingFlags::BEST, errno)]);
            let text = event_loop.ring().to_string();
            let why = std::io::Error::from_raw_os_error(errno).to_string();
            assert!(text.contains("epoll") && text.contains(&why), "{text}");
            works(&event_loop);
        });
    }
}

/// Under a filter that permits rings but no registration, the ring works without restrictions and table of
/// files.
#[test]
fn set_up_where_nothing_can_be_registered_the_ring_goes_unrestricted() {
    let _alone = lock(&ALONE);
    for errno in [nix::libc::EPERM, nix::libc::ENOSYS, nix::libc::ENOMEM] {
        denied(&[nix::libc::SYS_io_uring_register], errno, || {
            let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
            let Some(flags) = event_loop.ring().flags else { panic!("epoll") };
            let refused = RingFlags { restricted: true, ..flags };
            assert!(!flags.restricted);
            assert_eq!(event_loop.ring().refused.last(), Some(&(refused, errno)));
            let text = event_loop.ring().to_string();
            assert!(!flags.to_string().contains("RESTR") && text.contains("RESTR"), "{text}");
            works(&event_loop);
            let best = RingChoice::Exactly(RingFlags::BEST);
            let error = EventLoop::new(config(best)).err().unwrap();
            assert_eq!(
                (error.call, error.error.raw_os_error()),
                ("io_uring_register", Some(errno))
            );
        });
    }
}

#[test]
fn set_up_without_epoll_pwait2_the_loop_still_runs() {
    let _alone = lock(&ALONE);
    let calls = [libc::SYS_io_uring_setup, libc::SYS_epoll_pwait2];
    denied(&calls, libc::ENOSYS, || {
        works(&EventLoop::new(LoopConfig::default()).unwrap());
    });
}

#[test]
fn set_up_every_rung_works() {
    let _alone = lock(&ALONE);
    for (name, event_loop) in loops() {
        let flags = event_loop.ring().flags;
        assert_eq!(flags.is_none(), name == "epoll", "{name}");
        works(&event_loop);
    }
    // Incompatible flags: DEFER_TASKRUN requires SINGLE_ISSUER.
    let odd = RingFlags { single_issuer: false, ..RingFlags::DEFERRING };
    let odd = LoopConfig { ring: RingChoice::Ladder(odd), ..LoopConfig::default() };
    let event_loop = EventLoop::new(odd).unwrap();
    assert!(event_loop.ring().flags.is_some() && !event_loop.ring().refused.is_empty());
    works(&event_loop);
}

/// Waits for the thread's end, as another thread's task would.
fn end_of(thread: &mut IoThread) -> ThreadEnd {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut end = pin!(thread.end());
    loop {
        match end.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(end) => return end,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Other threads learn of the failure at once, not when the thread is stopped.
#[test]
fn no_panic_the_end_of_an_io_thread_is_reported() {
    let _alone = lock(&ALONE);
    for (name, ring) in rings() {
        let config = || IoThreadConfig { event_loop: config(ring), ..IoThreadConfig::default() };
        let _watchdog = Watchdog::new(name);

        let mut thread = IoThread::spawn(config()).unwrap();
        let calls = [libc::SYS_io_uring_enter, libc::SYS_epoll_pwait2, libc::SYS_epoll_pwait];
        thread.handle().spawn(move |_| deny(&calls, libc::EIO)).unwrap();
        let end = end_of(&mut thread);
        let ThreadEnd::Failed { call, error } = end else { panic!("{name}: {end}") };
        let wanted = if name == "epoll" { "epoll_pwait2" } else { "io_uring_enter" };
        assert_eq!((call, error.raw_os_error()), (wanted, Some(libc::EIO)), "{name}");
        assert_eq!(thread.stop().unwrap_err().raw_os_error(), Some(libc::EIO), "{name}");

        let mut thread = IoThread::spawn(config()).unwrap();
        thread.handle().stop();
        let end = end_of(&mut thread);
        assert!(matches!(end, ThreadEnd::Stopped), "{name}: {end}");
        thread.stop().unwrap();

        let mut thread = IoThread::spawn(config()).unwrap();
        thread.handle().spawn(|_| panic!("a test's")).unwrap();
        let end = end_of(&mut thread);
        assert!(matches!(end, ThreadEnd::Panicked), "{name}: {end}");
    }
}

#[test]
fn creation_a_pool_whose_threads_cannot_be_started_is_an_error() {
    let _alone = lock(&ALONE);
    denied(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN, || {
        let thread_pool = ThreadPoolConfig { min: 3, max: 3 };
        let config = LoopConfig { thread_pool, ..LoopConfig::default() };
        let error = EventLoop::new(config).err().unwrap().to_string();
        assert!(error.contains("clone failed: "), "{error}");
        assert!(error.contains("os error 11"), "{error}");
        assert!(error.ends_with("for thread 1 of the 3 of the pool"), "{error}");
    });
}

/// The CPUs of each kernel thread (io-wq) of `thread`'s ring.
fn kernel_threads(thread: nix::unistd::Pid) -> Vec<String> {
    let name = format!("iou-wrk-{thread}");
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let status = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("status")).ok()
    };
    let cpus = |status: String| {
        let field = |name| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
        (field("Name:")? == name).then(|| field("Cpus_allowed_list:").unwrap().to_owned())
    };
    tasks.filter_map(status).filter_map(cpus).collect()
}

/// Each of a burst of fsyncs occupies a kernel thread, which remains for some seconds.
#[test]
fn creation_the_kernels_threads_are_bounded_and_stay_on_the_loops_cpus() {
    let _alone = lock(&ALONE);
    const LIMIT: usize = 2;
    const BURST: u32 = 64;
    let this = nix::unistd::Pid::from_raw(0);
    let allowed = nix::sched::sched_getaffinity(this).unwrap();
    let cpu = (0..nix::sched::CpuSet::count()).find(|&cpu| allowed.is_set(cpu).unwrap()).unwrap();
    for ring in [RingFlags::BEST, RingFlags::PLAIN].map(RingChoice::Exactly) {
        let thread_pool = ThreadPoolConfig { min: 0, max: LIMIT };
        let event_loop = LoopConfig { thread_pool, ..config(ring) };
        let thread =
            IoThread::spawn(IoThreadConfig { event_loop, cpus: vec![cpu], scheduling: None });
        let thread = thread.unwrap();
        let (done, all) = std::sync::mpsc::channel();
        let fsyncs = move |event_loop: &EventLoop| {
            let file = event_loop.register_file(tempfile(b"content"));
            for _ in 0..BURST {
                let fsync = IoOp::Fsync { data_only: false };
                let fsync =
                    event_loop.operate(&file, fsync, Engine::Uring, event_loop::IoBufs::new());
                let done = done.clone();
                event_loop.spawn(async move {
                    let (result, _) = fsync.await;
                    done.send((result, nix::unistd::gettid())).unwrap();
                });
            }
        };
        thread.handle().spawn(fsyncs).unwrap();
        let mut tid = None;
        for _ in 0..BURST {
            let (result, thread) = all.recv_timeout(LOST).unwrap();
            assert_eq!(result.unwrap(), 0);
            tid = Some(thread);
        }
        let found = kernel_threads(tid.unwrap());
        assert!((1..=LIMIT).contains(&found.len()), "{found:?}");
        assert!(found.iter().all(|cpus| *cpus == cpu.to_string()), "{found:?}");
        thread.stop().unwrap();
    }
}

/// Files are registered up to the size of the table; others use their descriptors.
#[test]
fn more_files_than_a_ring_can_register_are_all_served() {
    let _alone = lock(&ALONE);
    const MORE_THAN_THERE_IS_ROOM: usize = 1100;
    let event_loop = EventLoop::new(config(RingChoice::Exactly(RingFlags::BEST))).unwrap();
    let fds = [b"one", b"two"].map(|content| tempfile(content));
    let files: Vec<_> = (0..MORE_THAN_THERE_IS_ROOM)
        .map(|index| event_loop.register_file(fds[index % 2].clone()))
        .collect();
    let is_fixed = |file: &event_loop::LoopFile| format!("{file:?}").contains("fixed");
    let fixed = files.iter().filter(|file| is_fixed(file)).count();
    assert!((1..files.len()).contains(&fixed), "{fixed} are registered");
    let read = |file: &event_loop::LoopFile| {
        let bufs = AlignedBuf::io_bufs(3, 1).unwrap();
        let read = event_loop.operate(file, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
        let (n, bufs) = event_loop.block_on(read).unwrap();
        let mut out = [0; 3];
        bufs.copy_out(0, &mut out);
        assert_eq!(n.unwrap(), 3);
        out
    };
    for (index, file) in files.iter().enumerate() {
        assert_eq!(&read(file), [b"one", b"two"][index % 2], "file {index} of {fixed}");
    }
    // A released index is reused.
    drop(files);
    let file = event_loop.register_file(fds[0].clone());
    assert!(is_fixed(&file) && &read(&file) == b"one");
}
