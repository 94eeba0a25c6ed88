//! The sockets that clients connect to: UNIX, TCP, vsock, or inherited.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use event_loop::{EventLoop, Readiness};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrLike, SockaddrStorage, UnixAddr, VsockAddr,
    accept4, bind, getsockname, getsockopt, listen, setsockopt, socket, sockopt,
};

use crate::vhost_user::{ExportError, Listen, fd_passing, listener};

/// Longest name of an abstract socket, bytes, without its leading zero byte.
const ABSTRACT_LEN: usize = 107;

/// Nanoseconds until the next attempt when there are no descriptors or no memory: no event reports the end
/// of that.
const RETRY_NS: u64 = 500_000_000;

/// The place where NBD clients connect.
#[derive(Debug)]
pub enum NbdListen {
    /// A UNIX socket at this path, created here and removed at the end (`addr.type=unix`).
    Unix(PathBuf),
    /// An abstract UNIX socket (`addr.type=unix`, `addr.abstract=on`).
    Abstract {
        /// The name without the leading zero byte.
        name: PathBuf,
        /// Whether the address ends with the name, or zero bytes fill it up.
        tight: bool,
    },
    /// Guests, or the host, of this machine (`addr.type=vsock`).
    Vsock {
        /// The address of this machine.
        cid: u32,
        /// The port.
        port: u32,
    },
    /// TCP (`addr.type=inet`).
    Inet {
        /// A name or an address; empty: all addresses of this machine.
        host: String,
        /// The first port to try.
        port: u16,
        /// The last port to try.
        to: u16,
        /// Use IPv4 addresses.
        ipv4: bool,
        /// Use IPv6 addresses.
        ipv6: bool,
    },
    /// Inherited listening stream sockets (`addr.type=fd`). Kept as long as they are listened on.
    Fds(Vec<Arc<OwnedFd>>),
    /// Sockets from the previous process, with the files of sockets that have to be removed at the
    /// end.
    TakenOver(Vec<(Arc<OwnedFd>, Option<PathBuf>)>),
}

impl NbdListen {
    /// Returns the listening socket that the process inherited (`addr.type=fd`).
    ///
    /// `fd` is the descriptor's number.
    ///
    /// # Errors
    ///
    /// No such descriptor is open.
    pub fn inherited(fd: std::os::fd::RawFd) -> Result<Self, ExportError> {
        Ok(Listen::inherited(fd)?.into())
    }
}

impl From<&Path> for NbdListen {
    /// A UNIX socket.
    fn from(path: &Path) -> Self {
        NbdListen::Unix(path.to_owned())
    }
}

impl From<SocketAddr> for NbdListen {
    /// TCP, on exactly that port.
    fn from(at: SocketAddr) -> Self {
        NbdListen::Inet {
            host: at.ip().to_string(),
            port: at.port(),
            to: at.port(),
            ipv4: at.is_ipv4(),
            ipv6: at.is_ipv6(),
        }
    }
}

impl From<Listen> for NbdListen {
    fn from(at: Listen) -> Self {
        match at {
            Listen::Path(path) => NbdListen::Unix(path),
            Listen::Fd(socket) => NbdListen::Fds(vec![socket]),
            Listen::TakenOver(socket, file) => NbdListen::TakenOver(vec![(socket, file)]),
        }
    }
}

impl fmt::Display for NbdListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdListen::Unix(path) | NbdListen::Abstract { name: path, .. } => {
                write!(f, "{}", path.display())
            }
            NbdListen::Vsock { cid, port } => write!(f, "{cid}:{port}"),
            NbdListen::Inet { host, port, .. } if host.contains(':') => {
                write!(f, "[{host}]:{port}")
            }
            NbdListen::Inet { host, port, .. } => write!(f, "{host}:{port}"),
            NbdListen::TakenOver(_) => f.write_str("what was handed over"),
            NbdListen::Fds(fds) => {
                let fds: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
                write!(f, "file descriptor {}", fds.join(", "))
            }
        }
    }
}

/// Sockets that clients connect to.
pub(super) enum Listener {
    Path(listener::Listener),
    Sockets(EventLoop, Vec<Socket>),
}

/// One listening socket.
pub(super) struct Socket {
    kind: Kind,
    readable: Readiness,
}

enum Kind {
    Tcp(TcpListener),
    Unix(UnixListener),
    Vsock(OwnedFd),
}

impl AsFd for Kind {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Kind::Tcp(listener) => listener.as_fd(),
            Kind::Unix(listener) => listener.as_fd(),
            Kind::Vsock(fd) => fd.as_fd(),
        }
    }
}

