//! Regions registered with a loop's ring: operations use the registration, it is undone, and operations work without.

#![allow(clippy::disallowed_methods, reason = "locks in tests are not counted")]

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use event_loop::{Engine, EventLoop, IoBufs, IoOp, LoopConfig, RingChoice, RingFlags, TaskRun};
use guest_memory::test_util::memfd_region;
use guest_memory::{GuestMemory, Logging, MappedRegion, MemoryView, RegisteredRegion};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

const PAGE: u64 = 4096;
/// Bytes registered at once, with one index in the ring's table.
const PIECE: u64 = 64 << 20;

/// `IORING_OP_*`.
const READV: u8 = 1;
const READ_FIXED: u8 = 4;
const WRITE_FIXED: u8 = 5;
const READ: u8 = 22;
const READV_FIXED: u8 = 60;
const WRITEV_FIXED: u8 = 61;

/// The trace log, limits and the count of pinned pages are process-wide: the tests run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Rings that register memory: the last one is restricted to the loop's operations.
fn loops() -> [EventLoop; 3] {
    const { assert!(RingFlags::BEST.restricted) };
    let deferring = RingFlags { task_run: TaskRun::Defer, ..RingFlags::BEST };
    [RingFlags::PLAIN, deferring, RingFlags::BEST]
        .map(|flags| event_loop(RingChoice::Exactly(flags)))
}

fn event_loop(ring: RingChoice) -> EventLoop {
    EventLoop::new(LoopConfig { ring, ..LoopConfig::default() }).unwrap()
}

/// The operations, except polls, submitted to loops of this process since the last call.
fn operations() -> Vec<u8> {
    static LOG: OnceLock<(OwnedFd, Mutex<usize>)> = OnceLock::new();
    let (log, seen) = LOG.get_or_init(|| {
        let name = std::env::temp_dir().join(format!("registered-{}", std::process::id()));
        let file = File::create_new(&name).unwrap();
        let read = File::open(&name).unwrap();
        std::fs::remove_file(name).unwrap();
        trace::log_to(file).unwrap();
        assert_eq!(trace::log_events("add_sqe"), 1);
        (read.into(), Mutex::new(0))
    });
    let mut seen = seen.lock().unwrap();
    let mut text = vec![0; 1 << 20];
    let len = nix::sys::uio::pread(log, &mut text, *seen as i64).unwrap();
    *seen += len;
    let opcode = |line: &str| {
        let rest = line.split_once(" opcode ").unwrap().1;
        rest.split_once(' ').unwrap().0.parse::<u8>().unwrap()
    };
    let text = std::str::from_utf8(&text[..len]).unwrap();
    // POLL_ADD and ASYNC_CANCEL belong to the loop itself.
    text.lines().map(opcode).filter(|code| ![6, 14].contains(code)).collect()
}

/// KiB that the process has pinned.
fn pinned_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    field.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

/// Runs a loop until `done`.
fn turn_until(event_loop: &EventLoop, what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60), "LOST: {what}");
        event_loop.run_once(false).unwrap();
    }
}

fn region(size: u64) -> Arc<MappedRegion> {
    Arc::new(memfd_region(0, size).unwrap().map().unwrap())
}

fn register(event_loop: &EventLoop, region: &Arc<MappedRegion>) -> io::Result<RegisteredRegion> {
    event_loop.block_on(RegisteredRegion::new(event_loop, region.clone())).unwrap()
}

/// A view of one region.
fn view(region: &Arc<MappedRegion>, registered: &[RegisteredRegion]) -> Rc<MemoryView> {
    let memory = Arc::new(GuestMemory::from_regions([region.clone()]).unwrap());
    MemoryView::with_logging(memory, registered, Logging::new())
}

fn segments(view: &Rc<MemoryView>, list: &[(u64, u64)]) -> IoBufs {
    let mut bufs = IoBufs::new();
    for &(addr, len) in list {
        view.push_iovecs(addr, len as usize, &mut bufs).unwrap();
    }
    bufs
}

