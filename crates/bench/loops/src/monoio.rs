//! monoio: io_uring, one thread; timers in a wheel of milliseconds.

#![allow(unsafe_code)]

use std::fs::File;
use std::future::Future;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use monoio::buf::IoBufMut;
use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use monoio::{IoUringDriver, RuntimeBuilder};

use crate::async_rows;
use crate::contenders::Contender;
use crate::executor::Executor;
use crate::page::{PAGE_SIZE, Page};

/// See [`Monoio`].
pub(crate) const CONTENDER: Contender = Contender {
    name: "monoio",
    settings: "0.2, `RuntimeBuilder::<IoUringDriver>` with timers and the `sync` feature, 1024 \
               entries; closures by `futures_channel::mpsc`",
    measure: async_rows::measure::<Monoio>,
};

/// The io_uring runtime.
struct Monoio;

/// A page as its reads take it.
struct Buffer(Box<Page>);

// SAFETY: the page is on the heap, so that it stays where it is as the box moves; all of it is
// initialized.
unsafe impl IoBufMut for Buffer {
    fn write_ptr(&mut self) -> *mut u8 {
        self.0.0.as_mut_ptr()
    }

    fn bytes_total(&mut self) -> usize {
        PAGE_SIZE
    }

    unsafe fn set_init(&mut self, _pos: usize) {}
}

impl Executor for Monoio {
    fn block_on<T: 'static>(_cpu: usize, future: impl Future<Output = T> + 'static) -> Result<T> {
        let mut runtime = RuntimeBuilder::<IoUringDriver>::new()
            .enable_timer()
            .with_entries(1024)
            .build()
            .context("building a runtime")?;
        Ok(runtime.block_on(future))
    }

    type Join<T: 'static> = monoio::task::JoinHandle<T>;

    fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> Self::Join<T> {
        monoio::spawn(future)
    }

    fn sleep_until(deadline: Instant) -> impl Future<Output = ()> + 'static {
        monoio::time::sleep_until(deadline.into())
    }

    type Socket = monoio::net::UnixStream;

    fn socket(socket: UnixStream) -> Result<Self::Socket> {
        monoio::net::UnixStream::from_std(socket).context("taking over a socket")
    }

    async fn read(socket: &mut Self::Socket, buffer: Vec<u8>) -> Result<(usize, Vec<u8>)> {
        let (n, buffer) = socket.read(buffer).await;
        Ok((n.context("reading from a socket")?, buffer))
    }

    async fn write(socket: &mut Self::Socket, mut buffer: Vec<u8>, n: usize) -> Result<Vec<u8>> {
        buffer.truncate(n);
        let (result, buffer) = socket.write_all(buffer).await;
        result.context("writing to a socket")?;
        Ok(buffer)
    }

    type File = monoio::fs::File;

    async fn file(file: File, _path: &Path) -> Result<Self::File> {
        monoio::fs::File::from_std(file).context("taking over a file")
    }

    async fn read_at(file: &Self::File, page: Box<Page>, offset: u64) -> Result<Box<Page>> {
        let (n, Buffer(page)) = file.read_at(Buffer(page), offset).await;
        anyhow::ensure!(n.context("reading")? == PAGE_SIZE, "a short read");
        Ok(page)
    }
}