impl Listener {
    /// Begins to listen.
    ///
    /// # Errors
    ///
    /// Names the call, the socket and the reason.
    pub(super) fn new(event_loop: &EventLoop, at: NbdListen) -> Result<Self, ExportError> {
        let name = at.to_string();
        let fail = |call| {
            let socket = name.clone();
            move |error: io::Error| ExportError::Listen { socket, call, error }
        };
        let kinds: Vec<(Kind, Option<Arc<OwnedFd>>)> = match at {
            NbdListen::Unix(path) => {
                let listener = listener::Listener::new(event_loop, Listen::Path(path))?;
                return Ok(Listener::Path(listener));
            }
            NbdListen::Abstract { name: path, tight } => {
                let bound = bind_abstract(&path, tight).map_err(fail("bind"))?;
                vec![(Kind::Unix(bound.into()), None)]
            }
            NbdListen::Vsock { cid, port } => {
                let bound = bind_vsock(cid, port);
                // QEMU's message, which names no address.
                let failed = |errno: Errno| {
                    ExportError::Config(format!("Failed to bind socket: {}", errno.desc()))
                };
                vec![(Kind::Vsock(bound.map_err(failed)?), None)]
            }
            NbdListen::TakenOver(mut sockets) => {
                if let [(_, Some(_))] = sockets.as_slice()
                    && let Some((fd, file)) = sockets.pop()
                {
                    let at = Listen::TakenOver(fd, file);
                    return Ok(Listener::Path(listener::Listener::new(event_loop, at)?));
                }
                let held = |(fd, _): (Arc<OwnedFd>, _)| Ok((inherited(&fd, &name)?, Some(fd)));
                sockets.into_iter().map(held).collect::<Result<_, ExportError>>()?
            }
            NbdListen::Inet { host, port, to, ipv4, ipv6 } => {
                let found = resolve(&host, ipv4, ipv6).map_err(fail("address resolution"))?;
                let bound = bind_first(&found, port..=to.max(port)).map_err(fail("bind"))?;
                bound.into_iter().map(|tcp| (Kind::Tcp(tcp), None)).collect()
            }
            NbdListen::Fds(fds) => {
                let inherited = |fd: Arc<OwnedFd>| Ok((inherited(&fd, &name)?, Some(fd)));
                fds.into_iter().map(inherited).collect::<Result<_, ExportError>>()?
            }
        };
        let mut sockets = Vec::new();
        for (kind, held) in kinds {
            let set = listener::set_nonblocking(&kind);
            set.map_err(|errno| fail("fcntl")(errno.into()))?;
            let copy = kind.as_fd().try_clone_to_owned().map_err(fail("fcntl"))?;
            let fd = held.unwrap_or_else(|| Arc::new(copy));
            let events = PollFlags::POLLIN.bits().cast_unsigned().into();
            sockets.push(Socket { kind, readable: Readiness::new(event_loop, fd, events) });
        }
        Ok(Listener::Sockets(event_loop.clone(), sockets))
    }

    /// The listening sockets for a handover.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(super) fn hand_over(&self) -> io::Result<Vec<(OwnedFd, Option<PathBuf>)>> {
        match self {
            Listener::Path(listener) => Ok(vec![listener.hand_over()?]),
            Listener::Sockets(_, sockets) => sockets
                .iter()
                .map(|socket| Ok((socket.kind.as_fd().try_clone_to_owned()?, None)))
                .collect(),
        }
    }

    /// Keeps a UNIX socket's file when the listener is dropped.
    pub(super) fn leave_file(&self) {
        match self {
            Listener::Path(listener) => listener.leave_file(),
            Listener::Sockets(..) => {}
        }
    }

    /// Stops listening. When the future completes, the address is free.
    pub(super) async fn close(self) {
        match self {
            Listener::Path(listener) => listener.close().await,
            Listener::Sockets(_, sockets) => {
                let watched: Vec<_> = sockets.into_iter().map(|socket| socket.readable).collect();
                for readable in watched {
                    readable.release().await;
                }
            }
        }
    }

    /// Waits for the next client.
    ///
    /// # Errors
    ///
    /// The socket will never accept again.
    pub(super) async fn accept(&self) -> io::Result<OwnedFd> {
        let (event_loop, sockets) = match self {
            Listener::Path(listener) => return listener.accept("NBD server").await,
            Listener::Sockets(event_loop, sockets) => (event_loop, sockets),
        };
        'again: loop {
            for socket in sockets {
                let accepted = match &socket.kind {
                    Kind::Tcp(listener) => listener.accept().map(|(stream, _)| {
                        // Otherwise replies wait for the acknowledgement of earlier ones. UNIX sockets do not have
                        // this option and do not need it.
                        let _ = stream.set_nodelay(true);
                        // Otherwise a client whose machine has crashed would keep its connection for ever.
                        let _ = setsockopt(&stream, sockopt::KeepAlive, &true);
                        stream.into()
                    }),
                    Kind::Unix(listener) => listener.accept().map(|(stream, _)| stream.into()),
                    Kind::Vsock(fd) => {
                        let accepted = accept4(fd.as_raw_fd(), SockFlag::SOCK_CLOEXEC);
                        accepted.map(fd_passing::accepted).map_err(io::Error::from)
                    }
                };
                match accepted
                    .map_err(|error| (Errno::from_raw(error.raw_os_error().unwrap_or(0)), error))
                {
                    Ok(fd) => return Ok(fd),
                    Err((Errno::EAGAIN, _)) => {}
                    // One wake-up may stand for several clients.
                    Err((Errno::EINTR | Errno::ECONNABORTED, _)) => continue 'again,
                    Err((
                        errno @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM),
                        _,
                    )) => {
                        log::warn!("NBD server: accept failed: {}; trying again", errno.desc());
                        event_loop.sleep_until(event_loop.now_ns() + RETRY_NS).await;
                        continue 'again;
                    }
                    Err((_, error)) => return Err(error),
                }
            }
            poll_fn(|cx| {
                let is_ready = |socket: &Socket| pin!(socket.readable.wait()).poll(cx).is_ready();
                // All sockets, so that each is registered for readiness.
                match sockets.iter().map(is_ready).fold(false, |any, ready| any | ready) {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            })
            .await;
        }
    }
}

