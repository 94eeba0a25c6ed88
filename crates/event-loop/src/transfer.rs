//! Reads, writes and connections of a file, with the caller's own buffers.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::rc::Rc;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, accept4, connect, getsockopt, socket,
    sockopt,
};

use crate::buf::{IoBufs, MemoryOwner};
use crate::event_loop::EventLoop;
use crate::op::{Engine, IoOp, LoopFile};

/// A buffer that belongs to an operation, or to several in a row.
///
/// An exclusive (`AsMut`) or shared (`AsRef`) borrow of it lasts from the beginning to `Transfer::finish`: meanwhile no code
/// accesses, moves or drops it.
struct Held<B>(UnsafeCell<B>);

impl<B: 'static> MemoryOwner for Held<B> {}

/// A buffer with what is left of it to be transferred.
struct Transfer<B> {
    rest: IoBufs,
    held: Rc<Held<B>>,
}

impl<B: AsMut<[u8]> + 'static> Transfer<B> {
    fn to_fill(buf: B) -> Self {
        let held = Rc::new(Held(UnsafeCell::new(buf)));
        // SAFETY: the only reference; it ends as a pointer below.
        let bytes = unsafe { &mut *held.0.get() }.as_mut();
        let (base, len) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the borrow of the buffer lasts, see `Held`, so its bytes stay where they are, and only `rest` has
        // access. The kernel may fill them.
        unsafe { Self::of(held, base, len) }
    }
}

impl<B: AsRef<[u8]> + 'static> Transfer<B> {
    fn to_write(buf: B) -> Self {
        let held = Rc::new(Held(UnsafeCell::new(buf)));
        // SAFETY: no exclusive reference exists before `finish`.
        let bytes = unsafe { &*held.0.get() }.as_ref();
        let (base, len) = (bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: as in `to_fill`, with a shared borrow: `rest` is only for writes, which read the bytes.
        unsafe { Self::of(held, base, len) }
    }
}

impl<B: 'static> Transfer<B> {
    /// # Safety
    ///
    /// The bytes are valid while `held` is, for the transfer's direction.
    unsafe fn of(held: Rc<Held<B>>, base: *mut u8, len: usize) -> Self {
        let mut rest = IoBufs::with_capacity(1);
        rest.set_owner(held.clone());
        // SAFETY: this function's contract.
        unsafe { rest.push(base, len) };
        Transfer { rest, held }
    }

    /// Ends the buffer's borrow.
    fn finish(self) -> io::Result<B> {
        drop(self.rest);
        // Nothing else has a reference: the operations have completed, and given theirs back.
        let held = Rc::into_inner(self.held);
        held.map(|held| held.0.into_inner()).ok_or_else(|| io::Error::other("the buffer is in use"))
    }
}

/// A range of a buffer's bytes, as a buffer.
///
/// ```
/// use event_loop::Part;
///
/// let part = Part::new(vec![1, 2, 3], 1..3);
/// assert_eq!(part.as_ref(), [2, 3]);
/// assert_eq!(part.into_inner(), [1, 2, 3]);
/// ```
#[derive(Debug, Clone)]
pub struct Part<B> {
    buf: B,
    range: Range<usize>,
}

impl<B> Part<B> {
    /// Returns the bytes `range` of `buf`, cut at the end of `buf`.
    pub fn new(buf: B, range: Range<usize>) -> Self {
        Part { buf, range }
    }

    /// Returns the whole buffer.
    pub fn into_inner(self) -> B {
        self.buf
    }

    fn cut(&self, len: usize) -> Range<usize> {
        let end = self.range.end.min(len);
        self.range.start.min(end)..end
    }
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for Part<B> {
    fn as_ref(&self) -> &[u8] {
        let bytes = self.buf.as_ref();
        bytes.get(self.cut(bytes.len())).unwrap_or_default()
    }
}

impl<B: AsMut<[u8]>> AsMut<[u8]> for Part<B> {
    fn as_mut(&mut self) -> &mut [u8] {
        let len = self.buf.as_mut().len();
        let range = self.cut(len);
        self.buf.as_mut().get_mut(range).unwrap_or_default()
    }
}

/// Reads, writes and connections, with buffers of the caller's: a `Vec<u8>`, a `Box<[u8]>`, an array, or any other
/// owner of bytes. The buffer's length counts, not its capacity. A [`Part`] is a range of a buffer.
///
/// The buffer moves into the operation, and comes back with the result. After an error it is dropped.
///
/// Dropping a future cancels its operation, and the loop keeps the buffer until the kernel is done with it. A read that
/// is dropped when its bytes arrive may lose these bytes. A write that is dropped may have been carried out.
///
/// # Errors
///
/// Those of the system call, without `EINTR` and, on pipes, `EAGAIN`. `ECANCELED`: the loop shuts down, or
/// [`EventLoop::cancel`] was called.
///
/// # Panics
///
/// The futures panic as that of [`EventLoop::operate`].
impl LoopFile {
    /// Reads bytes from byte `offset` of the file on. Returns their number, and the buffer.
    ///
    /// The number is 0 at the end of the file, and may be less than the buffer's length before.
    pub async fn read_at<B: AsMut<[u8]> + 'static>(
        &self,
        buf: B,
        offset: u64,
    ) -> io::Result<(usize, B)> {
        self.transfer(IoOp::Read { offset }, Transfer::to_fill(buf)).await
    }

