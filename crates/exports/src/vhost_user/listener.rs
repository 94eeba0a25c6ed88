//! A socket that others connect to, front ends or monitors: one we make, or one that was handed to us.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use event_loop::{EventLoop, Readiness};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockopt,
    listen, socket, sockopt,
};

use super::error::ExportError;

/// Pause before the next try when the process is out of descriptors, or the machine out of memory:
/// no event tells when there are some again. Nanoseconds.
const RETRY_NS: u64 = 500_000_000;

/// Most tries to connect to a socket whose process is gone, and the pause between two tries.
const LAST_LOOKS: u32 = 100;
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Where front ends connect.
#[derive(Debug)]
pub enum Listen {
    /// A unix socket at this path, made here and removed in the end (`addr.type=unix`).
    Path(PathBuf),
    /// A listening unix socket that was inherited (`addr.type=fd`). Set to non-blocking, which
    /// whoever else has it sees too. Held for as long as it is listened on.
    Fd(Arc<OwnedFd>),
    /// A listening socket that the process before this one has handed over, and the socket's file if
    /// that is to be removed in the end.
    TakenOver(Arc<OwnedFd>, Option<PathBuf>),
}

impl Listen {
    /// The listening socket that the process inherited under this number (`addr.type=fd`).
    ///
    /// # Errors
    ///
    /// No such descriptor is open.
    pub fn inherited(fd: std::os::fd::RawFd) -> Result<Self, ExportError> {
        super::fd_passing::inherited(fd).map(|fd| Listen::Fd(Arc::new(fd))).map_err(|error| {
            ExportError::Listen { socket: format!("file descriptor {fd}"), call: "fcntl", error }
        })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Path(path) => write!(f, "{}", path.display()),
            Listen::TakenOver(_, Some(path)) => write!(f, "{}", path.display()),
            Listen::Fd(fd) | Listen::TakenOver(fd, None) => {
                write!(f, "file descriptor {}", fd.as_raw_fd())
            }
        }
    }
}

/// A listening socket. Dropping it removes the socket's file, if that is ours still.
pub struct Listener {
    event_loop: EventLoop,
    socket: Arc<OwnedFd>,
    readable: Readiness,
    file: Option<SocketFile>,
}

/// The file of a socket that we have bound.
struct SocketFile {
    path: PathBuf,
    /// Device and inode: another process may have put its socket in this place.
    id: (u64, u64),
    /// Leave the file on drop.
    stays: Cell<bool>,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.stays.get() && file_id(&self.path).is_ok_and(|id| id == self.id) {
            // What cannot be removed is found and removed by whoever binds to the path next.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn file_id(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

impl Listener {
    /// Begins to listen.
    ///
    /// A socket file that nobody answers on is replaced.
    ///
    /// # Errors
    ///
    /// Says what was tried on which socket, and why it failed.
    pub fn new(event_loop: &EventLoop, at: Listen) -> Result<Self, ExportError> {
        let name = at.to_string();
        let fail = |call: &'static str| {
            let socket = name.clone();
            move |error: io::Error| ExportError::Listen { socket, call, error }
        };
        let (socket, file) = match at {
            Listen::Path(path) => {
                let (socket, file) = bind_path(&path, &name)?;
                listen(&socket, Backlog::MAXCONN).map_err(|e| fail("listen")(e.into()))?;
                (Arc::new(socket), Some(file))
            }
            Listen::Fd(fd) => {
                let listening = getsockopt(&fd, sockopt::AcceptConn)
                    .map_err(|e| fail("getsockopt")(e.into()))?;
                let kind =
                    getsockopt(&fd, sockopt::SockType).map_err(|e| fail("getsockopt")(e.into()))?;
                let address = nix::sys::socket::getsockname::<UnixAddr>(fd.as_raw_fd());
                if !listening || kind != SockType::Stream || address.is_err() {
                    return Err(ExportError::Config(format!(
                        "{name} is not a listening unix stream socket"
                    )));
                }
                set_nonblocking(&fd).map_err(|e| fail("fcntl")(e.into()))?;
                (fd, None)
            }
            Listen::TakenOver(fd, path) => {
                // As it should be, but that is another process' word.
                if getsockopt(&fd, sockopt::AcceptConn) != Ok(true) {
                    return Err(ExportError::Config(format!("{name} is no listening socket")));
                }
                set_nonblocking(&fd).map_err(|e| fail("fcntl")(e.into()))?;
                // One whose file is gone has none to remove.
                let file = path.and_then(|path| {
                    let id = file_id(&path).ok()?;
                    Some(SocketFile { path, id, stays: Cell::new(false) })
                });
                (fd, file)
            }
        };
        Ok(Self::of(event_loop, socket, file))
    }

    /// Accepts on a stream socket of any family that listens already. It is set to non-blocking, which
    /// whoever else has it sees too.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub fn inherited(event_loop: &EventLoop, socket: Arc<OwnedFd>) -> io::Result<Self> {
        set_nonblocking(&socket)?;
        Ok(Self::over(event_loop, socket))
    }

    /// Accepts on a socket that listens already, and is non-blocking.
    pub fn over(event_loop: &EventLoop, socket: Arc<OwnedFd>) -> Self {
        Self::of(event_loop, socket, None)
    }

