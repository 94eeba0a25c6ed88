//! Sockets that this process inherits at its start: from a service manager (socket activation,
//! sd_listen_fds(3)), or from a previous daemon.
//!
//! Code that listens at an address looks here first. The file of such a socket is never removed: the service
//! manager keeps the socket and accepts connections while no daemon runs.

use std::fmt;
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6, ToSocketAddrs};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs, io, iter};

use control::FdName;
use exports::vhost_user::Listen;
use nix::sys::socket::{
    SockType, SockaddrStorage, UnixAddr, getpeername, getsockname, getsockopt, sockopt,
};
use nix::unistd::{Gid, Pid, Uid, close, getegid, geteuid};
use rustix::io::ioctl_fionbio;
use sandbox::Identity;

use crate::DaemonError;

/// The number of the first inherited socket: SD_LISTEN_FDS_START.
const FIRST: RawFd = 3;

/// Sockets that are not used yet, found by address, name or number.
#[derive(Debug, Default)]
pub struct ActivationSockets {
    given: Vec<Given>,
    /// The user and group of sockets that are made for paths. `None`: those of the process.
    owner: Option<(Uid, Gid)>,
}

#[derive(Debug)]
struct Given {
    /// Number at the start of the process; the present one differs.
    number: RawFd,
    /// Name from `LISTEN_FDNAMES`.
    name: Option<String>,
    /// `None`: not a listening stream socket.
    address: Option<Address>,
    /// Shared with the listener that uses it.
    socket: Arc<OwnedFd>,
    asked_for: bool,
}

/// The address of a listening socket.
#[derive(Debug, PartialEq, Eq)]
enum Address {
    Path(PathBuf),
    Inet {
        address: SocketAddr,
        /// IPV6_V6ONLY: IPv4 clients cannot connect.
        v6_only: bool,
    },
    /// Found only by name or number: an abstract name, or another address family.
    Other,
}

impl ActivationSockets {
    /// Returns the sockets that the environment names.
    ///
    /// They are for this process, or for `parent`, which has started this process as its replacement. Call this
    /// once, before any file is opened: the sockets' numbers are free from then on.
    ///
    /// # Errors
    ///
    /// The variables are wrong, or name a descriptor that is not open.
    pub fn of_environment(parent: Option<Pid>) -> Result<Self, DaemonError> {
        let ids = [Some(Pid::this()), parent];
        let names = announced(&ids, |name| env::var(name).ok()).map_err(DaemonError::new)?;
        let mut given = ActivationSockets::default();
        for (number, name) in (FIRST..).zip(names) {
            let failed = |error: &dyn fmt::Display| {
                let many = "descriptors from 3 on, as LISTEN_FDS says";
                DaemonError::new(format!("file descriptor {number}: {error}\nGive {many}."))
            };
            let Listen::Fd(socket) = Listen::inherited(number).map_err(|error| failed(&error))?
            else {
                continue;
            };
            // Programs started by this process must not inherit it; the copy is close-on-exec.
            close(number).map_err(|errno| failed(&errno.desc()))?;
            given.add(number, name, socket);
        }
        Ok(given)
    }

    /// Adds a socket. It is found by `number`, by name and by its address.
    pub fn add(&mut self, number: RawFd, name: Option<String>, socket: Arc<OwnedFd>) {
        let address = address_of(&socket);
        self.given.push(Given { number, name, address, socket, asked_for: false });
    }

    /// Has sockets that are made belong to the user and group that the process changes to.
    pub(crate) fn make_for(&mut self, identity: Option<&Identity>) {
        self.owner = identity.map(|is| (Uid::from_raw(is.uid), Gid::from_raw(is.gid)));
    }

    /// Returns where to listen for a path: the socket that was given for it, or a new one.
    ///
    /// # Errors
    ///
    /// The given socket is in use already, or the new one cannot be made.
    pub fn listen_at(&mut self, path: &Path) -> Result<Listen, DaemonError> {
        if let Some(socket) = self.at_path(path)? {
            return Ok(Listen::Fd(socket));
        }
        match self.owner.filter(|owner| *owner != (geteuid(), getegid())) {
            Some((user, group)) => {
                Listen::owned_by(path, user, group).map_err(DaemonError::with_advice)
            }
            None => Ok(Listen::Path(path.to_owned())),
        }
    }

