//! A vfio-user client, and the export that it talks to.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};

use block::node::BlockNode;
use event_loop::{IoThread, RingChoice, oneshot};
use exports::vfio_user::{VfioUserConfig, VfioUserExport};
use exports::vhost_user::{ExportError, Listen};
use guest_memory::GuestMemory;
use guest_memory::test_util::memfd_region;
use vmm_sys_util::eventfd::EventFd;

use crate::common::{self, Dir, PATIENCE, RamDisk, io_thread};

pub(crate) const VERSION: u16 = 1;
pub(crate) const DMA_MAP: u16 = 2;
pub(crate) const DMA_UNMAP: u16 = 3;
pub(crate) const DEVICE_GET_INFO: u16 = 4;
pub(crate) const GET_REGION_INFO: u16 = 5;
pub(crate) const GET_IRQ_INFO: u16 = 7;
pub(crate) const SET_IRQS: u16 = 8;
pub(crate) const REGION_READ: u16 = 9;
pub(crate) const REGION_WRITE: u16 = 10;
pub(crate) const DMA_READ: u16 = 11;
pub(crate) const DEVICE_RESET: u16 = 13;
pub(crate) const REGION_WRITE_MULTI: u16 = 15;
pub(crate) const DEVICE_FEATURE: u16 = 16;

pub(crate) const NO_REPLY: u32 = 1 << 4;

pub(crate) const ABAR: u32 = 5;
pub(crate) const CONFIG: u32 = 7;

pub(crate) const INTX: u32 = 0;
pub(crate) const MSI: u32 = 1;
pub(crate) const DATA_NONE: u32 = 1;
pub(crate) const DATA_EVENTFD: u32 = 4;
pub(crate) const UNMASK: u32 = 16;
pub(crate) const TRIGGER: u32 = 32;

/// Bytes of the guest's memory, which begins at 0.
pub(crate) const MEMORY: u64 = 1 << 20;

/// A daemon: a control thread, an I/O thread, an export of a disk of 1 MiB.
pub(crate) struct Daemon {
    pub(crate) disk: Arc<RamDisk>,
    dir: Dir,
    stop: oneshot::Sender<()>,
    stopped: mpsc::Receiver<Result<(), ExportError>>,
    _control: IoThread,
    _io_thread: IoThread,
}

impl Daemon {
    pub(crate) fn new() -> Self {
        Self::with_max_memory(None)
    }

    pub(crate) fn with_max_memory(max_memory: Option<u64>) -> Self {
        let (dir, disk) = (Dir::new(), RamDisk::new(2048));
        let control = io_thread("control", RingChoice::default());
        let io = io_thread("io", RingChoice::default());
        let config = VfioUserConfig {
            id: "e".into(),
            listen: Listen::Path(dir.socket()),
            io_threads: vec![io.handle().clone()],
            writable: true,
            writethrough: false,
            serial: "serial".into(),
            max_memory,
        };
        let node = disk.clone() as Arc<dyn BlockNode>;
        let (stop, stopping) = oneshot::channel();
        let (started, has_started) = mpsc::channel();
        let (end, stopped) = mpsc::channel();
        let run = move |event_loop: &event_loop::EventLoop| {
            let control = event_loop.clone();
            event_loop.spawn(async move {
                let export = VfioUserExport::ahci(&control, config, vec![node]).await.unwrap();
                export.begin();
                started.send(()).unwrap();
                let _ = stopping.await;
                let _ = end.send(export.stop_telling(|| {}).await);
            });
        };
        control.handle().spawn(run).unwrap();
        has_started.recv_timeout(PATIENCE).unwrap();
        Daemon { disk, dir, stop, stopped, _control: control, _io_thread: io }
    }

    pub(crate) fn connect(&self) -> UnixStream {
        let socket = common::connect(&self.dir.socket());
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    }

    /// A client that has agreed on a version.
    pub(crate) fn client(&self) -> Client {
        let mut client = Client::new(self.connect());
        client.ok(VERSION, &version(0), &[]);
        client
    }