/// An unlinked file with these bytes.
fn file(bytes: &[u8]) -> Arc<OwnedFd> {
    use std::io::Write;
    static NEXT: Mutex<u32> = Mutex::new(0);
    let mut next = NEXT.lock().unwrap();
    *next += 1;
    let name = std::env::temp_dir().join(format!("registered-{}-{next}", std::process::id()));
    let mut file = File::options().read(true).write(true).create_new(true).open(&name).unwrap();
    std::fs::remove_file(&name).unwrap();
    file.write_all(bytes).unwrap();
    Arc::new(file.into())
}

fn pattern(len: u64) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
}

/// Converts a result to the kernel's form: a count or a negated errno.
fn raw(result: std::io::Result<usize>) -> i32 {
    match result {
        Ok(count) => count as i32,
        Err(error) => -error.raw_os_error().expect("an errno"),
    }
}

fn run(event_loop: &EventLoop, fd: &Arc<OwnedFd>, op: IoOp, bufs: IoBufs) -> i32 {
    let file = event_loop.register_file(fd.clone());
    raw(event_loop.block_on(event_loop.operate(&file, op, Engine::Uring, bufs)).unwrap().0)
}

fn bytes_at(view: &MemoryView, addr: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    view.read_bytes(addr, &mut bytes).unwrap();
    bytes
}

#[test]
fn operations_use_the_registered_index() {
    let _alone = alone();
    let data = pattern(4 * PAGE);
    let fd = file(&data);
    // The third piece is a partial one.
    let region = region(2 * PIECE + 8 * PAGE);
    for event_loop in loops() {
        let registered = [register(&event_loop, &region).unwrap()];
        let view = view(&region, &registered);
        operations();
        let end = 2 * PIECE + 8 * PAGE;
        for (list, opcode) in [
            (&[(0, 4 * PAGE)][..], READ_FIXED),
            (&[(PIECE - 4 * PAGE, 4 * PAGE)], READ_FIXED),
            (&[(end - 4 * PAGE, 4 * PAGE)], READ_FIXED),
            // Odd addresses are fine, too.
            (&[(PIECE + 3, 4 * PAGE)], READ_FIXED),
            // Adjacent segments become one.
            (&[(PAGE, PAGE), (2 * PAGE, 3 * PAGE)], READ_FIXED),
            (&[(0, PAGE), (5 * PAGE, 3 * PAGE)], READV_FIXED),
            (
                &[
                    (2 * PIECE + PAGE, PAGE),
                    (2 * PIECE + 7, 9),
                    (2 * PIECE + 4 * PAGE, 3 * PAGE - 9),
                ],
                READV_FIXED,
            ),
            // In two pieces.
            (&[(PIECE - PAGE, 4 * PAGE)], READ),
            (&[(PIECE - 4 * PAGE, PAGE), (PIECE + PAGE, 3 * PAGE)], READV),
            (&[(PIECE + PAGE, PAGE), (0, 3 * PAGE)], READV),
        ] {
            let offsets = list.iter().flat_map(|&(addr, len)| addr..addr + len);
            view.write_bytes(list[0].0, &[0; 64]).unwrap();
            let read = IoOp::Read { offset: 0 };
            assert_eq!(run(&event_loop, &fd, read, segments(&view, list)), data.len() as i32);
            assert_eq!(operations(), [opcode], "{list:?}");
            let got: Vec<u8> =
                list.iter().flat_map(|&(at, len)| bytes_at(&view, at, len)).collect();
            assert!(got == data, "{list:?}");
            assert_eq!(offsets.count(), data.len());
        }
        for (list, opcode) in [
            (&[(0, 4 * PAGE)][..], WRITE_FIXED),
            (&[(2 * PIECE, PAGE), (2 * PIECE + 4 * PAGE, 3 * PAGE)], WRITEV_FIXED),
        ] {
            let other = file(&[0; 16]);
            let mut rest = data.as_slice();
            for &(addr, len) in list {
                let (part, next) = rest.split_at(len as usize);
                view.write_bytes(addr, part).unwrap();
                rest = next;
            }
            let write = IoOp::Write { offset: PAGE, dsync: true };
            assert_eq!(run(&event_loop, &other, write, segments(&view, list)), data.len() as i32);
            assert_eq!(operations(), [opcode]);
            let mut got = vec![0; data.len()];
            nix::sys::uio::pread(&other, &mut got, PAGE as i64).unwrap();
            assert!(got == data);
        }
    }
}

