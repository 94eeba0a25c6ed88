//! tokio: epoll, timers in a wheel of milliseconds, files by a pool of threads.

use std::fs::File;
use std::future::Future;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, LocalSet};

use crate::async_rows;
use crate::contenders::Contender;
use crate::executor::{Call, Count, Executor};
use crate::page::Page;
use bench::host::affinity::unbind_this_thread;

/// See [`Tokio`].
pub(crate) const CONTENDER: Contender = Contender {
    name: "tokio",
    settings: "1.x, runtime `new_current_thread`, tasks in a `LocalSet`, closures by `mpsc` and \
               `recv_many`, reads by `spawn_blocking` (what `tokio::fs` does) on threads that may \
               use both CPUs",
    measure: async_rows::measure::<Tokio>,
};

/// The runtime for one thread.
struct Tokio;

/// A task's end, with panics passed on.
struct Join<T>(JoinHandle<T>);

impl<T> Future for Join<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        Pin::new(&mut self.0).poll(cx).map(|result| result.expect("no task is cancelled here"))
    }
}

impl Executor for Tokio {
    fn block_on<T: 'static>(_cpu: usize, future: impl Future<Output = T> + 'static) -> Result<T> {
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .on_thread_start(unbind_this_thread)
            .build()
            .context("building a runtime")?;
        Ok(LocalSet::new().block_on(&runtime, future))
    }

    type Join<T: 'static> = Join<T>;

    fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> Join<T> {
        Join(tokio::task::spawn_local(future))
    }

    fn yield_now() -> impl Future<Output = ()> {
        tokio::task::yield_now()
    }

    fn sleep_until(deadline: Instant) -> impl Future<Output = ()> + 'static {
        tokio::time::sleep_until(deadline.into())
    }

    fn inbox() -> (impl Fn(Count) + Send + 'static, impl Future<Output = ()> + 'static) {
        let (sender, mut receiver) = mpsc::unbounded_channel::<Call>();
        let post = move |count: Count| drop(sender.send(Box::new(move || count.up())));
        let run = async move {
            let mut calls = Vec::with_capacity(256);
            while receiver.recv_many(&mut calls, 256).await > 0 {
                calls.drain(..).for_each(|call| call());
            }
        };
        (post, run)
    }

    type Socket = tokio::net::UnixStream;

    fn socket(socket: UnixStream) -> Result<Self::Socket> {
        tokio::net::UnixStream::from_std(socket).context("taking over a socket")
    }

    async fn read(socket: &mut Self::Socket, mut buffer: Vec<u8>) -> Result<(usize, Vec<u8>)> {
        let n = socket.read(&mut buffer).await.context("reading from a socket")?;
        Ok((n, buffer))
    }

    async fn write(socket: &mut Self::Socket, buffer: Vec<u8>, n: usize) -> Result<Vec<u8>> {
        socket.write_all(&buffer[..n]).await.context("writing to a socket")?;
        Ok(buffer)
    }

    type File = Arc<File>;

    async fn file(file: File, _path: &Path) -> Result<Self::File> {
        Ok(Arc::new(file))
    }

    async fn read_at(file: &Self::File, mut page: Box<Page>, offset: u64) -> Result<Box<Page>> {
        let file = file.clone();
        let read = move || file.read_exact_at(&mut page.0, offset).map(|()| page);
        tokio::task::spawn_blocking(read).await?.context("reading")
    }
}
