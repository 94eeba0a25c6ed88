//! A connection of the client to an NBD server, with simple replies and only reads and writes. Received data is discarded.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use fastrand::Rng;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};

use super::queue::Op;
use super::requests::Requests;
use super::{Client, Load};

/// `NBD_REQUEST_MAGIC`, `NBD_SIMPLE_REPLY_MAGIC`.
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
/// Bytes of a request's header, and of a reply's.
const REQUEST_LEN: usize = 28;
const REPLY_LEN: usize = 16;
/// Maximum bytes per receive.
const INPUT: usize = 512 << 10;
/// Time limit of the server's part of the handshake.
const PATIENCE: Duration = Duration::from_secs(10);

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port of this machine.
    Tcp(u16),
}

enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// A connection to the export without a name, in the transmission phase.
pub(crate) struct Connection {
    socket: Socket,
    /// A block of random data.
    block: Vec<u8>,
    /// Requests to be sent by the next kick: the header, and whether a block follows.
    out: Vec<([u8; REQUEST_LEN], bool)>,
    /// The kind of each slot's request.
    ops: Vec<Op>,
    input: Vec<u8>,
    begin: usize,
    end: usize,
    /// The request whose reply is being received, its result, and the bytes of data outstanding.
    current: Option<(u16, i32, usize)>,
}

impl Address {
    fn connect(&self) -> std::io::Result<Socket> {
        let socket = match self {
            Self::Unix(path) => Socket::Unix(UnixStream::connect(path)?),
            Self::Tcp(port) => {
                let socket = TcpStream::connect(("127.0.0.1", *port))?;
                socket.set_nodelay(true)?;
                Socket::Tcp(socket)
            }
        };
        match &socket {
            Socket::Unix(socket) => socket.set_read_timeout(Some(PATIENCE))?,
            Socket::Tcp(socket) => socket.set_read_timeout(Some(PATIENCE))?,
        }
        Ok(socket)
    }

    /// Whether a server offers the export: it may listen before it has one.
    pub(crate) fn is_served(&self) -> bool {
        self.connect().is_ok_and(|mut socket| greet(&mut socket).is_ok())
    }

    /// The URI for clients, for the export without a name.
    pub(crate) fn uri(&self) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///?socket={}", path.display()),
            Self::Tcp(port) => format!("nbd://127.0.0.1:{port}/"),
        }
    }
}

impl Client<Connection> {
    /// Makes a connection for each of the load's queues.
    pub(crate) fn connect_nbd(address: &Address, load: &Load) -> Result<Self> {
        let mut queues = Vec::new();
        let mut capacity = 0;
        for _ in 0..load.queues {
            let (connection, size) = Connection::open(address, load)
                .with_context(|| format!("connecting to {}", address.uri()))?;
            queues.push(connection);
            capacity = size;
        }
        ensure!(
            capacity >= load.block_size as u64,
            "the export ({capacity} bytes) is smaller than a block"
        );
        Ok(Self { queues, capacity, load: load.clone(), stagger: 0 })
    }
}

impl Connection {
    /// Connects to the export without a name. Returns its size.
    fn open(address: &Address, load: &Load) -> Result<(Self, u64)> {
        let mut socket = address.connect()?;
        let size = greet(&mut socket)?;
        let mut random = Rng::with_seed(1);
        let block = (0..load.block_size.div_ceil(8)).flat_map(|_| random.u64(..).to_ne_bytes());
        let connection = Self {
            socket,
            block: block.take(load.block_size).collect(),
            out: Vec::with_capacity(load.depth),
            ops: vec![Op::Read; load.depth],
            input: vec![0; INPUT],
            begin: 0,
            end: 0,
            current: None,
        };
        Ok((connection, size))
    }

    /// Takes data of the current reply from the input. Returns whether the reply is complete.
    fn take_data(&mut self) -> bool {
        let Some((_, _, left)) = &mut self.current else { return false };
        let part = (*left).min(self.end - self.begin);
        self.begin += part;
        *left -= part;
        *left == 0
    }

