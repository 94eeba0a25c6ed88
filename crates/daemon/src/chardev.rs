//! Character devices: the streams to monitors' clients.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use control::{ChardevBackend, ChardevOptions, SocketAddr};
use event_loop::{EventLoop, Readiness};
use exports::vhost_user::{Listen, Listener};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};
use nix::unistd::{read, write};

use super::DaemonError;
use crate::errno::words;
use crate::socket_activation::ActivationSockets;

/// Most bytes written at once: PIPE_BUF, which a writable pipe takes without blocking.
const AT_ONCE: usize = 4096;

/// The source of a monitor's clients.
pub(super) enum Chardev {
    /// Clients connect to a listening socket.
    Listening {
        listener: Listener,
        /// A first connection that was awaited at the start.
        first: Option<OwnedFd>,
    },
    /// A single stream, which exists from the start.
    Connected(Stream),
}

impl Chardev {
    /// Opens a character device.
    pub(super) async fn open(
        event_loop: &EventLoop,
        options: &ChardevOptions,
        given: &mut ActivationSockets,
    ) -> Result<Self, DaemonError> {
        match &options.backend {
            ChardevBackend::Stdio => {
                let duplicate = |fd: BorrowedFd<'_>| {
                    fd.try_clone_to_owned()
                        .map_err(|error| DaemonError::new(format!("stdio: fcntl failed: {error}")))
                };
                let input = duplicate(io::stdin().as_fd())?;
                let output = duplicate(io::stdout().as_fd())?;
                let stream = Stream::new(event_loop, Arc::new(input), Arc::new(output));
                Ok(Chardev::Connected(stream))
            }
            ChardevBackend::Connect(addr) => {
                let socket = connect(addr, given)?;
                Ok(Chardev::Connected(Stream::new(event_loop, socket.clone(), socket)))
            }
            ChardevBackend::Listen { addr, wait } => {
                let listener = listen(event_loop, addr, given)?;
                let mut first = None;
                if *wait {
                    let (id, address) = (&options.id, &options.backend);
                    log::warn!(
                        "chardev {id}: waiting for connection on: disconnected:{address}; wait=off \
                         starts without a client"
                    );
                    let socket = listener.accept(&format!("chardev {id}")).await;
                    let socket = socket.map_err(|error| {
                        DaemonError::new(format!("chardev {id}: accept failed: {error}"))
                    })?;
                    first = Some(socket);
                }
                Ok(Chardev::Listening { listener, first })
            }
        }
    }
}

impl Chardev {
    /// The listening socket, if there is one, for a handover.
    pub(super) fn hand_over(&self) -> io::Result<Option<(OwnedFd, Option<PathBuf>)>> {
        match self {
            Chardev::Listening { listener, .. } => listener.hand_over().map(Some),
            Chardev::Connected(_) => Ok(None),
        }
    }

    /// Creates one from a listening socket of the previous process.
    pub(super) fn taken_over(
        event_loop: &EventLoop,
        fd: OwnedFd,
        file: Option<PathBuf>,
    ) -> Result<Self, DaemonError> {
        let listener = taken_over(event_loop, fd, file)?;
        Ok(Chardev::Listening { listener, first: None })
    }
}

/// Listens on a socket of the previous process.
pub(super) fn taken_over(
    event_loop: &EventLoop,
    fd: OwnedFd,
    file: Option<PathBuf>,
) -> Result<Listener, DaemonError> {
    Listener::new(event_loop, Listen::TakenOver(Arc::new(fd), file)).map_err(DaemonError::new)
}

/// Listens at an address. Uses an inherited socket for that address if there is one.
pub(super) fn listen(
    event_loop: &EventLoop,
    addr: &SocketAddr,
    given: &mut ActivationSockets,
) -> Result<Listener, DaemonError> {
    let at = match addr {
        SocketAddr::Unix(path) => given.listen_at(path)?,
        SocketAddr::Fd(fd) => {
            let socket = given.listener(fd)?;
            return Listener::inherited(event_loop, socket).map_err(DaemonError::new);
        }
        SocketAddr::Inet { host, port } => {
            if let Some(socket) = given.at_host(host, *port..=*port, |_| true)?.pop() {
                return Listener::inherited(event_loop, socket).map_err(DaemonError::new);
            }
            // Both address families, if the machine has both.
            let hosts: &[&str] = if host.is_empty() { &["::", "0.0.0.0"] } else { &[host] };
            let failed = |error: io::Error| {
                let why = words(&error);
                DaemonError::new(format!("Failed to listen on '{host}:{port}': {why}"))
            };
            let mut bound = Err(io::Error::from(Errno::EADDRNOTAVAIL));
            for host in hosts {
                if bound.is_err() {
                    bound = TcpListener::bind((*host, *port));
                }
            }
            let listener = bound.map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            return Ok(Listener::over(event_loop, Arc::new(listener.into())));
        }
    };
    Listener::new(event_loop, at).map_err(DaemonError::new)
}