    /// Finds the socket that listens at this path or another path of the same file.
    ///
    /// # Errors
    ///
    /// It is in use already.
    pub fn at_path(&mut self, path: &Path) -> Result<Option<Arc<OwnedFd>>, DaemonError> {
        let is_it = |given: &Given| match &given.address {
            Some(Address::Path(other)) => is_same(path, other),
            _ => false,
        };
        self.given.iter_mut().find(|given| is_it(given)).map(Given::take).transpose()
    }

    /// Finds the sockets that listen on addresses of a host, and a port of these.
    ///
    /// The host is written as in options.
    ///
    /// # Errors
    ///
    /// The host has no address, or a socket is in use already.
    pub fn at_host(
        &mut self,
        host: &str,
        ports: RangeInclusive<u16>,
        families: impl Fn(&SocketAddr) -> bool,
    ) -> Result<Vec<Arc<OwnedFd>>, DaemonError> {
        let mut candidates: Vec<_> =
            self.given.iter_mut().filter(|given| given.has_port(&ports)).collect();
        if candidates.is_empty() {
            return Ok(Vec::new());
        }
        // All addresses of this machine.
        let hosts: &[&str] = if host.is_empty() { &["::", "0.0.0.0"] } else { &[host] };
        let mut wanted = Vec::new();
        for host in hosts {
            let found = (*host, 0).to_socket_addrs().map_err(|error| {
                DaemonError::new(format!("address resolution failed for {host}: {error}"))
            })?;
            wanted.extend(found.filter(&families));
        }
        let taken = candidates.iter_mut().filter(|given| given.listens_on(&wanted));
        taken.map(|given| given.take()).collect()
    }

    /// Finds the listening socket with this name or number.
    ///
    /// Otherwise takes another inherited descriptor.
    ///
    /// # Errors
    ///
    /// There is none, it does not listen, or it is in use already.
    pub fn listener(&mut self, fd: &FdName) -> Result<Arc<OwnedFd>, DaemonError> {
        match self.find(fd) {
            Some(given) if given.address.is_none() => Err(DaemonError::new(given)),
            Some(given) => given.take(),
            None => {
                let socket = inherited(fd)?;
                let message = format!("file descriptor {fd}, not a listening stream socket");
                address_of(&socket).map(|_| socket).ok_or_else(|| DaemonError::new(message))
            }
        }
    }

    /// Finds the descriptor of any kind with this name or number.
    ///
    /// Otherwise takes another inherited one.
    ///
    /// # Errors
    ///
    /// There is none, or it is in use already.
    pub fn socket(&mut self, fd: &FdName) -> Result<Arc<OwnedFd>, DaemonError> {
        match self.find(fd) {
            Some(given) => given.take(),
            None => inherited(fd),
        }
    }

    /// Takes the connected stream socket with this name or number, which is not given again.
    ///
    /// # Errors
    ///
    /// The process was not started with such a socket, or it is in use already.
    pub fn connected(&mut self, fd: &FdName) -> Result<Arc<OwnedFd>, DaemonError> {
        let socket = match self.find(fd) {
            Some(given) if given.asked_for => {
                return Err(DaemonError::new(format!("{given} is used already")));
            }
            Some(given) => given.take()?,
            None => inherited(fd).map_err(|error| match fd {
                // In QSD's words.
                FdName::Number(number) => {
                    DaemonError::new(format!("File descriptor '{number}' is not a socket"))
                }
                FdName::Name(_) => error,
            })?,
        };
        let Ok(kind) = getsockopt(&socket, sockopt::SockType) else {
            return Err(DaemonError::new(format!("File descriptor '{fd}' is not a socket")));
        };
        if kind != SockType::Stream || getpeername::<SockaddrStorage>(socket.as_raw_fd()).is_err() {
            let message = format!("file descriptor {fd} is not a connected stream socket");
            return Err(DaemonError::new(message));
        }
        ioctl_fionbio(&socket, true).map_err(|error| {
            DaemonError::new(format!("file descriptor {fd}: FIONBIO failed: {error}"))
        })?;
        if let (None, FdName::Number(number)) = (self.find(fd), fd) {
            self.add(*number, None, socket.clone());
        }
        if let Some(given) = self.find(fd) {
            given.asked_for = true;
        }
        Ok(socket)
    }

