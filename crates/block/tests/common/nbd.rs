//! NBD servers of other projects.

use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use block::node::BlockNode;
use block::options::*;

use super::Rig;

/// A server on a socket of its own, killed with its value.
pub struct NbdServer {
    socket: PathBuf,
    program: &'static str,
    arguments: Vec<String>,
    child: Child,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl NbdServer {
    /// `qemu-nbd` with an image.
    pub fn qemu(image: &Path, options: &[&str]) -> NbdServer {
        let mut arguments: Vec<String> = ["-t", "-e", "8", "-f", "raw"]
            .into_iter()
            .chain(options.iter().copied())
            .map(Into::into)
            .collect();
        arguments.push("-k".into());
        let socket = new_socket();
        arguments.push(socket.display().to_string());
        arguments.push(image.display().to_string());
        NbdServer::start(socket, "qemu-nbd", arguments)
    }

    /// `nbdkit` with these arguments.
    pub fn nbdkit(arguments: &[&str]) -> NbdServer {
        let socket = new_socket();
        let arguments = nbdkit_arguments(&socket, arguments);
        NbdServer::start(socket, "nbdkit", arguments)
    }

    /// Starts it again with others, after [`kill`](Self::kill): one of `nbdkit`'s.
    pub fn restart_as(&mut self, arguments: &[&str]) {
        self.arguments = nbdkit_arguments(&self.socket, arguments);
        self.restart();
    }

    fn start(socket: PathBuf, program: &'static str, arguments: Vec<String>) -> NbdServer {
        let child = spawn(program, &arguments, &socket);
        NbdServer { socket, program, arguments, child }
    }

    /// Options to open its default export.
    pub fn options(&self) -> NbdOptions {
        NbdOptions {
            server: NbdServerAddr::Unix { path: self.socket.clone() },
            export: String::new(),
            tls_creds: None,
            tls_hostname: None,
            reconnect_delay: 0,
            open_timeout: 0,
        }
    }

    /// A node's options, with its default export.
    pub fn node(&self) -> BlockdevOptions {
        super::blockdev("disk", Driver::from(self.options()))
    }

    /// How many connections it has now.
    pub fn clients(&self) -> usize {
        // The fifth column is type, the sixth state: 03 is connected.
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        let path = self.socket.display().to_string();
        let connected = |line: &&str| line.ends_with(&path) && line.contains(" 0001 03 ");
        sockets.lines().filter(connected).count()
    }

    /// Kills it at once.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let _ = std::fs::remove_file(&self.socket);
    }

    /// Starts it again, after [`kill`](Self::kill).
    pub fn restart(&mut self) {
        self.child = spawn(self.program, &self.arguments, &self.socket);
    }
}

fn nbdkit_arguments(socket: &Path, arguments: &[&str]) -> Vec<String> {
    let own = ["-f".to_owned(), "-U".to_owned(), socket.display().to_string()];
    own.into_iter().chain(arguments.iter().map(|&text| text.to_owned())).collect()
}

fn new_socket() -> PathBuf {
    let nth = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("ringmill-nbd-{}-{nth}.sock", std::process::id()))
}

fn spawn(program: &str, arguments: &[String], socket: &Path) -> Child {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}: run scripts/setup-tests.sh"));
    let begun = Instant::now();
    // No event announces that the server listens.
    while UnixStream::connect(socket).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{program} does not listen");
        assert!(child.try_wait().unwrap().is_none(), "{program} {arguments:?} ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// A rig over a connection, whose tasks hold the loop until that shuts down.
pub struct Connected(Rig);

impl Connected {
    pub fn new(node: Arc<dyn BlockNode>) -> Self {
        Connected(Rig::new(node))
    }
}

impl Deref for Connected {
    type Target = Rig;

    fn deref(&self) -> &Rig {
        &self.0
    }
}

impl DerefMut for Connected {
    fn deref_mut(&mut self) -> &mut Rig {
        &mut self.0
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        let _ = self.0.event_loop.shut_down();
    }
}
