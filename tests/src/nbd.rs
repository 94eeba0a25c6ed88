//! An NBD server for real clients, and a raw client for malformed messages.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::{Scratch, ServerCommand, tool};

/// Time limit of an answer.
const ANSWER: Duration = Duration::from_secs(60);

/// Adds an NBD server on the socket `nbd.sock` in the scratch folder, with more `options`.
pub fn nbd_server<'a>(
    command: ServerCommand<'a>,
    scratch: &Scratch,
    options: &str,
) -> ServerCommand<'a> {
    let path = scratch.path("nbd.sock");
    command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}{options}", path.display()))
}

/// Adds an export of a node over NBD under the same name, with more `options`.
pub fn nbd_export<'a>(command: ServerCommand<'a>, node: &str, options: &str) -> ServerCommand<'a> {
    command.arg("--export").arg(format!("type=nbd,id=nbd-{node},node-name={node}{options}"))
}

/// The URI of an export on the server of [`nbd_server`].
pub fn nbd_uri(scratch: &Scratch, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", scratch.path("nbd.sock").display())
}

/// The URI with TLS and the credentials in a folder.
pub fn nbds_uri(scratch: &Scratch, name: &str, credentials: &Path) -> String {
    let (socket, credentials) = (scratch.path("nbd.sock"), credentials.display());
    let socket = socket.display();
    format!("nbds+unix://localhost/{name}?socket={socket}&tls-certificates={credentials}")
}

/// Runs a client to its end in the scratch folder.
pub fn client(scratch: &Scratch, program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(tool(program));
    // nbdsh needs Debian's Python.
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command.args(arguments).current_dir(scratch.dir()).output().expect("the client runs")
}

/// Runs a client that must succeed. Returns its standard output.
///
/// # Panics
///
/// If it fails.
pub fn client_output(scratch: &Scratch, program: &str, arguments: &[&str]) -> String {
    let output = client(scratch, program, arguments);
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// Client flags: fixed newstyle handshake, no zeroes.
const FLAGS: [u8; 4] = 3u32.to_be_bytes();

/// A client that sends any bytes, and does not interpret answers.
#[derive(Debug)]
pub struct RawNbd(pub UnixStream);

impl RawNbd {
    /// Connects without sending anything.
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("the server listens");
        stream.set_read_timeout(Some(ANSWER)).expect("a time-out");
        RawNbd(stream)
    }

    /// Connects and begins a fixed newstyle handshake.
    pub fn greet(socket: &Path) -> Self {
        let mut raw = Self::connect(socket);
        raw.expect_greeting();
        raw.send(&FLAGS);
        raw
    }

    /// Connects and goes to the transmission phase of an export, with simple replies.
    pub fn go(socket: &Path, name: &str) -> Self {
        let mut raw = Self::greet(socket);
        raw.option(1, name.as_bytes());
        raw.expect_export();
        raw
    }

    /// Sends the complete handshake for an export without waiting for the server's answers.
    pub fn ask_for(&mut self, name: &str) {
        self.send(&FLAGS);
        self.option(1, name.as_bytes());
    }

    /// Receives the server's greeting.
    pub fn expect_greeting(&mut self) {
        assert_eq!(&self.take::<18>()[..16], b"NBDMAGICIHAVEOPT");
    }

    /// Receives the answer to the selection of an export.
    pub fn expect_export(&mut self) {
        let _size_and_flags: [u8; 10] = self.take();
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the server takes it");
    }

    /// Sends an option.
    pub fn option(&mut self, option: u32, data: &[u8]) {
        self.option_header(option, data.len() as u32);
        self.send(data);
    }

    /// Sends an option's header.
    pub fn option_header(&mut self, option: u32, len: u32) {
        self.send(b"IHAVEOPT");
        self.send(&option.to_be_bytes());
        self.send(&len.to_be_bytes());
    }

    /// Sends a request's header.
    pub fn request(&mut self, command: u16, cookie: u64, offset: u64, len: u32) {
        self.send(&request(command, cookie, offset, len));
    }

    /// Receives the next bytes.
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).expect("an answer");
        bytes
    }

    /// Receives a simple reply: its error and its cookie.
    pub fn reply(&mut self) -> (u32, u64) {
        assert_eq!(self.take(), 0x6744_6698u32.to_be_bytes());
        (u32::from_be_bytes(self.take()), u64::from_be_bytes(self.take()))
    }

    /// Receives the reply to an option: the option and the reply's type. Discards its data.
    pub fn option_reply(&mut self) -> (u32, u32) {
        assert_eq!(self.take(), 0x0003_e889_0455_65a9u64.to_be_bytes());
        let (option, kind) = (u32::from_be_bytes(self.take()), u32::from_be_bytes(self.take()));
        let mut data = vec![0; u32::from_be_bytes(self.take()) as usize];
        self.0.read_exact(&mut data).expect("the reply's data");
        (option, kind)
    }

    /// Waits until the server has closed the connection. Discards what it sends before.
    pub fn wait_for_close(mut self) {
        let mut rest = [0; 4096];
        loop {
            match self.0.read(&mut rest) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
                Err(error) => panic!("the connection is still there: {error}"),
            }
        }
    }
}

/// A request's header.
pub fn request(command: u16, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}