    fn find(&mut self, fd: &FdName) -> Option<&mut Given> {
        self.given.iter_mut().find(|given| match fd {
            FdName::Number(number) => given.number == *number,
            FdName::Name(name) => given.name.as_ref() == Some(name),
        })
    }

    /// Returns a line about sockets that are not used.
    pub fn unused(&self) -> Option<String> {
        let unused = self.given.iter().filter(|given| !given.asked_for);
        let names: Vec<_> = unused.map(Given::to_string).collect();
        (!names.is_empty())
            .then(|| format!("inherited sockets that no option uses: {}", names.join("; ")))
    }
}

impl Given {
    fn take(&mut self) -> Result<Arc<OwnedFd>, DaemonError> {
        self.asked_for = true;
        if Arc::strong_count(&self.socket) > 1 {
            return Err(DaemonError::new(format!("{self} is used already")));
        }
        Ok(self.socket.clone())
    }

    fn has_port(&self, ports: &RangeInclusive<u16>) -> bool {
        match &self.address {
            Some(Address::Inet { address, .. }) => ports.contains(&address.port()),
            _ => false,
        }
    }

    fn listens_on(&self, wanted: &[SocketAddr]) -> bool {
        let Some(Address::Inet { address, v6_only }) = &self.address else { return false };
        // An IPv6 socket accepts IPv4 as well, unless it is IPv6-only.
        let all = address.ip().is_unspecified() && address.is_ipv6() && !v6_only;
        wanted
            .iter()
            .any(|wanted| wanted.ip() == address.ip() || (all && wanted.ip().is_unspecified()))
    }
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file descriptor {}", self.number)?;
        if let Some(name) = &self.name {
            write!(f, ", {name}")?;
        }
        match &self.address {
            Some(Address::Path(path)) => write!(f, ", {}", path.display()),
            Some(Address::Inet { address, .. }) => write!(f, ", {address}"),
            Some(Address::Other) => Ok(()),
            None => write!(f, ", not a listening stream socket"),
        }
    }
}

/// Takes a descriptor that was inherited without an announcement in the environment.
fn inherited(fd: &FdName) -> Result<Arc<OwnedFd>, DaemonError> {
    match fd {
        FdName::Number(number) => match Listen::inherited(*number).map_err(DaemonError::new)? {
            Listen::Fd(fd) | Listen::TakenOver(fd, _) => Ok(fd),
            Listen::Path(_) => Err(DaemonError::new(format!("no file descriptor {number}"))),
        },
        FdName::Name(name) => {
            let error = DaemonError::new(format!("Unable to parse FD number {name}"));
            Err(error.with_hint("No socket of that name was given in LISTEN_FDNAMES."))
        }
    }
}

/// Returns the names of the descriptors that the environment announces.
///
/// They are for one of these processes. The environment may announce more than can exist.
///
/// # Errors
///
/// `LISTEN_PID` or `LISTEN_FDS` is no number from 0.
pub fn announced(
    ids: &[Option<Pid>],
    variable: impl Fn(&str) -> Option<String>,
) -> Result<impl Iterator<Item = Option<String>>, String> {
    let number = |name: &str| match variable(name).map(|text| text.parse::<i32>()) {
        None => Ok(None),
        Some(Ok(number)) if number >= 0 => Ok(Some(number)),
        Some(_) => Err(format!("{name} in the environment is not a number")),
    };
    let is_meant = number("LISTEN_PID")?.is_some_and(|pid| ids.contains(&Some(Pid::from_raw(pid))));
    let count = if is_meant { number("LISTEN_FDS")?.unwrap_or(0) } else { 0 };
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let name = |name: &str| (!name.is_empty()).then(|| name.to_owned());
    let names: Vec<_> = names.split(':').map(name).collect();
    Ok(names.into_iter().chain(iter::repeat(None)).take(count.unsigned_abs() as usize))
}