/// The effect that the option for pinned memory warns of, and the proof that the kernel uses the registration: punching a
/// hole gives the mapping another page, while operations use the old one.
#[test]
fn discarded_pages_are_lost_to_operations() {
    let _alone = alone();
    for event_loop in loops() {
        let description = memfd_region(0, 2 * PAGE).unwrap();
        let memfd = description.fd.try_clone().unwrap();
        let region = Arc::new(description.map().unwrap());
        let registered = [register(&event_loop, &region).unwrap()];
        let fd = file(&pattern(2 * PAGE));
        let view = view(&region, &registered);
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(memfd, hole, 0, PAGE as i64).unwrap();
        let bufs = segments(&view, &[(0, 2 * PAGE)]);
        assert_eq!(run(&event_loop, &fd, IoOp::Read { offset: 0 }, bufs), 2 * PAGE as i32);
        assert_eq!(bytes_at(&view, 0, PAGE), vec![0; PAGE as usize]);
        assert_eq!(bytes_at(&view, PAGE, PAGE), pattern(2 * PAGE)[PAGE as usize..]);
    }
}

/// The registration's first index in the table.
fn first_place(registered: &RegisteredRegion) -> u32 {
    let text = format!("{registered:?}");
    let text = text.split_once("places from ").expect("its places").1;
    text.split_once(' ').unwrap().0.parse().unwrap()
}

#[test]
fn a_place_is_not_used_again_before_the_last_operation_that_names_it() {
    let _alone = alone();
    for event_loop in loops() {
        let pinned = pinned_kib();
        let (pipe, writer) = nix::unistd::pipe().unwrap();
        let file = event_loop.register_file(Arc::new(pipe));
        let (region, other) = (region(4 * PAGE), region(4 * PAGE));
        let ordinary = view(&region, &[]);
        let registered = register(&event_loop, &region).unwrap();
        let place = first_place(&registered);
        let bufs = segments(&view(&region, std::slice::from_ref(&registered)), &[(8, 16)]);
        operations();
        // Queued and not submitted: the kernel has not looked up the index yet.
        let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
        assert_eq!(operations(), [READ_FIXED]);
        drop(registered);
        let other = register(&event_loop, &other).unwrap();
        assert_ne!(first_place(&other), place);
        // Submitted now: in flight, until the pipe is written to.
        event_loop.run_once(false).unwrap();
        event_loop.block_on(other.unregister()).unwrap();
        turn_until(&event_loop, "the operation's pages alone", || pinned_kib() == pinned + 16);
        nix::unistd::write(&writer, b"sixteen bytes...").unwrap();
        let (result, bufs) = event_loop.block_on(read).unwrap();
        assert_eq!((result.unwrap(), &*bytes_at(&ordinary, 8, 16)), (16, &b"sixteen bytes..."[..]));
        drop(bufs);
        turn_until(&event_loop, "the pages' release", || pinned_kib() == pinned);
        assert_eq!(first_place(&register(&event_loop, &region).unwrap()), place);
    }
}

