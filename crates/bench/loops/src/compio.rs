//! compio: completion-based on each system, here io_uring.

#![allow(unsafe_code)]

use std::fs::File;
use std::future::Future;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use compio::BufResult;
use compio::buf::{IntoInner, IoBuf, IoBufMut, SetLen};
use compio::driver::{DriverType, ProactorBuilder};
use compio::fs::OpenOptions;
use compio::io::{AsyncRead, AsyncReadAt, AsyncWriteExt};
use compio::runtime::RuntimeBuilder;

use crate::async_rows;
use crate::contenders::Contender;
use crate::executor::Executor;
use crate::page::{PAGE_SIZE, Page};

/// See [`Compio`].
pub(crate) const CONTENDER: Contender = Contender {
    name: "compio",
    settings: "0.19, io_uring with SINGLE_ISSUER, DEFER_TASKRUN and TASKRUN_FLAG; closures by \
               `futures_channel::mpsc`",
    measure: async_rows::measure::<Compio>,
};

/// The runtime on one thread.
struct Compio;

/// A page in compio's buffer interface.
struct Buffer(Box<Page>);

impl IoBuf for Buffer {
    fn as_init(&self) -> &[u8] {
        &self.0.0
    }
}

impl SetLen for Buffer {
    unsafe fn set_len(&mut self, _len: usize) {}
}

impl IoBufMut for Buffer {
    fn as_uninit(&mut self) -> &mut [MaybeUninit<u8>] {
        let bytes: *mut [u8] = &raw mut self.0.0;
        // SAFETY: the same bytes with the same lifetime. Initialised bytes are valid as `MaybeUninit`, and the callee writes
        // no uninitialised bytes.
        unsafe { &mut *(bytes as *mut [MaybeUninit<u8>]) }
    }
}

impl Executor for Compio {
    fn block_on<T: 'static>(_cpu: usize, future: impl Future<Output = T> + 'static) -> Result<T> {
        let mut proactor = ProactorBuilder::new();
        proactor
            .driver_type(DriverType::IoUring)
            .single_issuer(true)
            .defer_taskrun(true)
            .taskrun_flag(true);
        let runtime =
            RuntimeBuilder::new().with_proactor(proactor).build().context("building a runtime")?;
        Ok(runtime.block_on(future))
    }

    type Join<T: 'static> = Join<T>;

    fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> Self::Join<T> {
        Join(compio::runtime::spawn(future))
    }

    fn sleep_until(deadline: Instant) -> impl Future<Output = ()> + 'static {
        compio::time::sleep_until(deadline)
    }

    type Socket = compio::net::UnixStream;

    fn socket(socket: UnixStream) -> Result<Self::Socket> {
        compio::net::UnixStream::from_std(socket).context("taking over a socket")
    }

    async fn read(socket: &mut Self::Socket, buffer: Vec<u8>) -> Result<(usize, Vec<u8>)> {
        let BufResult(n, buffer) = socket.read(buffer).await;
        Ok((n.context("reading from a socket")?, buffer))
    }

    async fn write(socket: &mut Self::Socket, buffer: Vec<u8>, n: usize) -> Result<Vec<u8>> {
        let BufResult(result, slice) = socket.write_all(buffer.slice(..n)).await;
        result.context("writing to a socket")?;
        Ok(slice.into_inner())
    }

    type File = compio::fs::File;

    async fn file(_file: File, path: &Path) -> Result<Self::File> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_DIRECT);
        options.open(path).await.context("opening a file")
    }

    async fn read_at(file: &Self::File, page: Box<Page>, offset: u64) -> Result<Box<Page>> {
        let BufResult(n, Buffer(page)) = file.read_at(Buffer(page), offset).await;
        anyhow::ensure!(n.context("reading")? == PAGE_SIZE, "a short read");
        Ok(page)
    }
}

/// A task's handle that propagates panics.
struct Join<T>(compio::runtime::JoinHandle<T>);

impl<T: 'static> Future for Join<T> {
    type Output = T;

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<T> {
        std::pin::Pin::new(&mut self.0)
            .poll(cx)
            .map(|result| result.unwrap_or_else(|_| panic!("no task is cancelled here")))
    }
}