    pub(crate) fn stop(self) {
        self.stop.send(());
        self.stopped.recv_timeout(PATIENCE).unwrap().unwrap();
    }
}

pub(crate) struct Client {
    pub(crate) socket: UnixStream,
    id: u16,
}

/// What a reply says: an errno, and the payload.
pub(crate) type Answer = (u32, Vec<u8>);

pub(crate) fn message(id: u16, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(id.to_ne_bytes());
    bytes.extend(command.to_ne_bytes());
    bytes.extend((16 + payload.len() as u32).to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    bytes.extend(payload);
    bytes
}

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub(crate) fn version(major: u16) -> Vec<u8> {
    let mut payload = words(&[major.into()]);
    payload.extend(b"{\"capabilities\":{\"max_msg_fds\":16,\"write_multiple\":true}}\0");
    payload
}

pub(crate) fn dma_map(address: u64, size: u64) -> Vec<u8> {
    let mut payload = words(&[32, 3, 0, 0]);
    payload.extend(address.to_ne_bytes());
    payload.extend(size.to_ne_bytes());
    payload
}

pub(crate) fn dma_unmap(address: u64, size: u64) -> Vec<u8> {
    let mut payload = words(&[24, 0]);
    payload.extend(address.to_ne_bytes());
    payload.extend(size.to_ne_bytes());
    payload
}

pub(crate) fn region(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut payload = offset.to_ne_bytes().to_vec();
    payload.extend(words(&[region, data.len() as u32]));
    payload.extend(data);
    payload
}

pub(crate) fn region_read(region: u32, offset: u64, count: u32) -> Vec<u8> {
    let mut payload = offset.to_ne_bytes().to_vec();
    payload.extend(words(&[region, count]));
    payload
}

pub(crate) fn set_irqs(flags: u32, index: u32, start: u32, count: u32) -> Vec<u8> {
    words(&[20, flags, index, start, count])
}

impl Client {
    /// One that has said nothing yet.
    pub(crate) fn new(socket: UnixStream) -> Self {
        Client { socket, id: 0 }
    }

    /// Counts a message that was sent by other means.
    pub(crate) fn expect_next(&mut self) {
        self.id += 1;
    }

    pub(crate) fn send(&mut self, command: u16, flags: u32, payload: &[u8], fds: &[RawFd]) {
        self.id = self.id.wrapping_add(1);
        let bytes = message(self.id, command, flags, payload);
        common::send_with(&self.socket, &bytes, fds);
    }

    /// The reply to the last message.
    pub(crate) fn answer(&mut self, command: u16) -> Answer {
        let mut header = [0; 16];
        self.socket.read_exact(&mut header).unwrap();
        let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((half(0), half(2)), (self.id, command));
        let mut payload = vec![0; word(4) as usize - 16];
        self.socket.read_exact(&mut payload).unwrap();
        let is_error = word(8) & 0x20 != 0;
        assert_eq!(word(8), if is_error { 0x21 } else { 1 });
        assert_eq!(is_error, word(12) != 0);
        (word(12), payload)
    }

    pub(crate) fn ask(&mut self, command: u16, payload: &[u8], fds: &[RawFd]) -> Answer {
        self.send(command, 0, payload, fds);
        self.answer(command)
    }

    pub(crate) fn ok(&mut self, command: u16, payload: &[u8], fds: &[RawFd]) -> Vec<u8> {
        let (errno, payload) = self.ask(command, payload, fds);
        assert_eq!(errno, 0, "command {command}");
        payload
    }

    pub(crate) fn errno(&mut self, command: u16, payload: &[u8]) -> i32 {
        let (errno, payload) = self.ask(command, payload, &[]);
        assert!(payload.is_empty());
        errno as i32
    }

    pub(crate) fn read(&mut self, of: u32, offset: u64) -> u32 {
        let payload = self.ok(REGION_READ, &region_read(of, offset, 4), &[]);
        assert_eq!(payload[..16], region_read(of, offset, 4));
        u32::from_ne_bytes(payload[16..].try_into().unwrap())
    }

    pub(crate) fn write(&mut self, to: u32, offset: u64, value: u32) {
        let payload = self.ok(REGION_WRITE, &region(to, offset, &value.to_ne_bytes()), &[]);
        assert_eq!(payload, region_read(to, offset, 4));
    }

    /// Sends these bytes, and then is gone.
    pub(crate) fn die(mut self, bytes: &[u8]) {
        // The server may have closed it before the last of them.
        let _ = self.socket.write_all(bytes);
    }
}

/// A guest with an AHCI driver of one command at a time.
pub(crate) struct Guest {
    memory: GuestMemory,
    file: OwnedFd,
    pub(crate) interrupt: EventFd,
}

/// Where things are in the guest's memory.
const LIST: u64 = 0x1000;
const RFIS: u64 = 0x2000;
const TABLE: u64 = 0x3000;
const DATA: u64 = 0x10000;

/// Registers of the first port.
const PX_CLB: u64 = 0x100;
const PX_FB: u64 = 0x108;
pub(crate) const PX_IS: u64 = 0x110;
const PX_IE: u64 = 0x114;
const PX_CMD: u64 = 0x118;
const PX_SSTS: u64 = 0x128;
pub(crate) const PX_CI: u64 = 0x138;
pub(crate) const IS: u64 = 0x08;
const GHC: u64 = 0x04;

pub(crate) const READ: u8 = 0x25;
pub(crate) const WRITE: u8 = 0x35;

impl Guest {
    pub(crate) fn new() -> Self {
        let region = memfd_region(0, MEMORY).unwrap();
        let file = region.fd.try_clone().unwrap();
        let memory = GuestMemory::from_regions([Arc::new(region.map().unwrap())]).unwrap();
        Guest {
            memory,
            file,
            interrupt: EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap(),
        }
    }

    pub(crate) fn file(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Shares the memory, takes interrupts of this kind, and starts the port.
    pub(crate) fn start(&self, client: &mut Client, irq: u32) {
        client.ok(DMA_MAP, &dma_map(0, MEMORY), &[self.file()]);
        let eventfds = set_irqs(DATA_EVENTFD | TRIGGER, irq, 0, 1);
        client.ok(SET_IRQS, &eventfds, &[self.interrupt.as_raw_fd()]);
        client.write(CONFIG, 4, 0x6);
        assert_eq!(client.read(ABAR, PX_SSTS) & 0xf, 3, "the link is up");
        client.write(ABAR, PX_CLB, LIST as u32);
        client.write(ABAR, PX_FB, RFIS as u32);
        client.write(ABAR, PX_CMD, 0x10);
        client.write(ABAR, PX_CMD, 0x11);
        client.write(ABAR, PX_IE, 1);
        client.write(ABAR, GHC, 0x8000_0002);
    }

    /// Puts a command for one sector into slot 0.
    pub(crate) fn prepare(&self, command: u8, sector: u8) {
        let write = command == WRITE;
        let mut header = words(&[5 | u32::from(write) << 6 | 1 << 16, 0, TABLE as u32, 0]);
        header.resize(32, 0);
        self.memory.write_bytes(LIST, &header).unwrap();
        let mut fis = [0; 64];
        (fis[0], fis[1], fis[2], fis[4], fis[7], fis[12]) = (0x27, 0x80, command, sector, 0x40, 1);
        self.memory.write_bytes(TABLE, &fis).unwrap();
        self.memory.write_bytes(TABLE + 0x80, &words(&[DATA as u32, 0, 0, 511])).unwrap();
    }

    pub(crate) fn put(&self, byte: u8) {
        self.memory.write_bytes(DATA, &[byte; 512]).unwrap();
    }

    pub(crate) fn data(&self) -> [u8; 512] {
        let mut data = [0; 512];
        self.memory.read_bytes(DATA, &mut data).unwrap();
        data
    }

    /// Waits for interrupts, and takes them.
    pub(crate) fn is_interrupted(&self) -> bool {
        common::is_signalled(&self.interrupt, PATIENCE) && self.interrupt.read().is_ok()
    }
}
