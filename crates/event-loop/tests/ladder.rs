//! E4: birth on the loop's own thread, or an error and no thread. E5: the ladder, down to epoll.
//!
//! Seccomp filters are put on threads of the test, never on the whole program.

mod common;

use std::collections::BTreeMap;
use std::sync::Mutex;

use common::*;
use event_loop::sync::lock;
use event_loop::{
    AlignedBuf, Engine, EventLoop, IoOp, IoThread, IoThreadConfig, LoopConfig, RingChoice,
    RingFlags, SpawnError, Trigger,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// Threads are counted: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs `test` on a thread where these system calls fail with `errno`.
fn denied<R: Send>(calls: &[nix::libc::c_long], errno: i32, test: impl FnOnce() -> R + Send) -> R {
    let rules = calls.iter().map(|call| (*call, Vec::new())).collect::<BTreeMap<_, _>>();
    let deny = SeccompAction::Errno(errno as u32);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, deny, arch).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            seccompiler::apply_filter(&filter).unwrap();
            test()
        });
        thread.join().unwrap()
    })
}

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
    IoThread::spawn(IoThreadConfig { event_loop, cpus })
}

#[test]
fn e4_a_thread_whose_loop_cannot_be_had_returns_the_error_and_is_gone() {
    let _alone = lock(&ALONE);
    let best = RingChoice::Exactly(RingFlags::BEST);
    for errno in [nix::libc::ENOMEM, nix::libc::EPERM] {
        let error = denied(&[nix::libc::SYS_io_uring_setup], errno, || {
            born("stillborn", best, vec![]).err().unwrap()
        });
        let SpawnError::Loop(setup) = &error else { panic!("{error}") };
        assert_eq!((setup.call, setup.error.raw_os_error()), ("io_uring_setup", Some(errno)));
        let text = error.to_string();
        let why = std::io::Error::from_raw_os_error(errno).to_string();
        assert!(text.contains("io_uring_setup") && text.contains(&why), "{text}");
        // It was joined, and so is out of the list as soon as the kernel has got round to it.
        spin_until("the thread's end", || threads_named("stillborn") == 0);
    }
    let error = denied(&[nix::libc::SYS_eventfd2], nix::libc::EMFILE, || {
        born("stillborn", RingChoice::Epoll, vec![]).err().unwrap()
    });
    assert!(error.to_string().contains("eventfd"), "{error}");
    let error = denied(&[nix::libc::SYS_epoll_create1], nix::libc::EMFILE, || {
        born("stillborn", RingChoice::Epoll, vec![]).err().unwrap()
    });
    assert!(error.to_string().contains("epoll_create1"), "{error}");
    spin_until("the thread's end", || threads_named("stillborn") == 0);
}

#[test]
fn e4_name_and_cpus_come_from_the_options() {
    let _alone = lock(&ALONE);
    for cpu in [nix::libc::CPU_SETSIZE as usize, 1_000_000, 1023] {
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

/// What a loop must still be able to do at the foot of the ladder.
fn works(event_loop: &EventLoop) {
    let file = event_loop.register_file(tempfile(b"hello"));
    let on_loop = event_loop.clone();
    let read = async move {
        let bufs = AlignedBuf::io_bufs(5, 1).unwrap();
        on_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs).await.0
    };
    assert_eq!(event_loop.block_on(read).unwrap(), 5);
    let (fd, count) = (eventfd(), Count::new());
    event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
    signal(&fd);
    turn_until(event_loop, "an event", || count.calls.get() == 1);
    let at = event_loop.now_ns() + 100_000;
    event_loop.block_on(event_loop.sleep_until(at)).unwrap();
    assert!(event_loop.now_ns() >= at);
}

#[test]
fn e5_where_io_uring_is_denied_the_loop_runs_on_epoll_and_says_why() {
    let _alone = lock(&ALONE);
    for errno in [nix::libc::EPERM, nix::libc::ENOSYS, nix::libc::EACCES] {
        denied(&[nix::libc::SYS_io_uring_setup], errno, || {
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

/// A filter that lets rings be used but nothing registered costs the restrictions and the table of
/// files, not the ring.
#[test]
fn e5_where_nothing_can_be_registered_the_ring_goes_unrestricted() {
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
fn e5_without_epoll_pwait2_the_loop_still_runs() {
    let _alone = lock(&ALONE);
    let calls = [nix::libc::SYS_io_uring_setup, nix::libc::SYS_epoll_pwait2];
    denied(&calls, nix::libc::ENOSYS, || {
        works(&EventLoop::new(LoopConfig::default()).unwrap());
    });
}

#[test]
fn e5_every_rung_works() {
    let _alone = lock(&ALONE);
    for (name, event_loop) in loops() {
        let flags = event_loop.ring().flags;
        assert_eq!(flags.is_none(), name == "epoll", "{name}");
        works(&event_loop);
    }
    // Flags that do not go together: DEFER_TASKRUN wants SINGLE_ISSUER.
    let odd = RingFlags { single_issuer: false, ..RingFlags::BEST };
    let odd = LoopConfig { ring: RingChoice::Ladder(odd), ..LoopConfig::default() };
    let event_loop = EventLoop::new(odd).unwrap();
    assert!(event_loop.ring().flags.is_some() && !event_loop.ring().refused.is_empty());
    works(&event_loop);
}
