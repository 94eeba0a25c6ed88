//! glommio: three rings per thread, a scheduler with shares.

#![allow(unsafe_code)]

use std::fs::File;
use std::future::Future;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, anyhow};
use futures_util::{AsyncReadExt, AsyncWriteExt};
use glommio::io::DmaFile;
use glommio::timer::Timer;
use glommio::{LocalExecutorBuilder, Placement};

use crate::async_rows;
use crate::contenders::Contender;
use crate::executor::Executor;
use crate::page::{PAGE_SIZE, Page};

/// See [`Glommio`].
pub(crate) const CONTENDER: Contender = Contender {
    name: "glommio",
    settings: "0.9, `LocalExecutorBuilder` with `Placement::Fixed`, no spinning (its default), \
               `DmaFile`; closures by `futures_channel::mpsc`",
    measure: async_rows::measure::<Glommio>,
};

/// A pinned executor.
struct Glommio;

impl Executor for Glommio {
    fn block_on<T: 'static>(cpu: usize, future: impl Future<Output = T> + 'static) -> Result<T> {
        let executor = LocalExecutorBuilder::new(Placement::Fixed(cpu))
            .make()
            .map_err(|error| anyhow!("building an executor: {error}"))?;
        Ok(executor.run(future))
    }

    type Join<T: 'static> = glommio::Task<T>;

    fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> Self::Join<T> {
        glommio::spawn_local(future)
    }

    fn sleep_until(deadline: Instant) -> impl Future<Output = ()> + 'static {
        let timer = Timer::new(deadline.saturating_duration_since(Instant::now()));
        async move {
            timer.await;
        }
    }

    type Socket = glommio::net::UnixStream;

    fn socket(socket: UnixStream) -> Result<Self::Socket> {
        // SAFETY: the descriptor is a connected, open socket without another owner.
        Ok(unsafe { Self::Socket::from_raw_fd(socket.into_raw_fd()) })
    }

    async fn read(socket: &mut Self::Socket, mut buffer: Vec<u8>) -> Result<(usize, Vec<u8>)> {
        let n = socket.read(&mut buffer).await?;
        Ok((n, buffer))
    }

    async fn write(socket: &mut Self::Socket, buffer: Vec<u8>, n: usize) -> Result<Vec<u8>> {
        socket.write_all(&buffer[..n]).await?;
        Ok(buffer)
    }

    type File = DmaFile;

    async fn file(_file: File, path: &Path) -> Result<Self::File> {
        DmaFile::open(path).await.map_err(|error| anyhow!("opening a file: {error}"))
    }

    async fn read_at(file: &Self::File, page: Box<Page>, offset: u64) -> Result<Box<Page>> {
        // glommio only reads into its own buffers.
        let read = file.read_at_aligned(offset, PAGE_SIZE).await;
        let read = read.map_err(|error| anyhow!("reading: {error}"))?;
        anyhow::ensure!(read.len() == PAGE_SIZE, "a short read");
        Ok(page)
    }
}
