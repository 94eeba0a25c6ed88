//! Tests Landlock without seccomp. With filters the kernel refuses most of these calls before Landlock sees
//! them, and a missing rule would go unnoticed.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;

use crate::{Config, Failed, Inner, Reach, Sandbox};

#[path = "../tests/common/mod.rs"]
mod common;

/// Targets outside the sandbox: listening sockets and another process.
struct Outside {
    tcp: TcpListener,
    _unix: UnixListener,
    name: SocketAddr,
    child: Child,
}

impl Outside {
    fn new(name: &str) -> Outside {
        let name = format!("ringmill-{name}-{}", std::process::id());
        let name = SocketAddr::from_abstract_name(name).unwrap();
        // cat(1) ends with its input.
        let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        Outside { tcp, _unix: UnixListener::bind_addr(&name).unwrap(), name, child }
    }

    /// Tries each way out: its name, its result, the first version of Landlock that refuses it, and the errno.
    fn tried(&self) -> [(&'static str, io::Result<()>, i32, i32); 6] {
        let file = File::open("/dev/null").and_then(|mut file| file.read(&mut [0]));
        let made = File::create("/dev/null").and_then(|mut file| file.write(&[0]));
        let connected = TcpStream::connect(self.tcp.local_addr().unwrap());
        let bound = TcpListener::bind("127.0.0.1:0");
        let to_socket = UnixStream::connect_addr(&self.name);
        [
            ("a file to be read", file.map(drop), 1, libc::EACCES),
            ("a file to be written", made.map(drop), 1, libc::EACCES),
            ("a connection by TCP", connected.map(drop), 4, libc::EACCES),
            ("a port of TCP", bound.map(drop), 4, libc::EACCES),
            ("an abstract socket", to_socket.map(drop), 6, libc::EPERM),
            ("a signal to another process", self.signal(), 6, libc::EPERM),
        ]
    }

    #[allow(unsafe_code)]
    fn signal(&self) -> io::Result<()> {
        // SAFETY: takes numbers; 0 checks the permission to signal.
        match unsafe { libc::kill(self.child.id().cast_signed(), 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A thread without filters reaches all targets, and none after `confine`.
fn reaches_nothing(name: &str, confine: fn(&Sandbox) -> Result<(), Failed>) {
    let reach = Reach { files: Some(Vec::new()), connect: Some(Vec::new()), ..Reach::default() };
    let config = Config { reach, ..Config::default() };
    let filters = Err("none, for the test".to_owned());
    let sandbox = Sandbox(Arc::new(Inner { config, filters }));
    let outside = Outside::new(name);
    let version = common::landlock_of_the_kernel();
    let attempts = move || {
        for (what, result, ..) in outside.tried() {
            result.unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        confine(&sandbox).unwrap();
        for (what, result, since, errno) in outside.tried() {
            let expected = if version >= since { Some(errno) } else { None };
            let found = result.err().map(|error| error.raw_os_error().unwrap());
            assert_eq!(found, expected, "{what}, Landlock ABI {version}");
        }
    };
    // The confinement of a thread cannot be lifted.
    thread::spawn(attempts).join().unwrap();
}

#[test]
fn an_io_thread_reaches_nothing() {
    reaches_nothing("io", Sandbox::io_thread);
}

#[test]
fn a_pool_s_thread_reaches_nothing() {
    reaches_nothing("pool", Sandbox::pool_thread);
}

#[test]
fn a_helper_reaches_only_named_paths() {
    reaches_nothing("helper", Sandbox::helper_thread);
}

#[test]
fn the_control_thread_reaches_only_named_paths() {
    reaches_nothing("control", |sandbox| sandbox.serve(true).map(drop));
}
