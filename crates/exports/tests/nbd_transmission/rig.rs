//! A server and a client that run alternately on one thread.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::Arc;

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::*;
use event_loop::ring::setup::RingChoice;
use event_loop::{EventLoop, LoopConfig, PollParams};
use exports::nbd::{NbdExport, NbdExportConfig, NbdListen, NbdServer, NbdServerConfig};

pub(crate) const READ: u8 = 0;
pub(crate) const WRITE: u8 = 1;
const NO_POLLING: PollParams = PollParams::OFF;

/// A server and its client, which run alternately on one thread.
pub(crate) struct Rig {
    pub(crate) event_loop: EventLoop,
    /// Loops without their own thread, turned with the rig's.
    others: Vec<EventLoop>,
    pub(crate) client: UnixStream,
    pub(crate) address: SocketAddr,
    /// Transmission flags.
    pub(crate) flags: u16,
    pub(crate) server: NbdServer,
    pub(crate) export: NbdExport,
}

pub(crate) fn turn(event_loop: &EventLoop) {
    event_loop.run_once(false).unwrap();
}

/// A client receives these bytes, while the loops have their `turn`.
pub(crate) fn take(mut client: &UnixStream, mut bytes: &mut [u8], turn: impl Fn()) {
    while !bytes.is_empty() {
        match client.read(bytes) {
            Ok(0) => panic!("the server has gone"),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => turn(),
            Err(error) => panic!("receiving: {error}"),
        }
    }
}

/// A request; a write's payload follows.
pub(crate) fn request(kind: u8, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
    bytes[7] = kind;
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// The head of a simple reply without an error.
pub(crate) fn done(cookie: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&0x6744_6698u32.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// Serves `node` as `disk`. The first of the loops controls it; connections take turns among all.
fn serve(
    event_loops: &[EventLoop],
    listen: NbdListen,
    node: Arc<dyn BlockNode>,
    writethrough: bool,
) -> (NbdServer, NbdExport) {
    let config = NbdServerConfig {
        listen,
        max_connections: 0,
        handshake_max_seconds: 0,
        tls: None,
        held: false,
    };
    let server = NbdServer::start(&event_loops[0], config).unwrap();
    let writable = !node.geometry().read_only;
    let export = server.add(NbdExportConfig {
        id: "disk".into(),
        name: "disk".into(),
        description: String::new(),
        node,
        io_threads: event_loops.iter().map(EventLoop::handle).collect(),
        writable,
        writethrough,
        allocation_depth: false,
        bitmaps: Vec::new(),
    });
    let added = Rc::new(RefCell::new(None));
    let to = added.clone();
    event_loops[0].spawn(async move {
        let export = export.await;
        to.replace(Some(export));
    });
    loop {
        if let Some(export) = added.take() {
            return (server, export.unwrap());
        }
        event_loops.iter().for_each(turn);
    }
}

impl Rig {
    /// The client is in the transmission phase, with simple replies.
    pub(crate) fn new(name: &str, ring: RingChoice, node: Arc<dyn BlockNode>) -> Rig {
        let config = LoopConfig { ring, poll: NO_POLLING, ..LoopConfig::default() };
        Rig::on(name, vec![EventLoop::new(config).unwrap()], node, false)
    }

    /// Connections take turns among the loops.
    pub(crate) fn on(
        name: &str,
        mut event_loops: Vec<EventLoop>,
        node: Arc<dyn BlockNode>,
        writethrough: bool,
    ) -> Rig {
        let name = format!("nbd-transmission-{}-{name}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let listen = NbdListen::Fds(vec![Arc::new(listener.into())]);
        let (server, export) = serve(&event_loops, listen, node, writethrough);
        let event_loop = event_loops.remove(0);
        let client = UnixStream::connect_addr(&address).unwrap();
        let others = event_loops;
        let mut rig = Rig { event_loop, others, client, address, flags: 0, server, export };
        rig.shake_hands();
        rig
    }

    /// The client is another one from here on; the one before.
    pub(crate) fn connect(&mut self) -> UnixStream {
        let client = UnixStream::connect_addr(&self.address).unwrap();
        let before = std::mem::replace(&mut self.client, client);
        self.shake_hands();
        before
    }

    /// Another client, which has been greeted.
    pub(crate) fn greeted(&mut self) -> UnixStream {
        let client = UnixStream::connect_addr(&self.address).unwrap();
        client.set_nonblocking(true).unwrap();
        let client = std::mem::replace(&mut self.client, client);
        self.take(&mut [0; 18]);
        std::mem::replace(&mut self.client, client)
    }

    /// Another server on the rig's loop.
    pub(crate) fn serve(
        &self,
        listen: NbdListen,
        node: Arc<dyn BlockNode>,
    ) -> (NbdServer, NbdExport) {
        serve(std::slice::from_ref(&self.event_loop), listen, node, false)
    }

    fn shake_hands(&mut self) {
        self.client.set_nonblocking(true).unwrap();
        self.take(&mut [0; 18]);
        self.send(&3u32.to_be_bytes());
        self.send(b"IHAVEOPT\0\0\0\x01\0\0\0\x04disk");
        let mut reply = [0; 10];
        self.take(&mut reply);
        self.flags = u16::from_be_bytes([reply[8], reply[9]]);
    }

    pub(crate) fn turn(&self) {
        self.others.iter().chain([&self.event_loop]).for_each(turn);
    }

    pub(crate) fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.client.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.turn(),
                Err(error) => panic!("sending: {error}"),
            }
        }
    }

    pub(crate) fn take(&mut self, bytes: &mut [u8]) {
        take(&self.client, bytes, || self.turn());
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        self.send(&request(WRITE, offset, offset, data.len() as u32));
        self.send(data);
    }

    pub(crate) fn takes_reply(&mut self, cookie: u64) {
        let mut reply = [0; 16];
        self.take(&mut reply);
        assert_eq!(reply, done(cookie));
    }
}

pub(crate) fn blockdev(driver: Driver, direct: bool) -> Arc<dyn BlockNode> {
    let mut options = BlockdevOptions::new(Some("disk"), driver);
    options.cache.direct = direct;
    NodeRegistry::new().open(&options).unwrap()
}

pub(crate) fn null() -> Arc<dyn BlockNode> {
    let null = NullOptions { size: 1 << 30, latency_ns: 0, read_zeroes: false };
    blockdev(Driver::null_co(null), false)
}