    /// Fills the buffer from byte `offset` of the file on.
    ///
    /// # Errors
    ///
    /// [`UnexpectedEof`](io::ErrorKind::UnexpectedEof): the file has fewer bytes.
    ///
    /// ```
    /// use event_loop::{EventLoop, LoopConfig};
    ///
    /// let event_loop = EventLoop::new(LoopConfig::default())?;
    /// let file = event_loop.file(std::fs::File::open("/proc/self/exe")?);
    /// let magic = event_loop.block_on(file.read_exact_at([0; 4], 0))??;
    /// assert_eq!(&magic, b"\x7fELF");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn read_exact_at<B: AsMut<[u8]> + 'static>(
        &self,
        buf: B,
        offset: u64,
    ) -> io::Result<B> {
        let end = io::ErrorKind::UnexpectedEof;
        self.whole(
            |done| IoOp::Read { offset: offset.saturating_add(done) },
            Transfer::to_fill(buf),
            end,
        )
        .await
    }

    /// Writes the whole buffer from byte `offset` of the file on. Returns the buffer.
    pub async fn write_all_at<B: AsRef<[u8]> + 'static>(
        &self,
        buf: B,
        offset: u64,
    ) -> io::Result<B> {
        let write = |done| IoOp::Write { offset: offset.saturating_add(done), dsync: false };
        self.whole(write, Transfer::to_write(buf), io::ErrorKind::WriteZero).await
    }

    /// Writes the file's bytes and metadata to stable storage, fsync(2).
    pub async fn sync_all(&self) -> io::Result<()> {
        self.sync(false).await
    }

    /// Writes the file's bytes to stable storage, and the metadata that reading them needs, fdatasync(2).
    pub async fn sync_data(&self) -> io::Result<()> {
        self.sync(true).await
    }

    async fn sync(&self, data_only: bool) -> io::Result<()> {
        self.carry_out(IoOp::Fsync { data_only }, IoBufs::new()).await.0.map(drop)
    }

    /// Receives the first bytes that arrive at a socket or pipe. Returns their number, and the buffer.
    ///
    /// The number is 0 at the end of the stream.
    pub async fn recv<B: AsMut<[u8]> + 'static>(&self, buf: B) -> io::Result<(usize, B)> {
        self.read_at(buf, 0).await
    }

    /// Fills the buffer from a socket or pipe.
    ///
    /// # Errors
    ///
    /// [`UnexpectedEof`](io::ErrorKind::UnexpectedEof): the stream ends before.
    pub async fn recv_exact<B: AsMut<[u8]> + 'static>(&self, buf: B) -> io::Result<B> {
        let end = io::ErrorKind::UnexpectedEof;
        self.whole(|_| IoOp::Read { offset: 0 }, Transfer::to_fill(buf), end).await
    }

    /// Sends the whole buffer to a socket or pipe. Returns the buffer.
    pub async fn send_all<B: AsRef<[u8]> + 'static>(&self, buf: B) -> io::Result<B> {
        let write = |_| IoOp::Write { offset: 0, dsync: false };
        self.whole(write, Transfer::to_write(buf), io::ErrorKind::WriteZero).await
    }

    /// Waits until the file is ready for one of `events`, `POLL*` bits of poll(2). Returns the bits that are set.
    pub async fn ready(&self, events: u32) -> io::Result<u32> {
        let (mask, _) = self.carry_out(IoOp::Poll { events }, IoBufs::new()).await;
        mask.map(|mask| mask as u32)
    }

    /// Accepts a connection on a listening socket. Returns the connection, registered with the same loop.
    ///
    /// Makes the listening socket non-blocking, for all that share it.
    ///
    /// ```
    /// use std::net::{TcpListener, TcpStream};
    ///
    /// use event_loop::{EventLoop, LoopConfig};
    ///
    /// let event_loop = EventLoop::new(LoopConfig::default())?;
    /// let listener = TcpListener::bind("127.0.0.1:0")?;
    /// let address = listener.local_addr()?;
    /// let listener = event_loop.file(listener);
    /// let echoed = event_loop.block_on(async {
    ///     let client = event_loop.connect(address).await?;
    ///     let server = listener.accept().await?;
    ///     client.send_all("hello").await?;
    ///     server.send_all(server.recv_exact([0; 5]).await?).await?;
    ///     client.recv_exact([0; 5]).await
    /// })??;
    /// assert_eq!(&echoed, b"hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn accept(&self) -> io::Result<LoopFile> {
        set_blocking(self.as_fd(), false)?;
        loop {
            match accept4(self.raw_fd(), SockFlag::SOCK_CLOEXEC) {
                // SAFETY: a new descriptor, without another owner.
                Ok(fd) => return Ok(self.event_loop()?.file(unsafe { OwnedFd::from_raw_fd(fd) })),
                Err(Errno::EAGAIN) => drop(self.ready(libc::POLLIN as u32).await?),
                // The client has left before.
                Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Transfers bytes once.
    async fn transfer<B: 'static>(
        &self,
        op: IoOp,
        mut transfer: Transfer<B>,
    ) -> io::Result<(usize, B)> {
        let (count, rest) = self.carry_out(op, transfer.rest).await;
        transfer.rest = rest;
        Ok((count?, transfer.finish()?))
    }

    /// Transfers all bytes. `op` gets the number of those that are done; `end` is the error if no more come.
    async fn whole<B: 'static>(
        &self,
        op: impl Fn(u64) -> IoOp,
        mut transfer: Transfer<B>,
        end: io::ErrorKind,
    ) -> io::Result<B> {
        let mut done = 0;
        while !transfer.rest.is_empty() {
            let (count, rest) = self.carry_out(op(done), transfer.rest).await;
            transfer.rest = rest;
            let count = count?;
            if count == 0 {
                return Err(end.into());
            }
            transfer.rest.advance(count);
            done += count as u64;
        }
        transfer.finish()
    }

    /// Carries out an operation, again if it was interrupted or a pipe is not ready.
    async fn carry_out(&self, op: IoOp, mut bufs: IoBufs) -> (io::Result<usize>, IoBufs) {
        loop {
            // The loop is not kept while the operation is in flight.
            let operation = match self.event_loop() {
                Ok(event_loop) => event_loop.operate(self, op, Engine::Uring, bufs),
                Err(error) => return (Err(error), bufs),
            };
            let (result, back) = operation.await;
            bufs = back;
            let events = match (&result, op) {
                (Err(error), _) if error.raw_os_error() == Some(libc::EINTR) => continue,
                (Err(error), _) if error.raw_os_error() != Some(libc::EAGAIN) => {
                    return (result, bufs);
                }
                (Err(_), IoOp::Read { .. }) => libc::POLLIN,
                (Err(_), IoOp::Write { .. }) => libc::POLLOUT,
                _ => return (result, bufs),
            };
            let ready = match self.event_loop() {
                Ok(event_loop) => {
                    let poll = IoOp::Poll { events: events as u32 };
                    event_loop.operate(self, poll, Engine::Uring, IoBufs::new())
                }
                Err(error) => return (Err(error), bufs),
            };
            if let (Err(error), _) = ready.await {
                return (Err(error), bufs);
            }
        }
    }

    /// Returns the loop, if it exists.
    fn event_loop(&self) -> io::Result<EventLoop> {
        let inner = self.0.inner.upgrade();
        inner.map(EventLoop).ok_or(io::Error::from_raw_os_error(libc::ECANCELED))
    }
}