/// The addresses of a host, without a port.
fn resolve(host: &str, ipv4: bool, ipv6: bool) -> io::Result<Vec<SocketAddr>> {
    let host = if host.is_empty() { "::" } else { host };
    let mut found: Vec<_> = (host, 0)
        .to_socket_addrs()?
        .filter(|address| if address.is_ipv4() { ipv4 } else { ipv6 })
        .collect();
    found.dedup();
    if found.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "no address of that family"));
    }
    Ok(found)
}

/// Binds all addresses to the first port that is free for all of them.
fn bind_first(
    addresses: &[SocketAddr],
    ports: std::ops::RangeInclusive<u16>,
) -> io::Result<Vec<TcpListener>> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    'ports: for port in ports {
        let mut bound: Vec<TcpListener> = Vec::new();
        // An ephemeral port is chosen once for all addresses.
        let mut port = port;
        for address in addresses {
            let mut address = *address;
            address.set_port(port);
            match TcpListener::bind(address) {
                Ok(listener) => {
                    port = listener.local_addr()?.port();
                    bound.push(listener);
                }
                // The hosts file of a machine without IPv6 may contain IPv6 addresses.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => last = error,
                Err(error) => {
                    last = error;
                    continue 'ports;
                }
            }
        }
        if !bound.is_empty() {
            return Ok(bound);
        }
    }
    Err(last)
}

/// Listens on an abstract address.
fn bind_abstract(name: &Path, tight: bool) -> io::Result<OwnedFd> {
    let mut bytes = name.as_os_str().as_encoded_bytes().to_vec();
    if !tight {
        bytes.resize(ABSTRACT_LEN.max(bytes.len()), 0);
    }
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    bind(socket.as_raw_fd(), &UnixAddr::new_abstract(&bytes)?)?;
    listen(&socket, Backlog::MAXCONN)?;
    Ok(socket)
}

/// Listens on a vsock address.
fn bind_vsock(cid: u32, port: u32) -> Result<OwnedFd, Errno> {
    let socket = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    bind(socket.as_raw_fd(), &VsockAddr::new(cid, port))?;
    listen(&socket, Backlog::MAXCONN)?;
    Ok(socket)
}

fn inherited(fd: &OwnedFd, name: &str) -> Result<Kind, ExportError> {
    let refuse = || ExportError::Config(format!("{name} is not a listening stream socket"));
    let listening = getsockopt(fd, sockopt::AcceptConn).map_err(|_| refuse())?;
    let kind = getsockopt(fd, sockopt::SockType).map_err(|_| refuse())?;
    let address = getsockname::<SockaddrStorage>(fd.as_raw_fd()).map_err(|_| refuse())?;
    let copy = fd.try_clone().map_err(|_| refuse())?;
    match address.family() {
        _ if !listening || kind != SockType::Stream => Err(refuse()),
        Some(AddressFamily::Unix) => Ok(Kind::Unix(copy.into())),
        Some(AddressFamily::Inet | AddressFamily::Inet6) => Ok(Kind::Tcp(copy.into())),
        Some(AddressFamily::Vsock) => Ok(Kind::Vsock(copy)),
        _ => Err(refuse()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::rc::Rc;

    use event_loop::LoopConfig;

    use super::*;

    /// The kernel detects clients whose machine has crashed; replies do not wait for acknowledgements.
    #[test]
    fn a_connection_by_tcp_is_asked_whether_it_is_still_there() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let at = NbdListen::Fds(vec![Arc::new(socket.into())]);
        let listener = Rc::new(Listener::new(&event_loop, at).unwrap());
        let _client = TcpStream::connect(address).unwrap();
        let accepted =
            event_loop.block_on(async move { listener.accept().await }).unwrap().unwrap();
        assert_eq!(getsockopt(&accepted, sockopt::KeepAlive), Ok(true));
        assert_eq!(getsockopt(&accepted, sockopt::TcpNoDelay), Ok(true));
    }
}
