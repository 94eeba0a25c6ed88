//! A listening socket for front ends or monitors, created here or inherited.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use event_loop::{EventLoop, Readiness};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, FcntlArg, OFlag, fcntl, open};
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockopt,
    listen, socket, sockopt,
};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{Gid, Uid, fchownat};

use super::error::ExportError;

/// Nanoseconds until the next attempt when the process is out of descriptors, or the machine out of memory:
/// no event reports the end of that.
const RETRY_NS: u64 = 500_000_000;

/// Most attempts to connect to a socket of a process that is gone, and the pause between two attempts.
const LAST_LOOKS: u32 = 100;
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The place where front ends connect.
#[derive(Debug)]
pub enum Listen {
    /// A UNIX socket at this path, created here and removed at the end (`addr.type=unix`).
    Path(PathBuf),
    /// An inherited listening UNIX socket (`addr.type=fd`). It becomes non-blocking for all processes
    /// that share it. Kept as long as it is listened on.
    Fd(Arc<OwnedFd>),
    /// A listening socket that was made before, mostly by the previous process, and the socket's file if it has
    /// to be removed at the end.
    TakenOver(Arc<OwnedFd>, Option<PathBuf>),
}

impl Listen {
    /// Listens at a path, on a socket file of another user and group.
    ///
    /// # Errors
    ///
    /// Names the call, the socket and the reason.
    pub fn owned_by(path: &Path, user: Uid, group: Gid) -> Result<Self, ExportError> {
        let name = path.display().to_string();
        let fail = |call, error| ExportError::Listen { socket: name.clone(), call, error };
        let (socket, file) = bind_path(path, &name)?;
        file.give_to(user, group).map_err(|errno| fail("changing the owner", errno.into()))?;
        listen(&socket, Backlog::MAXCONN).map_err(|errno| fail("listen", errno.into()))?;
        file.stays.set(true);
        Ok(Listen::TakenOver(Arc::new(socket), Some(file.path.clone())))
    }

    /// Returns the listening socket that the process inherited (`addr.type=fd`).
    ///
    /// `fd` is the descriptor's number.
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

/// A listening socket.
///
/// Dropping it removes the socket's file, if the file is still its own.
pub struct Listener {
    event_loop: EventLoop,
    socket: Arc<OwnedFd>,
    readable: Readiness,
    file: Option<SocketFile>,
}

/// The file of a socket that was bound here.
struct SocketFile {
    path: PathBuf,
    /// Device and inode, because another process may have replaced the file.
    id: (u64, u64),
    /// Leave the file on drop.
    stays: Cell<bool>,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.stays.get() && file_id(&self.path).is_ok_and(|id| id == self.id) {
            // If this fails, the next process that binds to the path removes the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl SocketFile {
    /// Changes the owner of this file only. A user with access to the folder may have put a link in its place.
    fn give_to(&self, user: Uid, group: Gid) -> Result<(), Errno> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = open(&self.path, flags, Mode::empty())?;
        let found = fstat(&file)?;
        if (found.st_dev, found.st_ino) != self.id {
            return Err(Errno::ESTALE);
        }
        fchownat(&file, "", Some(user), Some(group), AtFlags::AT_EMPTY_PATH)
    }
}

fn file_id(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

impl Listener {
    /// Begins to listen.
    ///
    /// Replaces a socket file without a listening process.
    ///
    /// # Errors
    ///
    /// Names the call, the socket and the reason.
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
                // As expected, but only another process says so.
                if getsockopt(&fd, sockopt::AcceptConn) != Ok(true) {
                    return Err(ExportError::Config(format!("{name} is no listening socket")));
                }
                set_nonblocking(&fd).map_err(|e| fail("fcntl")(e.into()))?;
                // There may be no file to remove.
                let file = path.and_then(|path| {
                    let id = file_id(&path).ok()?;
                    Some(SocketFile { path, id, stays: Cell::new(false) })
                });
                (fd, file)
            }
        };
        Ok(Self::of(event_loop, socket, file))
    }

    /// Accepts on an inherited listening stream socket of any family.
    ///
    /// It becomes non-blocking for all processes that share it.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub fn inherited(event_loop: &EventLoop, socket: Arc<OwnedFd>) -> io::Result<Self> {
        set_nonblocking(&socket)?;
        Ok(Self::over(event_loop, socket))
    }

    /// Accepts on a non-blocking listening socket.
    pub fn over(event_loop: &EventLoop, socket: Arc<OwnedFd>) -> Self {
        Self::of(event_loop, socket, None)
    }

    fn of(event_loop: &EventLoop, socket: Arc<OwnedFd>, file: Option<SocketFile>) -> Self {
        let events = PollFlags::POLLIN.bits().cast_unsigned().into();
        let readable = Readiness::new(event_loop, socket.clone(), events);
        Listener { event_loop: event_loop.clone(), socket, readable, file }
    }

    /// Returns the socket for a handover, and its file to be removed at the end.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub fn hand_over(&self) -> io::Result<(OwnedFd, Option<PathBuf>)> {
        Ok((self.socket.try_clone()?, self.file.as_ref().map(|file| file.path.clone())))
    }

    /// Keeps the socket's file when the listener is dropped.
    pub fn leave_file(&self) {
        if let Some(file) = &self.file {
            file.stays.set(true);
        }
    }

    /// Stops listening, and removes the socket's file as dropping does.
    ///
    /// When the future completes, the loop has released the socket.
    pub async fn close(self) {
        let Listener { event_loop: _, socket, readable, file } = self;
        drop((socket, file));
        readable.release().await;
    }

    /// Waits for the next connection. `label` names the listener in log messages.
    ///
    /// # Errors
    ///
    /// The socket will never accept again.
    pub async fn accept(&self, label: &str) -> io::Result<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        loop {
            match accept4(self.socket.as_raw_fd(), flags) {
                Ok(fd) => return Ok(super::fd_passing::accepted(fd)),
                Err(Errno::EAGAIN) => self.readable.wait().await,
                Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                Err(errno @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)) => {
                    log::warn!("{label}: accept failed: {}; trying again", errno.desc());
                    let at = self.event_loop.now_ns() + RETRY_NS;
                    self.event_loop.sleep_until(at).await;
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

pub(crate) fn set_nonblocking(socket: impl AsFd) -> Result<(), Errno> {
    let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?) | OFlag::O_NONBLOCK;
    fcntl(&socket, FcntlArg::F_SETFL(flags)).map(drop)
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::Stream, flags, None)
}

/// Binds a socket to a path. A stale socket file is removed first.
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
    // Absolute, since a daemon changes its working directory.
    let path = std::path::absolute(path).map_err(|e| fail("getcwd", e))?;
    Ok((fd, SocketFile { path, id, stays: Cell::new(false) }))
}

/// Removes a socket file without a listening process.
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

/// Whether the listening process is gone. Its socket may live on in another process.
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
