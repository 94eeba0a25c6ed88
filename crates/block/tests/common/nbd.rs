//! NBD servers of other projects.

use std::io::{self, Read, Write};
use std::ops::{Deref, DerefMut};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
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
        options(&self.socket)
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

/// A server of one connection that knows an old handshake only. It has 1 MiB of sevens, which can be read.
pub struct OldServer {
    socket: PathBuf,
    thread: Option<JoinHandle<io::Result<()>>>,
}

/// The handshake of an [`OldServer`].
#[derive(Debug, Clone, Copy)]
pub enum Old {
    /// Before there were options, with these export flags.
    Oldstyle(u32),
    /// With these handshake flags. The only option is `NBD_OPT_EXPORT_NAME`, for an export `old`.
    Newstyle(u16),
}

impl OldServer {
    pub fn start(handshake: Old) -> OldServer {
        let socket = new_socket();
        let listener = UnixListener::bind(&socket).unwrap();
        let serve = move || {
            let mut client = listener.accept()?.0;
            match handshake {
                Old::Oldstyle(flags) => {
                    let magic = [0x4e42_444d_4147_4943, 0x0000_4202_8186_1253, 1u64 << 20];
                    let mut greeting = magic.map(u64::to_be_bytes).concat();
                    greeting.extend(flags.to_be_bytes());
                    greeting.extend([0; 124]);
                    client.write_all(&greeting)?;
                }
                Old::Newstyle(flags) if !choose(&mut client, flags)? => return Ok(()),
                Old::Newstyle(_) => {}
            }
            let mut request = [0; 28];
            while client.read_exact(&mut request).is_ok() {
                let len = u32::from_be_bytes(request[24..].try_into().unwrap()) as usize;
                let is_read = request[6..8] == [0, 0];
                let error = if is_read { 0u32 } else { 22 };
                let reply = [0x6744_6698, error].map(u32::to_be_bytes).concat();
                client.write_all(&[&reply[..], &request[8..16]].concat())?;
                client.write_all(&vec![7; if is_read { len } else { 0 }])?;
            }
            Ok(())
        };
        OldServer { socket, thread: Some(std::thread::spawn(serve)) }
    }

    /// A node's options, for reading.
    pub fn node(&self, export: &str) -> BlockdevOptions {
        let options = NbdOptions { export: export.to_owned(), ..options(&self.socket) };
        BlockdevOptions { read_only: true, ..super::blockdev("disk", Driver::from(options)) }
    }
}

/// Returns whether the client has chosen the export.
fn choose(client: &mut UnixStream, flags: u16) -> io::Result<bool> {
    let magic = [0x4e42_444d_4147_4943, 0x4948_4156_454f_5054u64];
    client
        .write_all(&[&magic.map(u64::to_be_bytes).concat()[..], &flags.to_be_bytes()].concat())?;
    let mut agreed = [0; 4];
    client.read_exact(&mut agreed)?;
    assert_eq!(u32::from_be_bytes(agreed), u32::from(flags & 3));
    loop {
        let mut header = [0; 16];
        client.read_exact(&mut header)?;
        let option = u32::from_be_bytes(header[8..12].try_into().unwrap());
        let mut data = vec![0; u32::from_be_bytes(header[12..].try_into().unwrap()) as usize];
        client.read_exact(&mut data)?;
        if option == 1 {
            let mut export = [&(1u64 << 20).to_be_bytes()[..], &[0, 1]].concat();
            export.resize(if flags & 2 == 0 { 134 } else { 10 }, 0);
            return if data == b"old" {
                client.write_all(&export).map(|()| true)
            } else {
                Ok(false)
            };
        }
        assert!(flags & 1 != 0, "option {option} before options could be refused");
        let mut reply = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
        reply.extend([option, 0x8000_0001, 0].map(u32::to_be_bytes).concat());
        client.write_all(&reply)?;
    }
}

impl Drop for OldServer {
    fn drop(&mut self) {
        // In case the client has not come.
        let _ = UnixStream::connect(&self.socket);
        let ended = self.thread.take().unwrap().join();
        let _ = std::fs::remove_file(&self.socket);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

/// Options for the default export of a server on that socket.
fn options(socket: &Path) -> NbdOptions {
    NbdOptions {
        server: NbdServerAddr::Unix { path: socket.to_owned() },
        export: String::new(),
        tls_creds: None,
        tls_hostname: None,
        reconnect_delay: 0,
        open_timeout: 0,
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