impl EventLoop {
    /// Connects to a TCP server.
    ///
    /// Dropping the future closes the socket. Otherwise as the methods of [`LoopFile`]. For other sockets, connect by the
    /// standard library, and hand the socket over by [`file`](Self::file).
    ///
    /// # Errors
    ///
    /// Those of socket(2) and connect(2).
    pub async fn connect(&self, server: SocketAddr) -> io::Result<LoopFile> {
        let family = match server {
            SocketAddr::V4(_) => AddressFamily::Inet,
            SocketAddr::V6(_) => AddressFamily::Inet6,
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(family, SockType::Stream, flags, None)?;
        let connected = connect(socket.as_raw_fd(), &SockaddrStorage::from(server));
        let socket = self.file(socket);
        match connected {
            Ok(()) => {}
            Err(Errno::EINPROGRESS | Errno::EINTR) => {
                socket.ready(libc::POLLOUT as u32).await?;
                match getsockopt(&socket, sockopt::SocketError)? {
                    0 => {}
                    errno => return Err(io::Error::from_raw_os_error(errno)),
                }
            }
            Err(errno) => return Err(errno.into()),
        }
        set_blocking(socket.as_fd(), true)?;
        Ok(socket)
    }
}

/// Sets or clears `O_NONBLOCK`.
fn set_blocking(file: BorrowedFd<'_>, blocking: bool) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    if flags.contains(OFlag::O_NONBLOCK) == blocking {
        fcntl(file, FcntlArg::F_SETFL(flags ^ OFlag::O_NONBLOCK))?;
    }
    Ok(())
}
