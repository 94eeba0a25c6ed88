//! A hostile client before a whole NBD server: sockets, a handshake, requests, payloads, silence.
//!
//! Server, export and a null node share one loop. Each reply is one to a request that was sent, and the
//! only one; whatever came before, the next client is served, and no descriptor stays behind.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use event_loop::EventLoop;
use exports::nbd::{NbdExport, NbdExportConfig, NbdListen, NbdServer, NbdServerConfig};

use crate::input::Input;
use crate::world;

const SIZE: u64 = 1 << 20;
const STEPS: usize = 100;
/// Bytes that a client sends at most.
const MOST: usize = 1 << 20;

struct World {
    event_loop: EventLoop,
    _server: NbdServer,
    export: NbdExport,
    path: PathBuf,
    files: usize,
}

impl World {
    fn new() -> Self {
        let event_loop = world::quiet_loop();
        let path = world::own_path("nbd");
        let config = NbdServerConfig {
            listen: NbdListen::Unix(path.clone()),
            max_connections: 4,
            handshake_max_seconds: 10,
            tls: None,
        };
        let server = NbdServer::start(&event_loop, config).expect("a server");
        let config = NbdExportConfig {
            id: "fuzz".into(),
            name: "disk".into(),
            description: "a disk".into(),
            node: world::null_node(SIZE),
            io_threads: vec![event_loop.handle()],
            writable: true,
            writethrough: false,
        };
        let export = event_loop.block_on(server.add(config)).expect("it turns").expect("an export");
        let mut world = World { event_loop, _server: server, export, path, files: 0 };
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

    fn serve_another(&self) {
        let mut client = Client::connect(self);
        client.go(0);
        client.request(0, 0, 7, 0, 512);
        let mut replies = 0;
        self.until("the next client is served", || {
            client.hear();
            replies += client.replies;
            client.replies = 0;
            replies == 1
        });
        self.leave(client);
    }

    fn leave(&self, client: Client<'_>) {
        drop(client);
        self.until("the client is gone", || !self.export.is_connected());
        if self.files > 0 {
            self.until("all descriptors are closed", || world::open_files() <= self.files);
        }
    }
}

struct Client<'a> {
    world: &'a World,
    socket: UnixStream,
    heard: Vec<u8>,
    sent: usize,
    /// It has shaken hands as it should, and sent nothing but whole requests since: what it hears is
    /// understood.
    well: bool,
    structured: bool,
    /// Requests without a reply, and the bytes that those are answered with.
    asked: BTreeMap<u64, u32>,
    replies: u32,
    next_cookie: u64,
}

impl<'a> Client<'a> {
    fn connect(world: &'a World) -> Self {
        let socket = UnixStream::connect(&world.path).expect("the server listens");
        socket.set_nonblocking(true).expect("a socket");
        let mut client = Client {
            world,
            socket,
            heard: Vec::new(),
            sent: 0,
            well: false,
            structured: false,
            asked: BTreeMap::new(),
            replies: 0,
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

    /// Sends all of it, or gives up being understood.
    fn send(&mut self, mut bytes: &[u8]) {
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
    fn go(&mut self, how: u8) {
        self.send(&3u32.to_be_bytes());
        let option = |number: u32, data: &[u8]| {
            let len = (data.len() as u32).to_be_bytes();
            [b"IHAVEOPT", &number.to_be_bytes()[..], &len, data].concat()
        };
        self.structured = how & 1 != 0;
        if self.structured {
            self.send(&option(8, &[]));
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
        let bytes = [
            &0x2560_9513u32.to_be_bytes()[..],
            &flags.to_be_bytes(),
            &command.to_be_bytes(),
            &cookie.to_be_bytes(),
            &offset.to_be_bytes(),
            &len.to_be_bytes(),
        ];
        self.send(&bytes.concat());
        self.asked.insert(cookie, if command == 0 { len } else { 0 });
    }

    /// Takes replies; each is to a request, once.
    fn hear(&mut self) {
        self.read();
        if !self.well || self.structured {
            self.heard.clear();
            return;
        }
        let mut at = 0;
        while let Some(header) = self.heard[at..].first_chunk::<16>() {
            let field = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|n| header[at + n]));
            assert_eq!(field(0), 0x6744_6698, "what comes is a reply");
            let cookie = u64::from(field(8)) << 32 | u64::from(field(12));
            let &len = self.asked.get(&cookie).expect("a reply to a request, and the only one");
            let len = if field(4) == 0 { len as usize } else { 0 };
            if self.heard.len() - at - 16 < len {
                break;
            }
            self.asked.remove(&cookie);
            self.replies += 1;
            at += 16 + len;
        }
        self.heard.drain(..at);
    }

    fn step(&mut self, input: &mut Input<'_>) {
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
                if command == 1 {
                    let len = (len as usize).min(MOST.saturating_sub(self.sent));
                    self.send(&vec![input.u8(); len]);
                }
                if command == 2 || command == 1 && len as usize > MOST - MOST.min(self.sent) {
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