    /// Takes the next reply's header from the input. Returns whether it was complete.
    fn take_header(&mut self) -> Result<bool> {
        let Some(header) = self.input[self.begin..self.end].first_chunk::<REPLY_LEN>() else {
            return Ok(false);
        };
        let word = |at: usize| {
            u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        ensure!(word(0) == REPLY, "the server's reply begins with {:#x}", word(0));
        let (error, slot) = (word(4), word(12));
        let op = self.ops.get(slot as usize).with_context(|| format!("a reply for {slot}"))?;
        let data = if *op == Op::Read && error == 0 { self.block.len() } else { 0 };
        self.current = Some((slot as u16, -(error as i32), data));
        self.begin += REPLY_LEN;
        Ok(true)
    }

    /// Receives available input. Returns whether there was any.
    fn receive(&mut self) -> Result<bool> {
        // Less than a header is left in the buffer.
        self.input.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        let fd = self.signal_fd().as_raw_fd();
        match recv(fd, &mut self.input[self.end..], MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Err(anyhow!("the server has closed the connection")),
            Ok(bytes) => {
                self.end += bytes;
                Ok(true)
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(errno) => Err(errno).context("receiving replies"),
        }
    }
}

/// Selects the export without a name by `NBD_OPT_EXPORT_NAME`, which implies simple replies. Returns its size.
fn greet(socket: &mut Socket) -> Result<u64> {
    const FIXED_NEWSTYLE: u16 = 1 << 0;
    const NO_ZEROES: u16 = 1 << 1;
    let mut greeting = [0; 18];
    socket.read_exact(&mut greeting).context("the server's greeting")?;
    ensure!(greeting.starts_with(b"NBDMAGICIHAVEOPT"), "no newstyle NBD server");
    let flags = u16::from_be_bytes([greeting[16], greeting[17]]);
    ensure!(flags & NO_ZEROES != 0, "the server knows only the oldest of handshakes");
    let mut answer = Vec::from(u32::from(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    answer.extend(b"IHAVEOPT");
    answer.extend(1u32.to_be_bytes());
    answer.extend(0u32.to_be_bytes());
    socket.write_all(&answer).context("the handshake")?;
    let mut export = [0; 10];
    socket.read_exact(&mut export).context("the export's size")?;
    Ok(export.first_chunk().map_or(0, |size| u64::from_be_bytes(*size)))
}

impl Requests for Connection {
    fn submit(&mut self, op: Op, offset: u64, slot: u16) -> Result<()> {
        let mut header = [0; REQUEST_LEN];
        header[..4].copy_from_slice(&REQUEST.to_be_bytes());
        header[7] = u8::from(op == Op::Write);
        header[8..16].copy_from_slice(&u64::from(slot).to_be_bytes());
        header[16..24].copy_from_slice(&offset.to_be_bytes());
        header[24..].copy_from_slice(&(self.block.len() as u32).to_be_bytes());
        *self.ops.get_mut(usize::from(slot)).context("the slot does not exist")? = op;
        self.out.push((header, op == Op::Write));
        Ok(())
    }

    fn kick(&mut self) -> Result<()> {
        let mut slices = Vec::with_capacity(self.out.len() * 2);
        for (header, with_block) in &self.out {
            slices.push(IoSlice::new(header));
            if *with_block {
                slices.push(IoSlice::new(&self.block));
            }
        }
        // This may block until the server takes the data. Replies to writes, and requests to read, are so short that the
        // other direction never blocks meanwhile.
        let mut slices = slices.as_mut_slice();
        while !slices.is_empty() {
            match self.socket.write_vectored(slices) {
                Ok(0) => bail!("the server takes no more requests"),
                Ok(bytes) => IoSlice::advance_slices(&mut slices, bytes),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("sending requests"),
            }
        }
        self.out.clear();
        Ok(())
    }

    fn completed(&mut self) -> Result<Option<(u16, i32)>> {
        loop {
            if self.take_data()
                && let Some((slot, result, _)) = self.current.take()
            {
                return Ok(Some((slot, result)));
            }
            if self.current.is_none() && self.take_header()? {
                continue;
            }
            if !self.receive()? {
                return Ok(None);
            }
        }
    }

    /// The socket stays readable while it has input.
    fn want_signal(&mut self) -> bool {
        false
    }

    fn signal_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Unix(socket) => socket.as_fd(),
            Socket::Tcp(socket) => socket.as_fd(),
        }
    }

    fn take_signal(&self) -> Result<()> {
        Ok(())
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Unix(socket) => socket.read(bytes),
            Self::Tcp(socket) => socket.read(bytes),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::Unix(socket) => socket.write(bytes),
            Self::Tcp(socket) => socket.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> std::io::Result<usize> {
        match self {
            Self::Unix(socket) => socket.write_vectored(slices),
            Self::Tcp(socket) => socket.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
