//! A hostile client before a whole NBD server: sockets, a handshake, requests, payloads, silence.
//!
//! Server, export and a null node share one loop. Each reply is one to a request that was sent, and the
//! only one; whatever came before, the next client is served, and no descriptor stays behind.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use event_loop::EventLoop;
use exports::nbd::wire::reply::ReplyMode;
use exports::nbd::wire::request::{CommandType, RequestHeader};
use exports::nbd::{NbdExport, NbdExportConfig, NbdListen, NbdServer, NbdServerConfig};
use exports::vhost_user::ExportError;

use crate::input::Input;
use crate::world;

const SIZE: u64 = 1 << 20;
const STEPS: usize = 100;
/// Bytes that a client sends at most.
const MOST: usize = 1 << 20;

pub(crate) struct World {
    pub(crate) event_loop: EventLoop,
    pub(crate) server: NbdServer,
    pub(crate) export: NbdExport,
    path: PathBuf,
    /// Descriptors without a connected client.
    pub(crate) files: usize,
}

/// A server on one loop, with one export of a null node.
///
/// # Errors
///
/// It cannot listen there.
pub(crate) fn serve(
    event_loop: &EventLoop,
    listen: NbdListen,
) -> Result<(NbdServer, NbdExport), ExportError> {
    let config = NbdServerConfig {
        listen,
        max_connections: 4,
        handshake_max_seconds: 10,
        tls: None,
        held: false,
    };
    let server = NbdServer::start(event_loop, config)?;
    let config = NbdExportConfig {
        id: "fuzz".into(),
        name: "disk".into(),
        description: "a disk".into(),
        node: world::null_node(SIZE),
        io_threads: vec![event_loop.handle()],
        writable: true,
        writethrough: false,
        allocation_depth: false,
        bitmaps: Vec::new(),
    };
    let export = event_loop.block_on(server.add(config)).expect("it turns")?;
    Ok((server, export))
}

impl World {
    pub(crate) fn new() -> Self {
        let event_loop = world::quiet_loop();
        let path = world::own_path("nbd");
        let listen = NbdListen::Unix(path.clone());
        let (server, export) = serve(&event_loop, listen).expect("a server");
        let mut world = World { event_loop, server, export, path, files: 0 };
        world.serve_another();
        world.turn(1000);
        world.files = world::open_files();
        world
    }

    fn turn(&self, times: u32) {
        world::turn(&self.event_loop, times);
    }

    fn until(&self, what: &str, so: impl FnMut() -> bool) {
        world::until(&self.event_loop, what, so);
    }

    pub(crate) fn serve_another(&self) {
        let client = Client::connect(self);
        self.leave(client.served());
    }

    pub(crate) fn leave(&self, client: Client<'_>) {
        drop(client);
        self.until("the client is gone", || !self.export.is_connected());
        if self.files > 0 {
            self.until("all descriptors are closed", || world::open_files() <= self.files);
        }
    }
}

pub(crate) struct Client<'a> {
    world: &'a World,
    pub(crate) socket: UnixStream,
    heard: Vec<u8>,
    sent: usize,
    /// It has shaken hands as it should, and sent nothing but whole requests since: what it hears is
    /// understood.
    pub(crate) well: bool,
    mode: ReplyMode,
    /// Requests without a reply, and the bytes that those are answered with.
    pub(crate) asked: BTreeMap<u64, u32>,
    next_cookie: u64,
}

impl<'a> Client<'a> {
    pub(crate) fn connect(world: &'a World) -> Self {
        let socket = UnixStream::connect(&world.path).expect("the server listens");
        socket.set_nonblocking(true).expect("a socket");
        let mut client = Client {
            world,
            socket,
            heard: Vec::new(),
            sent: 0,
            well: false,
            mode: ReplyMode::Simple,
            asked: BTreeMap::new(),
            next_cookie: 1,
        };
        client.read();
        client
    }