/// Connects to an address. May block: the daemon does not serve yet.
fn connect(addr: &SocketAddr, given: &mut ActivationSockets) -> Result<Arc<OwnedFd>, DaemonError> {
    let failed = |whom: &str, error: io::Error| {
        DaemonError::new(format!("Failed to connect to '{whom}': {}", words(&error)))
    };
    match addr {
        SocketAddr::Unix(path) => UnixStream::connect(path)
            .map(|socket| Arc::new(socket.into()))
            .map_err(|error| failed(&Path::display(path).to_string(), error)),
        SocketAddr::Inet { host, port } => TcpStream::connect((host.as_str(), *port))
            .map(|socket| Arc::new(socket.into()))
            .map_err(|error| failed(&format!("{host}:{port}"), error)),
        SocketAddr::Fd(fd) => given
            .socket(fd)
            .map_err(|_| DaemonError::new(format!("File descriptor '{fd}' is not a socket"))),
    }
}

/// A stream to and from a client. It may be in blocking mode: standard input and output are shared with
/// other processes, which a change of mode would affect. So each call first checks for readiness.
pub(super) struct Stream {
    event_loop: EventLoop,
    input: Arc<OwnedFd>,
    output: Arc<OwnedFd>,
    readable: Readiness,
}

impl Stream {
    pub(super) fn of_socket(event_loop: &EventLoop, socket: OwnedFd) -> Self {
        let socket = Arc::new(socket);
        Self::new(event_loop, socket.clone(), socket)
    }

    fn new(event_loop: &EventLoop, input: Arc<OwnedFd>, output: Arc<OwnedFd>) -> Self {
        let readable = Readiness::new(event_loop, input.clone(), bits(PollFlags::POLLIN));
        Stream { event_loop: event_loop.clone(), input, output, readable }
    }

    /// Whether input and output are different files: standard input and output.
    pub(super) fn is_of_two_files(&self) -> bool {
        !Arc::ptr_eq(&self.input, &self.output)
    }

    /// Waits for input and reads it. 0: the end of input.
    pub(super) async fn read(&self, buf: &mut [u8]) -> Result<usize, Errno> {
        loop {
            if !is_ready(self.input.as_fd(), PollFlags::POLLIN)? {
                self.readable.wait().await;
                continue;
            }
            match read(&self.input, buf) {
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                result => return result,
            }
        }
    }

    /// Ends the output. The other end is informed if the stream is a socket.
    pub(super) fn finish(&self) {
        // Fails if the connection has ended already.
        let _ = shutdown(self.output.as_raw_fd(), Shutdown::Write);
    }

    /// Writes a part of the bytes, once the client accepts some.
    pub(super) async fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let bytes = bytes.get(..AT_ONCE).unwrap_or(bytes);
        let mut writable = None;
        loop {
            if !is_ready(self.output.as_fd(), PollFlags::POLLOUT)? {
                let writable = writable.get_or_insert_with(|| {
                    let events = bits(PollFlags::POLLOUT);
                    Readiness::new(&self.event_loop, self.output.clone(), events)
                });
                writable.wait().await;
                continue;
            }
            match write(&self.output, bytes) {
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                result => return result,
            }
        }
    }
}

/// Whether a call would not block. True also if it would fail.
fn is_ready(fd: BorrowedFd<'_>, events: PollFlags) -> Result<bool, Errno> {
    match poll(&mut [PollFd::new(fd, events)], PollTimeout::ZERO) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn bits(events: PollFlags) -> u32 {
    events.bits().cast_unsigned().into()
}
