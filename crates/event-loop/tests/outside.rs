//! Futures of a loop that are awaited outside of it: they fail, and do not hang.

use std::future::Future;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use event_loop::{AlignedBuf, Engine, EventLoop, IoBufs, IoOp, LoopConfig};

const READ: IoOp = IoOp::Read { offset: 0 };

/// A loop, and a read of a pipe on it with the end that completes it.
fn reading() -> (EventLoop, impl Future<Output = (std::io::Result<usize>, IoBufs)>, std::fs::File) {
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let reader: Arc<OwnedFd> = Arc::new(reader);
    let file = event_loop.register_file(reader);
    let bufs = AlignedBuf::io_bufs(8, 8).unwrap();
    let read = event_loop.operate(&file, READ, Engine::Uring, bufs);
    (event_loop, read, writer.into())
}

/// What another executor does first with a future.
fn poll<T>(future: impl Future<Output = T>) -> Result<Poll<T>, String> {
    let mut future = pin!(future);
    let poll = || future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    catch_unwind(AssertUnwindSafe(poll))
        .map_err(|panic| panic.downcast_ref::<String>().expect("a message").clone())
}

fn assert_refused<T>(result: Result<Poll<T>, String>) {
    let message = result.err().expect("it would hang");
    assert!(message.starts_with("event loop "), "{message}");
    assert!(
        message.contains("nothing turns the loop: await it in EventLoop::block_on"),
        "{message}"
    );
}

#[test]
fn nothing_turns_the_loop() {
    let (event_loop, read, _writer) = reading();
    assert_refused(poll(read));
    let deadline = event_loop.now_ns() + 1_000_000;
    assert_refused(poll(event_loop.sleep_until(deadline)));
    // It did once, and does no more.
    let (event_loop, read, _writer) = reading();
    assert_eq!(event_loop.block_on(async { 7 }).unwrap(), 7);
    assert_refused(poll(read));
    let (event_loop, read, _writer) = reading();
    drop(event_loop);
    assert_refused(poll(read));
}

#[test]
fn the_caller_turns_the_loop() {
    let (event_loop, read, mut writer) = reading();
    event_loop.run_once(false).unwrap();
    let mut read = pin!(read);
    assert!(matches!(poll(read.as_mut()), Ok(Poll::Pending)));
    writer.write_all(b"hello").unwrap();
    let (result, _) = loop {
        event_loop.run_once(true).unwrap();
        if let Poll::Ready(done) = poll(read.as_mut()).unwrap() {
            break done;
        }
    };
    assert_eq!(result.unwrap(), 5);
    let (event_loop, read, _writer) = reading();
    event_loop.prepare().unwrap();
    assert!(matches!(poll(read), Ok(Poll::Pending)));
}