#[test]
fn memory_is_unpinned_in_every_case() {
    let _alone = alone();
    let before = pinned_kib();
    let region = region(2 * PIECE + PAGE);
    let kib = region.size() / 1024;
    for event_loop in loops() {
        let unpinned = |what| turn_until(&event_loop, what, || pinned_kib() == before);
        let registered = register(&event_loop, &region).unwrap();
        assert_eq!(pinned_kib(), before + kib);
        event_loop.block_on(registered.unregister()).unwrap();
        unpinned("by unregistering");

        let (registered, kept) = (register(&event_loop, &region).unwrap(), view(&region, &[]));
        let view = view(&region, std::slice::from_ref(&registered));
        event_loop.block_on(registered.unregister()).unwrap();
        assert_eq!(pinned_kib(), before + kib, "a view has it");
        drop((view, kept));
        unpinned("with the last view");

        // Dropped half-way. Futures of a loop that is not running panic.
        event_loop.run_once(false).unwrap();
        let mut half = Box::pin(RegisteredRegion::new(&event_loop, region.clone()));
        let waker = std::task::Waker::noop();
        assert!(half.as_mut().poll(&mut std::task::Context::from_waker(waker)).is_pending());
        assert_eq!(pinned_kib(), before + PIECE / 1024);
        drop(half);
        unpinned("half way");
        assert_eq!(first_place(&register(&event_loop, &region).unwrap()), 0, "no place is lost");
    }
    // Dropped with the loop; the rest of the registration does not use the loop.
    let [event_loop, ..] = loops();
    let registered = register(&event_loop, &region).unwrap();
    drop(event_loop);
    let started = Instant::now();
    while pinned_kib() != before {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "LOST: pages of a ring that is closed"
        );
        std::thread::yield_now();
    }
    drop(registered);
}

/// One thread, two loops: an index of one ring's table has no meaning for the other.
#[test]
fn another_loop_takes_no_notice() {
    let _alone = alone();
    let [event_loop, other, _] = loops();
    let region = region(4 * PAGE);
    let registered = [register(&event_loop, &region).unwrap()];
    let view = view(&region, &registered);
    let fd = file(&pattern(PAGE));
    for (event_loop, opcode) in [(&event_loop, READ_FIXED), (&other, READ)] {
        operations();
        let bufs = segments(&view, &[(PAGE, PAGE)]);
        assert_eq!(run(event_loop, &fd, IoOp::Read { offset: 0 }, bufs), PAGE as i32);
        assert_eq!((operations(), bytes_at(&view, PAGE, PAGE)), (vec![opcode], pattern(PAGE)));
        view.write_bytes(PAGE, &[0; 4096]).unwrap();
    }
}

#[test]
fn a_loop_on_epoll_registers_nothing() {
    let _alone = alone();
    let event_loop = event_loop(RingChoice::Epoll);
    let region = region(4 * PAGE);
    let error = register(&event_loop, &region).unwrap_err();
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Unsupported, None));
}

/// Without `CAP_IPC_LOCK`, on this thread.
fn drop_ipc_lock() {
    const VERSION_3: u32 = 0x2008_0522;
    const CAP_IPC_LOCK: u32 = 14;
    #[repr(C)]
    #[derive(Default, Clone, Copy)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    let header = [VERSION_3, 0];
    let mut data = [Data::default(); 2];
    #[allow(unsafe_code)]
    // SAFETY: capget(2) and capset(2) with a header of version 3 take two of these structs. They are
    // this thread's capabilities.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), data.as_mut_ptr()), 0);
        data[0].effective &= !(1 << CAP_IPC_LOCK);
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()), 0);
    }
}

#[test]
fn registration_beyond_the_limit_leaves_nothing_behind() {
    let _alone = alone();
    let before = pinned_kib();
    let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
    setrlimit(Resource::RLIMIT_MEMLOCK, (PIECE + PIECE / 2).min(hard), hard).unwrap();
    let result = std::thread::spawn(move || {
        drop_ipc_lock();
        let region = region(2 * PIECE);
        let fd = file(&pattern(PAGE));
        for event_loop in loops() {
            // The first piece fits, the second does not.
            let error = register(&event_loop, &region).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
            turn_until(&event_loop, "the pages' release", || pinned_kib() == before);
            let view = view(&region, &[]);
            let bufs = segments(&view, &[(0, PAGE)]);
            operations();
            assert_eq!(run(&event_loop, &fd, IoOp::Read { offset: 0 }, bufs), PAGE as i32);
            assert_eq!((operations(), bytes_at(&view, 0, PAGE)), (vec![READ], pattern(PAGE)));
        }
    });
    let result = result.join();
    setrlimit(Resource::RLIMIT_MEMLOCK, soft, hard).unwrap();
    result.unwrap();
}
