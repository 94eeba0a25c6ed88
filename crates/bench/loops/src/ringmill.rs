//! ringmill's event loop, polling off.

use std::cell::RefCell;
use std::fs::File;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use event_loop::{EventLoop, JoinHandle, LoopConfig, LoopFile, PollParams};

use crate::async_rows;
use crate::conditions::Conditions;
use crate::contenders::Contender;
use crate::executor::{Count, Executor};
use crate::page::Page;
use crate::ringmill_rows;
use crate::rows::Row;

/// Its own interfaces where a row is about those, tasks elsewhere.
pub(crate) const CONTENDER: Contender = Contender {
    name: "ringmill",
    settings: "defaults, but polling off: COOP_TASKRUN ring; wakes by `BottomHalf`, closures by \
               `LoopHandle::spawn`, timers and I/O by `IoTarget`, the file registered",
    measure,
};

fn measure(row: Row, conditions: &Conditions) -> Result<Option<f64>> {
    match row {
        Row::Wake | Row::Ring(_) | Row::TimerChurn | Row::TimerFire | Row::TimerLate => {}
        Row::FileRead(_) | Row::RamRead(_) => {}
        Row::PostBusy | Row::PostIdle | Row::Spawn | Row::Switch | Row::Yield => {
            return async_rows::measure::<Ringmill>(row, conditions);
        }
    }
    ringmill_rows::measure(row, conditions).map(Some)
}

/// A loop on this thread.
pub(crate) fn new_loop() -> Result<EventLoop> {
    let config = LoopConfig { poll: PollParams::OFF, ..LoopConfig::default() };
    let event_loop = EventLoop::new(config)?;
    if !event_loop.has_io_uring() {
        bail!("no io_uring: {}", event_loop.ring());
    }
    Ok(event_loop)
}

thread_local! {
    /// The loop that runs this thread's tasks.
    static CURRENT: RefCell<Option<EventLoop>> = const { RefCell::new(None) };
}

fn current() -> EventLoop {
    CURRENT.with_borrow(|current| current.clone().expect(OUTSIDE))
}

const OUTSIDE: &str = "all of this happens within `block_on`";

/// Its tasks.
struct Ringmill;

impl Executor for Ringmill {
    fn block_on<T: 'static>(_cpu: usize, future: impl Future<Output = T> + 'static) -> Result<T> {
        let event_loop = new_loop()?;
        CURRENT.replace(Some(event_loop.clone()));
        event_loop.block_on(future).context("turning the loop")
    }

    type Join<T: 'static> = Join<T>;

    fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> Join<T> {
        Join(CURRENT.with_borrow(|current| current.as_ref().expect(OUTSIDE).spawn(future)))
    }

    fn sleep_until(deadline: Instant) -> impl Future<Output = ()> + 'static {
        let event_loop = current();
        let left = deadline.saturating_duration_since(Instant::now());
        let deadline = event_loop.now_ns() + nanoseconds(left);
        event_loop.sleep_until(deadline)
    }

    fn inbox() -> (impl Fn(Count) + Send + 'static, impl Future<Output = ()> + 'static) {
        let handle = current().handle();
        let post = move |count: Count| {
            // A loop that is gone counts no more.
            let _ = handle.spawn(move |_| count.up());
        };
        (post, std::future::pending())
    }

    // Files and sockets go by its own interface: `ringmill_rows`.

    type Socket = ();

    fn socket(_socket: UnixStream) -> Result<()> {
        bail!("not used")
    }

    async fn read(_socket: &mut (), _buffer: Vec<u8>) -> Result<(usize, Vec<u8>)> {
        bail!("not used")
    }

    async fn write(_socket: &mut (), _buffer: Vec<u8>, _n: usize) -> Result<Vec<u8>> {
        bail!("not used")
    }

    type File = LoopFile;

    async fn file(file: File, _path: &Path) -> Result<LoopFile> {
        Ok(current().register_file(Arc::new(OwnedFd::from(file))))
    }

    async fn read_at(_file: &LoopFile, _page: Box<Page>, _offset: u64) -> Result<Box<Page>> {
        bail!("not used")
    }
}

/// As the loop counts time.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A task's end.
struct Join<T>(JoinHandle<T>);

impl<T> Future for Join<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        Pin::new(&mut self.0).poll(cx).map(|result| result.expect("the loop goes on"))
    }
}
