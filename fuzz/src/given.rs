//! Input from a service manager: variables that announce descriptors and a watchdog, and
//! the descriptors themselves, found by address, name and number.

use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::sync::Arc;

use control::FdName;
use daemon::DaemonError;
use daemon::fuzzing::{ActivationSockets, announced, watchdog};
use nix::unistd::Pid;

use crate::input::Input;
use crate::world;

/// The process that is asked.
const PID: i32 = 7;
/// Questions of an input.
const STEPS: usize = 32;

/// Descriptors of many kinds.
struct Kinds {
    path: PathBuf,
    kinds: Vec<Arc<OwnedFd>>,
    port: u16,
}

impl Kinds {
    fn new() -> Self {
        let path = world::own_path("given");
        let abstract_name = SocketAddr::from_abstract_name(path.as_os_str().as_encoded_bytes());
        let unix = UnixListener::bind(&path).expect("a socket");
        let other = UnixListener::bind_addr(&abstract_name.expect("a name")).expect("a socket");
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let port = tcp.local_addr().expect("it is bound").port();
        let mut kinds: Vec<OwnedFd> = vec![unix.into(), other.into(), tcp.into()];
        // Where there is no IPv6 there is no such socket to be given.
        kinds.extend(TcpListener::bind(("::", 0)).ok().map(OwnedFd::from));
        kinds.push(UdpSocket::bind("127.0.0.1:0").expect("a socket").into());
        kinds.push(std::io::pipe().expect("a pipe").0.into());
        kinds.push(std::fs::File::open("/").expect("it is there").into());
        Kinds { path, kinds: kinds.into_iter().map(Arc::new).collect(), port }
    }
}

thread_local! {
    static KINDS: Kinds = Kinds::new();
}

/// Runs one input: its first byte says what the rest is.
pub fn run(data: &[u8]) {
    match data.split_first() {
        Some((how, rest)) if how & 1 == 0 => variables(rest),
        Some((_, rest)) => KINDS.with(|kinds| questions(kinds, &mut Input::new(rest))),
        None => {}
    }
}

/// Lines with the values of variables; one that is missing is not set.
fn variables(bytes: &[u8]) {
    const NAMES: [&str; 5] =
        ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC"];
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.split('\n').collect();
    let variable = |name: &str| {
        let at = NAMES.iter().position(|known| *known == name).expect("all are known");
        lines.get(at).filter(|line| **line != "-").map(|line| (*line).to_owned())
    };
    let ids = [Some(Pid::from_raw(PID)), None];
    if let Ok(names) = announced(&ids, variable) {
        let names: Vec<_> = names.take(1000).collect();
        assert!(names.is_empty() || lines[0].parse() == Ok(PID), "it is for another process");
        assert!(names.iter().flatten().all(|name| !name.is_empty() && !name.contains(':')));
    }
    if let Ok(Some(usec)) = watchdog(&ids, variable) {
        assert!(usec > 0);
    }
}

/// Each descriptor is given out once, and only for the right question.
fn questions(kinds: &Kinds, input: &mut Input<'_>) {
    let mut given = ActivationSockets::default();
    let count = input.u8() % 12;
    for _ in 0..count {
        let (number, name) = (i32::from(input.u8()), name(input.u8()));
        let kind = &kinds.kinds[usize::from(input.u8()) % kinds.kinds.len()];
        let socket = kind.try_clone().expect("a descriptor");
        given.add(number, name, Arc::new(socket));
    }
    let mut taken = Vec::new();
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        let what = input.u8();
        let fd = match what & 8 {
            0 => FdName::Number(input.u8().into()),
            _ => FdName::Name(name(what).unwrap_or_default()),
        };
        let of = |error: DaemonError| assert!(!error.to_string().is_empty());
        match what & 7 {
            0 | 1 => given.listener(&fd).map_or_else(of, |socket| taken.push(socket)),
            2 | 3 => given.socket(&fd).map_or_else(of, |socket| taken.push(socket)),
            4 | 5 => {
                let path = if what & 16 == 0 { kinds.path.clone() } else { "/".into() };
                given.at_path(&path).map_or_else(of, |found| taken.extend(found));
            }
            _ => {
                const HOSTS: [&str; 6] = ["", "127.0.0.1", "::", "::1", "0.0.0.0", "127.0.0.2"];
                let host = HOSTS[usize::from(input.u8()) % HOSTS.len()];
                let (from, to) = match what & 16 {
                    0 => (kinds.port, kinds.port),
                    _ => (input.u16(), input.u16()),
                };
                let families = |address: &std::net::SocketAddr| {
                    if what & 32 == 0 { true } else { address.is_ipv4() }
                };
                given
                    .at_host(host, from..=to, families)
                    .map_or_else(of, |found| taken.extend(found));
            }
        }
        // Descriptors in use must not be given out again.
        if what & 64 != 0 {
            taken.clear();
        }
        for (n, socket) in taken.iter().enumerate() {
            assert!(!taken[..n].iter().any(|other| Arc::ptr_eq(other, socket)), "given twice");
        }
    }
    drop(given.unused());
}

fn name(which: u8) -> Option<String> {
    let names = [None, Some("a"), Some("connection"), Some("unknown")];
    names[usize::from(which) % names.len()].map(str::to_owned)
}
