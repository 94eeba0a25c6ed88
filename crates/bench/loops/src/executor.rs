//! The interface of an asynchronous runtime for the rows: tasks, timers, sockets and files.

use std::fs::File;
use std::future::{Future, poll_fn};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Instant;

use anyhow::Result;
use futures_channel::mpsc;
use futures_util::StreamExt;

use crate::page::Page;

/// A boxed closure posted between threads.
pub(crate) type Call = Box<dyn FnOnce() + Send>;

/// The counter of posted closures.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Count(pub(crate) &'static AtomicU64);

impl Count {
    /// Increments the counter. Only one thread does.
    pub(crate) fn up(self) {
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// One thread's runtime.
pub(crate) trait Executor: 'static {
    /// Runs a future on the calling thread, which is bound to `cpu`.
    fn block_on<T: 'static>(cpu: usize, future: impl Future<Output = T> + 'static) -> Result<T>;

    /// What [`spawn`](Self::spawn) returns.
    type Join<T: 'static>: Future<Output = T> + 'static;

    /// Spawns a task on the same thread.
    fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> Self::Join<T>;

    /// Lets other tasks run.
    fn yield_now() -> impl Future<Output = ()> {
        let mut yielded = false;
        poll_fn(move |cx| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
    }

    /// Returns a timer, armed when first polled.
    fn sleep_until(deadline: Instant) -> impl Future<Output = ()> + 'static;

    /// Returns a function for another thread that posts closures, and the future that runs them here.
    fn inbox() -> (impl Fn(Count) + Send + 'static, impl Future<Output = ()> + 'static) {
        let (sender, mut receiver) = mpsc::unbounded::<Call>();
        let post = move |count: Count| drop(sender.unbounded_send(Box::new(move || count.up())));
        let run = async move {
            while let Some(call) = receiver.next().await {
                call();
            }
        };
        (post, run)
    }

    /// A connected socket.
    type Socket: 'static;

    /// Takes over a socket.
    fn socket(socket: UnixStream) -> Result<Self::Socket>;

    /// Reads available bytes, at most the buffer's length, or waits for some.
    fn read(
        socket: &mut Self::Socket,
        buffer: Vec<u8>,
    ) -> impl Future<Output = Result<(usize, Vec<u8>)>>;

    /// Writes the first `n` bytes of the buffer.
    fn write(
        socket: &mut Self::Socket,
        buffer: Vec<u8>,
        n: usize,
    ) -> impl Future<Output = Result<Vec<u8>>>;

    /// A file opened with O_DIRECT.
    type File: 'static;

    /// Takes over a file. `path` is for runtimes that open files only themselves.
    fn file(file: File, path: &std::path::Path) -> impl Future<Output = Result<Self::File>>;

    /// Reads a page.
    fn read_at(
        file: &Self::File,
        page: Box<Page>,
        offset: u64,
    ) -> impl Future<Output = Result<Box<Page>>>;
}