/// The address of a listening socket; `None`: it does not listen, or is not a stream socket.
fn address_of(socket: &OwnedFd) -> Option<Address> {
    let listens = getsockopt(socket, sockopt::AcceptConn) == Ok(true);
    let is_stream = getsockopt(socket, sockopt::SockType) == Ok(SockType::Stream);
    let address: SockaddrStorage = getsockname(socket.as_raw_fd()).ok()?;
    let v6_only = getsockopt(socket, sockopt::Ipv6V6Only) == Ok(true);
    (listens && is_stream).then(|| {
        let v4 = address.as_sockaddr_in().map(|v4| SocketAddrV4::from(*v4).into());
        let v6 = address.as_sockaddr_in6().map(|v6| SocketAddrV6::from(*v6).into());
        match (v4.or(v6), address.as_unix_addr().and_then(UnixAddr::path)) {
            (Some(address), _) => Address::Inet { address, v6_only },
            (None, Some(path)) => Address::Path(path.to_owned()),
            (None, None) => Address::Other,
        }
    })
}

/// Whether two paths name the same socket.
fn is_same(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| -> io::Result<_> {
        let metadata = fs::metadata(path)?;
        Ok((metadata.dev(), metadata.ino()))
    };
    a == b || matches!((id(a), id(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announced_by(variables: &[(&str, &str)]) -> Result<Vec<Option<String>>, String> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        // Only the first ones: there may be very many.
        announced(&[Some(Pid::from_raw(7)), None], variable).map(|names| names.take(9).collect())
    }

    #[test]
    fn the_environment_announces_descriptors() {
        let (pid, fds) = (("LISTEN_PID", "7"), ("LISTEN_FDS", "3"));
        let some = |name: &str| Some(name.to_owned());
        assert_eq!(announced_by(&[]), Ok(vec![]));
        assert_eq!(announced_by(&[fds]), Ok(vec![]));
        assert_eq!(announced_by(&[("LISTEN_PID", "8"), fds]), Ok(vec![]));
        assert_eq!(announced_by(&[pid]), Ok(vec![]));
        assert_eq!(announced_by(&[pid, fds]), Ok(vec![None; 3]));
        // Fewer names than descriptors, and more.
        let names = |names| announced_by(&[pid, fds, ("LISTEN_FDNAMES", names)]);
        assert_eq!(names("a::c"), Ok(vec![some("a"), None, some("c")]));
        assert_eq!(names("a"), Ok(vec![some("a"), None, None]));
        assert_eq!(names("a:b:c:d"), Ok(vec![some("a"), some("b"), some("c")]));
        // A huge number must not cost memory.
        let many = announced_by(&[pid, ("LISTEN_FDS", "2147483647")]);
        assert_eq!(many, Ok(vec![None; 9]));
        for wrong in ["", "-1", "x", "99999999999"] {
            let error = Err("LISTEN_FDS in the environment is not a number".into());
            assert_eq!(announced_by(&[pid, ("LISTEN_FDS", wrong)]), error, "{wrong}");
        }
        assert!(announced_by(&[("LISTEN_PID", "x"), fds]).is_err());
    }

    #[test]
    fn addresses_of_a_host() {
        let given = |address: &str, v6_only| Given {
            number: 3,
            name: None,
            address: Some(Address::Inet { address: address.parse().unwrap(), v6_only }),
            socket: Arc::new(std::io::pipe().unwrap().0.into()),
            asked_for: false,
        };
        let listens_on = |given: &Given, wanted: &str| {
            given.listens_on(&[SocketAddr::new(wanted.parse().unwrap(), 0)])
        };
        let one = given("127.0.0.1:80", false);
        assert!(listens_on(&one, "127.0.0.1"));
        assert!(!listens_on(&one, "0.0.0.0") && !listens_on(&one, "127.0.0.2"));
        assert!(one.has_port(&(79..=80)) && !one.has_port(&(81..=90)));
        let all = given("[::]:80", false);
        assert!(listens_on(&all, "::") && listens_on(&all, "0.0.0.0"));
        assert!(!listens_on(&all, "127.0.0.1"));
        assert!(!listens_on(&given("[::]:80", true), "0.0.0.0"));
        assert!(!listens_on(&given("0.0.0.0:80", false), "::"));
    }
}