    fn of(event_loop: &EventLoop, socket: Arc<OwnedFd>, file: Option<SocketFile>) -> Self {
        let events = PollFlags::POLLIN.bits().cast_unsigned().into();
        let readable = Readiness::new(event_loop, socket.clone(), events);
        Listener { event_loop: event_loop.clone(), socket, readable, file }
    }

    /// What whoever takes over listens on: the socket, and its file if that is to be removed in the end.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub fn hand_over(&self) -> io::Result<(OwnedFd, Option<PathBuf>)> {
        Ok((self.socket.try_clone()?, self.file.as_ref().map(|file| file.path.clone())))
    }

    /// Makes the socket's file stay when the listener is dropped.
    pub fn leave_file(&self) {
        if let Some(file) = &self.file {
            file.stays.set(true);
        }
    }

    /// Waits for the next to connect. `who` waits, in log messages.
    ///
    /// # Errors
    ///
    /// The socket accepts no more, for good.
    pub async fn accept(&self, who: &str) -> io::Result<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        loop {
            match accept4(self.socket.as_raw_fd(), flags) {
                Ok(fd) => return Ok(super::fd_passing::accepted(fd)),
                Err(Errno::EAGAIN) => self.readable.wait().await,
                Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                Err(errno @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)) => {
                    log::warn!("{who}: accept failed: {}; trying again", errno.desc());
                    let at = self.event_loop.now_ns() + RETRY_NS;
                    self.event_loop.sleep_until(at).await;
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

fn set_nonblocking(socket: &OwnedFd) -> Result<(), Errno> {
    let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL)?) | OFlag::O_NONBLOCK;
    fcntl(socket, FcntlArg::F_SETFL(flags)).map(drop)
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::Stream, flags, None)
}

/// Binds a socket to a path; a socket file without anybody behind it makes room.
fn bind_path(path: &Path, name: &str) -> Result<(OwnedFd, SocketFile), ExportError> {
    let fail = |call, error| ExportError::Listen { socket: name.to_owned(), call, error };
    let address = UnixAddr::new(path).map_err(|errno| match errno {
        Errno::ENAMETOOLONG => ExportError::Config(format!(
            "socket path {name} is too long: a unix socket's has at most 107 bytes"
        )),
        errno => fail("bind", errno.into()),
    })?;
    let fd = new_socket().map_err(|e| fail("socket", e.into()))?;
    let mut bound = bind(fd.as_raw_fd(), &address);
    if bound == Err(Errno::EADDRINUSE) {
        remove_stale(path, &address, name)?;
        bound = bind(fd.as_raw_fd(), &address);
    }
    bound.map_err(|e| fail("bind", e.into()))?;
    let id = file_id(path).map_err(|e| fail("stat", e))?;
    // A daemon leaves the directory it was started in.
    let path = std::path::absolute(path).map_err(|e| fail("getcwd", e))?;
    Ok((fd, SocketFile { path, id, stays: Cell::new(false) }))
}

/// Removes a socket file, if that is what it is and nobody answers on it.
fn remove_stale(path: &Path, address: &UnixAddr, name: &str) -> Result<(), ExportError> {
    let fail = |call, error| ExportError::Listen { socket: name.to_owned(), call, error };
    let metadata = fs::symlink_metadata(path).map_err(|e| fail("stat", e))?;
    if !metadata.file_type().is_socket() {
        return Err(ExportError::Config(format!("{name} exists and is not a socket")));
    }
    for _ in 0..LAST_LOOKS {
        let probe = new_socket().map_err(|e| fail("socket", e.into()))?;
        match connect(probe.as_raw_fd(), address) {
            Err(Errno::ECONNREFUSED) => {
                return fs::remove_file(path).map_err(|e| fail("unlink", e));
            }
            // The file was removed meanwhile.
            Err(Errno::ENOENT) => return Ok(()),
            // The kernel closes a killed process's sockets together with its io_uring, after a delay.
            Ok(()) if is_gone(&probe) => std::thread::sleep(LOOK_AGAIN),
            // EAGAIN: a process listens, and its backlog is full.
            Ok(()) | Err(Errno::EAGAIN) => break,
            Err(errno) => return Err(fail("connect", errno.into())),
        }
    }
    Err(ExportError::SocketInUse { socket: name.to_owned() })
}

/// Whether the process that began to listen is gone. Another process may have been handed the socket.
fn is_gone(connected: &OwnedFd) -> bool {
    let peer = getsockopt(connected, sockopt::PeerCredentials).map(|peer| peer.pid());
    // 0: the process is in another PID namespace.
    peer.is_ok_and(|pid| pid > 0 && !Path::new(&format!("/proc/{pid}")).exists())
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use event_loop::LoopConfig;
    use nix::fcntl::{FcntlArg, OFlag, fcntl};

    use super::*;

    #[test]
    fn a_socket_that_was_taken_over_does_not_block() {
        let name = format!("ringmill-taken-over-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let socket = Arc::new(OwnedFd::from(UnixListener::bind_addr(&address).unwrap()));
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let _listener =
            Listener::new(&event_loop, Listen::TakenOver(socket.clone(), None)).unwrap();
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL).unwrap());
        assert!(flags.contains(OFlag::O_NONBLOCK));
    }
}