    fn read(&mut self) {
        let mut bytes = [0; 16 << 10];
        while let Ok(n @ 1..) = self.socket.read(&mut bytes) {
            self.heard.extend(&bytes[..n]);
        }
    }

    /// Shakes hands, and has one request answered.
    pub(crate) fn served(mut self) -> Self {
        self.go(0);
        self.request(0, 0, 7, 0, 512);
        self.hears_all();
        self
    }

    /// Waits for the replies to all that it has asked for.
    pub(crate) fn hears_all(&mut self) {
        let world = self.world;
        world.until("all requests are answered", || {
            self.hear();
            self.asked.is_empty()
        });
    }

    /// Sends all of it, or gives up being understood.
    pub(crate) fn send(&mut self, mut bytes: &[u8]) {
        self.sent += bytes.len();
        for _ in 0..1000 {
            if bytes.is_empty() {
                return;
            }
            match self.socket.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(_) => {
                    self.hear();
                    self.world.turn(2);
                }
            }
        }
        self.well = false;
    }

    /// Shakes hands as it should.
    pub(crate) fn go(&mut self, how: u8) {
        self.send(&3u32.to_be_bytes());
        let option = |number: u32, data: &[u8]| {
            let len = (data.len() as u32).to_be_bytes();
            [b"IHAVEOPT", &number.to_be_bytes()[..], &len, data].concat()
        };
        let (mode, number) = match how & 3 {
            1 => (ReplyMode::Structured, 8),
            3 => (ReplyMode::Extended, 11),
            _ => (ReplyMode::Simple, 0),
        };
        self.mode = mode;
        if mode != ReplyMode::Simple {
            self.send(&option(number, &[]));
            if how & 4 != 0 {
                let context = b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation";
                self.send(&option(10, context));
            }
        }
        self.send(&option(7, b"\0\0\0\x04disk\0\0"));
        // The greeting, a reply to each option, the export, and maybe block sizes, before the last.
        let ack = [&0x3_e889_0455_65a9u64.to_be_bytes()[..], &[0, 0, 0, 7, 0, 0, 0, 1]].concat();
        let world = self.world;
        world.until("there is an answer to NBD_OPT_GO", || {
            self.read();
            self.heard.windows(16).any(|window| window == ack)
        });
        self.heard.clear();
        self.well = true;
    }

    fn request(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
        let header = self.header(flags, command, cookie, offset, len);
        self.send(&header);
    }

    /// The header of the next request. Notes which reply the request expects.
    fn header(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
        let extended = self.mode == ReplyMode::Extended;
        let command = command.into();
        let header = RequestHeader { flags, command, cookie, offset, len: len.into() };
        let (bytes, header_len) = header.encode(extended);
        self.asked.insert(cookie, if command == CommandType::Read { len } else { 0 });
        bytes[..header_len].to_vec()
    }

    /// Sends a part of a write, allowed or not; the rest of it.
    pub(crate) fn begin_request(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let (flags, offset) = (u16::from(input.u8()), u64::from(input.u8()) << 12);
        let (len, part) = (u32::from(input.u8()) << 9, usize::from(input.u8()) << 4);
        if !self.well {
            return Vec::new();
        }
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut bytes = self.header(flags, 1, cookie, offset, len);
        bytes.resize(bytes.len() + len as usize, 1);
        let rest = bytes.split_off(part.min(bytes.len()));
        self.send(&bytes);
        self.world.turn(4);
        rest
    }

    /// Sends the rest of a request, then another one; hears all that is to be heard of what it has asked for.
    pub(crate) fn go_on(&mut self, rest: &[u8]) {
        self.send(rest);
        if self.well {
            let cookie = self.next_cookie;
            self.next_cookie += 1;
            self.request(0, 0, cookie, 0, 512);
            self.hears_all();
        }
    }

    /// Closes the connection.
    pub(crate) fn hang_up(&self) {
        // The server may have.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Takes replies; each is to a request, once.
    pub(crate) fn hear(&mut self) {
        self.read();
        if !self.well {
            self.heard.clear();
            return;
        }
        let mut at = 0;
        while let Some((cookie, len)) = self.reply(&self.heard[at..]) {
            assert!(self.asked.remove(&cookie).is_some(), "a reply to a request, and the only one");
            at += len;
        }
        self.heard.drain(..at);
    }

    /// Of a whole reply at the front of the bytes, what it answers and how long it is.
    fn reply(&self, bytes: &[u8]) -> Option<(u64, usize)> {
        let field = |at: usize| Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk::<4>()?));
        let cookie = u64::from(field(8)?) << 32 | u64::from(field(12)?);
        // Without an error, and the only chunk.
        let (is_reply, len) = match self.mode {
            ReplyMode::Simple => {
                let data = self.asked.get(&cookie).filter(|_| bytes[4..8] == [0; 4]);
                (field(0)? == 0x6744_6698, 16 + data.copied().unwrap_or(0))
            }
            ReplyMode::Structured => {
                (field(0)? == 0x668e_33ef && bytes[4..6] == [0, 1], 20 + field(16)?)
            }
            ReplyMode::Extended => {
                (field(0)? == 0x6e8a_278c && bytes[4..6] == [0, 1], 32 + field(28)?)
            }
        };
        assert!(is_reply, "what comes is a reply");
        (bytes.len() >= len as usize).then_some((cookie, len as usize))
    }

    pub(crate) fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() & 7 {
            0 if !self.well && self.sent == 0 => {
                let how = input.u8();
                self.go(how);
            }
            0 => {
                let payload: [u8; 16] = input.array();
                self.well = false;
                self.send(&payload);
            }
            1 => {
                let (number, len) = (u32::from(input.u8()), u32::from(input.u8()));
                self.well = false;
                let head = [b"IHAVEOPT", &number.to_be_bytes()[..], &len.to_be_bytes()].concat();
                self.send(&head);
                let data: Vec<u8> = (0..len.min(32)).map(|_| input.u8()).collect();
                self.send(&data);
            }
            2..=5 => {
                let (command, flags) = (u16::from(input.u8() & 15), u16::from(input.u8()));
                let (offset, len) = (u64::from(input.u16()) << 5, u32::from(input.u16()));
                let (offset, len) = match input.u8() {
                    0 => (input.u64(), input.u32()),
                    1 => (offset, len << 8),
                    _ => (offset << 4 & !511, len & !511),
                };
                let cookie = self.next_cookie;
                self.next_cookie += 1;
                self.request(flags, command, cookie, offset, len);
                // Longer ones end the connection.
                let has_payload =
                    command == 1 || self.mode == ReplyMode::Extended && flags & 0x20 != 0;
                if has_payload {
                    let most = MOST.saturating_sub(self.sent);
                    self.well &= len as usize <= most;
                    self.send(&vec![input.u8(); most.min(len as usize)]);
                }
                if command == 2 {
                    self.well = false;
                }
            }
            6 => self.world.turn(input.u8().into()),
            _ => {
                // Half of something.
                self.well = false;
                let bytes: [u8; 5] = input.array();
                self.send(&bytes);
            }
        }
        self.world.turn(1);
        self.hear();
    }
}

thread_local! {
    static WORLD: World = World::new();
}

/// Plays the client, then one that keeps to the rules.
pub fn run(data: &[u8]) {
    WORLD.with(|world| {
        let mut input = Input::new(data);
        let mut client = Client::connect(world);
        if input.u8() & 1 == 0 {
            client.go(input.u8());
        }
        for _ in 0..STEPS {
            if input.is_empty() || client.sent > MOST {
                break;
            }
            client.step(&mut input);
        }
        world.leave(client);
        world.serve_another();
    });
}
