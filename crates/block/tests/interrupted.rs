//! Signals, one after the other, to every thread of the process: no request fails because a system call was
//! interrupted, and none is done in part. What a simulated ring does about EINTR and EAGAIN is in `faults.rs`;
//! here it is the kernel, by every engine.
#![allow(unsafe_code)]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use block::NodeRegistry;
use block::options::*;
use block::request::Op;
use common::*;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{getpid, gettid};

const SIZE: usize = 1 << 20;
/// Bytes of a request: several pages, not all in a whole number of blocks.
const LEN: usize = SIZE / 16 - 512;
const PATIENCE: Duration = Duration::from_secs(60);

static CAUGHT: AtomicU64 = AtomicU64::new(0);

extern "C" fn caught(_: libc::c_int) {
    CAUGHT.fetch_add(1, Ordering::Relaxed);
}

/// Interrupts all threads of the process, until dropped.
struct Storm {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Storm {
    fn begin() -> Storm {
        // Without SA_RESTART: whatever can be interrupted is.
        let handler = SigHandler::Handler(caught);
        let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing but to count in an atomic.
        unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let until = over.clone();
        let thread = std::thread::spawn(move || {
            let me = gettid().to_string();
            while !until.load(Ordering::Relaxed) {
                for thread in std::fs::read_dir("/proc/self/task").unwrap() {
                    let name = thread.unwrap().file_name();
                    let name = name.to_str().unwrap();
                    if name != me {
                        let (pid, tid) = (getpid().as_raw(), name.parse::<i32>().unwrap());
                        // SAFETY: no memory is involved. A thread that has ended is not there.
                        unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, libc::SIGUSR1) };
                    }
                }
                // Calls that begin anew when interrupted, as fallocate(2) on tmpfs, come to an end.
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        Storm { over, thread: Some(thread) }
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Writes all of the disk, flushes, reads it, zeroes some and gives some back, 16 requests at a time.
fn round(rig: &mut Rig, number: u8, what: &str) {
    let offset = |index: usize| (index * SIZE / 16) as u64;
    let data = |index: usize| vec![number ^ index as u8; LEN];
    let write = |index| (Op::Write { fua: index % 4 == 0 }, filled(&data(index), 0));
    let all = |rig: &mut Rig, request: &dyn Fn(usize) -> (Op, event_loop::IoBufs)| {
        let submit = |index| {
            let (op, bufs) = request(index);
            rig.submit(op, offset(index), LEN as u64, bufs)
        };
        let tags: Vec<u32> = (0..16).map(submit).collect();
        let answers = tags.into_iter().map(|tag| rig.wait(tag));
        answers
            .map(|(result, bufs)| {
                result.unwrap_or_else(|errno| panic!("{what}: {errno}"));
                bufs
            })
            .collect::<Vec<_>>()
    };
    all(rig, &write);
    rig.op(Op::Flush, 0, 0).unwrap_or_else(|errno| panic!("{what}: flush: {errno}"));
    for (index, bufs) in all(rig, &|_| (Op::Read, memory(LEN, 0))).iter().enumerate() {
        assert!(bytes(bufs) == data(index), "{what}: request {index}");
    }
    all(rig, &|index| match index % 2 {
        0 => (Op::Discard, event_loop::IoBufs::new()),
        _ => {
            let op = Op::WriteZeroes { may_unmap: index % 4 == 1, no_fallback: false, fua: false };
            (op, event_loop::IoBufs::new())
        }
    });
    for (index, bufs) in all(rig, &|_| (Op::Read, memory(LEN, 0))).iter().enumerate() {
        assert!(index % 2 == 0 || bytes(bufs) == vec![0; LEN], "{what}: zeroes {index}");
    }
}

#[test]
fn interrupted_calls_fail_no_request_whichever_the_engine() {
    let _storm = Storm::begin();
    for dir in [disk(), tmpfs()] {
        for (aio, direct) in [
            (Aio::IoUring, false),
            (Aio::IoUring, true),
            (Aio::Threads, false),
            (Aio::Threads, true),
            (Aio::Native, true),
        ] {
            let what = format!("{}, {aio:?}, direct {direct}", dir.display());
            let image = TempFile::new(&dir, "interrupted", SIZE);
            let mut options = blockdev("disk", file(&image.0, Some(aio)));
            options.cache.direct = direct;
            options.discard = Discard::Unmap;
            let mut rig = Rig::new(NodeRegistry::new().open(&options).unwrap());
            let (before, begun) = (CAUGHT.load(Ordering::Relaxed), Instant::now());
            let mut number = 0;
            while number < 5 || CAUGHT.load(Ordering::Relaxed) < before + 100 {
                round(&mut rig, number, &what);
                number = number.wrapping_add(1);
                assert!(begun.elapsed() < PATIENCE, "{what}: where are the signals?");
            }
        }
    }
}
