//! An export with its threads, a disk in memory behind it, and a guest in front of it.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

pub(crate) mod once;
pub(crate) mod vmm;

use std::future::Future;
use std::io::{self, IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use block::node::{BlockNode, Channel, Geometry, Resized, Watcher, Watchers};
use block::request::{Op, Request as BlockRequest};
use event_loop::{EventLoop, IoThread, IoThreadConfig, RingChoice, oneshot};
use exports::vhost_user::wire::{HEADER_LEN, Request};
use exports::vhost_user::{ExportError, Listen, VhostUserConfig, VhostUserExport, fd_passing};
use guest_memory::test_util::{USER_BASE, memfd_region};
use guest_memory::{GuestMemory, MemoryView};
use nix::errno::Errno;
use nix::sys::socket::MsgFlags;
use queue::driver::Driver;
use queue::{QueueConfig, Segment};
use vhost::{VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// How long anything may take that happens at all.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How long something is waited for that must not come yet.
pub(crate) const NOT_YET: Duration = Duration::from_millis(50);

pub(crate) const SECTOR: usize = 512;

/// A disk in memory. While its gate is closed it takes requests and does not answer them.
pub(crate) struct RamDisk {
    pub(crate) data: Mutex<Vec<u8>>,
    pub(crate) flushes: AtomicU64,
    /// Writes fail: there is no space.
    pub(crate) is_full: AtomicBool,
    gate: Mutex<Gate>,
    watchers: Watchers,
}

#[derive(Default)]
struct Gate {
    closed: bool,
    waiting: Vec<oneshot::Sender<()>>,
}

impl RamDisk {
    pub(crate) fn new(sectors: usize) -> Arc<Self> {
        let data = Mutex::new(vec![0; sectors * SECTOR]);
        Arc::new(RamDisk {
            data,
            flushes: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
            gate: Mutex::default(),
            watchers: Watchers::default(),
        })
    }

    pub(crate) fn close_gate(&self) {
        self.gate.lock().unwrap().closed = true;
    }

    /// Answers what waits, and what comes from now on.
    pub(crate) fn open_gate(&self) {
        let mut gate = self.gate.lock().unwrap();
        gate.closed = false;
        gate.waiting.drain(..).for_each(|sender| sender.send(()));
    }

    pub(crate) fn waiting(&self) -> usize {
        self.gate.lock().unwrap().waiting.len()
    }

    fn carry_out(&self, mut request: BlockRequest) {
        let at = request.offset as usize;
        let mut data = self.data.lock().unwrap();
        match request.op {
            Op::Read => {
                let len = request.len as usize;
                request.bufs.copy_in(0, &data[at..at + len]);
            }
            Op::Write { .. } if self.is_full.load(Ordering::SeqCst) => {
                return request.complete(Err(Errno::ENOSPC));
            }
            Op::Write { .. } => {
                let len = request.len as usize;
                request.bufs.copy_out(0, &mut data[at..at + len]);
            }
            Op::Flush => {
                self.flushes.fetch_add(1, Ordering::SeqCst);
            }
            _ => return request.complete(Err(Errno::EOPNOTSUPP)),
        }
        drop(data);
        request.complete(Ok(()));
    }
}

impl BlockNode for RamDisk {
    fn name(&self) -> &str {
        "ram"
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.data.lock().unwrap().len() as u64,
            read_only: false,
            physical_block_size: 512,
            request_alignment: 1,
            discard: false,
            discard_granularity: 512,
            write_zeroes: false,
            write_cache: true,
        }
    }

    fn watch(&self, watcher: Watcher) {
        self.watchers.add(watcher);
    }

    fn resize(self: Arc<Self>, size: u64, _event_loop: &EventLoop) -> Resized {
        self.data.lock().unwrap().resize(size as usize, 0);
        self.watchers.tell();
        Box::pin(async { Ok(()) })
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        Ok(Rc::new(RamChannel { disk: self, event_loop: event_loop.clone() }))
    }
}

struct RamChannel {
    disk: Arc<RamDisk>,
    event_loop: EventLoop,
}

impl Channel for RamChannel {
    fn submit(&self, request: BlockRequest) {
        let mut gate = self.disk.gate.lock().unwrap();
        if !gate.closed {
            drop(gate);
            return self.disk.carry_out(request);
        }
        let (sender, opened) = oneshot::channel();
        gate.waiting.push(sender);
        drop(gate);
        let disk = self.disk.clone();
        self.event_loop.spawn(async move {
            let _ = opened.await;
            disk.carry_out(request);
        });
    }

    fn in_flight(&self) -> usize {
        self.disk.gate.lock().unwrap().waiting.len()
    }
}

/// A directory of the test's own, removed in the end.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ringmill-exports-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Dir(path)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("sock")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn io_thread(name: &str, ring: RingChoice) -> IoThread {
    let mut config = IoThreadConfig::default();
    config.event_loop.name = name.into();
    config.event_loop.ring = ring;
    IoThread::spawn(config).unwrap()
}

/// Runs a future on a thread's loop and waits for what it gives.
pub(crate) fn run_on<T, F>(
    thread: &IoThread,
    make: impl FnOnce(EventLoop) -> F + Send + 'static,
) -> T
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    thread.handle().run(make).wait().expect("an answer")
}

/// A daemon: a control thread, I/O threads, an export.
pub(crate) struct Daemon {
    export: Option<VhostUserExport>,
    pub(crate) disk: Arc<RamDisk>,
    pub(crate) control: IoThread,
    pub(crate) io_threads: Vec<IoThread>,
    pub(crate) dir: Dir,
}

pub(crate) struct Options {
    pub(crate) num_queues: u16,
    pub(crate) io_threads: usize,
    /// What the I/O threads run on.
    pub(crate) ring: RingChoice,
    pub(crate) pin_memory: bool,
}

impl Default for Options {
    fn default() -> Self {
        let ring = RingChoice::default();
        Options { num_queues: 1, io_threads: 1, ring, pin_memory: false }
    }
}

impl Daemon {
    pub(crate) fn new() -> Self {
        Self::with(Options::default())
    }

    pub(crate) fn with(options: Options) -> Self {
        let dir = Dir::new();
        let disk = RamDisk::new(2048);
        let control = io_thread("control", RingChoice::default());
        let io_threads: Vec<_> =
            (0..options.io_threads).map(|i| io_thread(&format!("io{i}"), options.ring)).collect();
        let mut daemon = Daemon { export: None, disk, control, io_threads, dir };
        let listen = Listen::Path(daemon.dir.socket());
        let mut config = daemon.config(listen, options.num_queues);
        config.pin_memory = options.pin_memory;
        daemon.export = Some(daemon.start(config).unwrap());
        daemon
    }

    pub(crate) fn config(&self, listen: Listen, num_queues: u16) -> VhostUserConfig {
        let io_threads = self.io_threads.iter().map(|thread| thread.handle().clone()).collect();
        VhostUserConfig {
            num_queues: Some(num_queues),
            writable: true,
            ..VhostUserConfig::new("e0", listen, io_threads)
        }
    }

    pub(crate) fn start(&self, config: VhostUserConfig) -> Result<VhostUserExport, ExportError> {
        self.start_with(config, self.disk.clone())
    }

    pub(crate) fn start_with(
        &self,
        config: VhostUserConfig,
        node: Arc<dyn BlockNode>,
    ) -> Result<VhostUserExport, ExportError> {
        run_on(&self.control, move |event_loop| {
            VhostUserExport::blk(event_loop, config, node, "serial".into())
        })
    }

    pub(crate) fn export(&self) -> &VhostUserExport {
        self.export.as_ref().unwrap()
    }

    /// Takes the export out of the daemon.
    pub(crate) fn take(&mut self) -> VhostUserExport {
        self.export.take().unwrap()
    }

    pub(crate) fn stop(&mut self) -> Result<(), ExportError> {
        let export = self.take();
        run_on(&self.control, move |_| export.stop())
    }

    /// Begins to stop; what is received says how it ended.
    pub(crate) fn begin_stop(&mut self) -> mpsc::Receiver<Result<(), ExportError>> {
        let export = self.take();
        let (sender, receiver) = mpsc::channel();
        self.control
            .handle()
            .spawn(move |event_loop| {
                event_loop.spawn(async move {
                    let _ = sender.send(export.stop().await);
                });
            })
            .unwrap();
        receiver
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.socket()
    }

    pub(crate) fn connect(&self) -> UnixStream {
        connect(&self.socket())
    }
}

pub(crate) fn connect(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Waits until `condition` holds. For what no event of this process tells.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what}: not in {PATIENCE:?}");
        std::thread::yield_now();
    }
}

/// Waits until an eventfd is signalled, or a socket has something to receive. `false`: not for so long.
pub(crate) fn is_signalled(fd: &impl AsRawFd, patience: Duration) -> bool {
    let epoll = Epoll::new().unwrap();
    let event = EpollEvent::new(EventSet::IN, 0);
    epoll.ctl(ControlOperation::Add, fd.as_raw_fd(), event).unwrap();
    let mut events = [EpollEvent::default()];
    epoll.wait(patience.as_millis() as i32, &mut events).unwrap() == 1
}

/// Where things are in the guest's memory.
const RINGS: u64 = 0;
pub(crate) const DATA: u64 = 0x10_0000;
pub(crate) const MEMORY: u64 = 0x20_0000;

/// A guest with queues, as its VMM has set it up.
pub(crate) struct Guest {
    pub(crate) files: Vec<OwnedFd>,
    pub(crate) view: Rc<MemoryView>,
    pub(crate) queues: Vec<GuestQueue>,
}

pub(crate) struct GuestQueue {
    pub(crate) driver: Driver,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    data: u64,
}

impl Guest {
    pub(crate) fn new(num_queues: u16, size: u16) -> Self {
        let region = memfd_region(0, MEMORY).unwrap();
        let file = region.fd.try_clone().unwrap();
        let memory = GuestMemory::from_regions([Arc::new(region.map().unwrap())]).unwrap();
        let view = MemoryView::new(Arc::new(memory));
        let queues = (0..u64::from(num_queues))
            .map(|i| GuestQueue {
                driver: Driver::new(&view, RINGS + i * 0x8000, size, true).unwrap(),
                kick: EventFd::new(EFD_NONBLOCK).unwrap(),
                call: EventFd::new(EFD_NONBLOCK).unwrap(),
                data: DATA + i * 0x1_0000,
            })
            .collect();
        Guest { files: vec![file], view, queues }
    }

    /// The region as ADD_MEM_REG and SET_MEM_TABLE describe it.
    pub(crate) fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY,
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: self.files[0].as_raw_fd(),
        }
    }

    /// Offers a request on a queue and kicks.
    pub(crate) fn offer(&mut self, queue: usize, kind: u32, sector: u64, data: &[u8]) {
        let GuestQueue { driver, kick, data: at, .. } = &mut self.queues[queue];
        let at = *at;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.view.write_bytes(at, &header).unwrap();
        self.view.write_bytes(at + 0x1000, data).unwrap();
        self.view.write_u8(at + 0x800, 0xff).unwrap();
        let header = Segment { addr: at, len: 16 };
        let status = Segment { addr: at + 0x800, len: 1 };
        let data = Segment { addr: at + 0x1000, len: data.len() as u32 };
        match (kind, data.len) {
            (_, 0) => driver.add(&[header], &[status]),
            (0, _) => driver.add(&[header], &[data, status]),
            _ => driver.add(&[header, data], &[status]),
        }
        .unwrap();
        if driver.publish() {
            kick.write(1).unwrap();
        }
    }

    /// Offers flushes by indirect tables, so that each takes one descriptor, and kicks.
    pub(crate) fn offer_flushes(&mut self, queue: usize, count: usize) {
        let GuestQueue { driver, kick, data: at, .. } = &mut self.queues[queue];
        let at = *at;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&4u32.to_le_bytes());
        self.view.write_bytes(at, &header).unwrap();
        let header = Segment { addr: at, len: 16 };
        let status = Segment { addr: at + 0x800, len: 1 };
        for i in 0..count {
            driver
                .add_indirect(at + 0x2000 + i as u64 * 32, &[header], &[status])
                .unwrap()
                .unwrap();
        }
        if driver.publish() {
            kick.write(1).unwrap();
        }
    }

    /// Whether the request on a queue is done; its status if so.
    pub(crate) fn reap(&mut self, queue: usize) -> Option<u8> {
        let GuestQueue { driver, data, .. } = &mut self.queues[queue];
        driver.reap().map(|_| self.view.read_u8(*data + 0x800).unwrap())
    }

    /// Waits for a request by its call eventfd, as a guest does by its interrupt.
    pub(crate) fn wait(&mut self, queue: usize) -> u8 {
        loop {
            let _ = self.queues[queue].call.read();
            if self.queues[queue].driver.enable_signals()
                && let Some(status) = self.reap(queue)
            {
                return status;
            }
            assert!(is_signalled(&self.queues[queue].call, PATIENCE), "no interrupt");
        }
    }

    pub(crate) fn write(&mut self, queue: usize, sector: u64, data: &[u8]) -> u8 {
        self.offer(queue, 1, sector, data);
        self.wait(queue)
    }

    pub(crate) fn read(&mut self, queue: usize, sector: u64, len: usize) -> Vec<u8> {
        self.offer(queue, 0, sector, &vec![0xee; len]);
        assert_eq!(self.wait(queue), 0);
        let mut data = vec![0; len];
        self.view.read_bytes(self.queues[queue].data + 0x1000, &mut data).unwrap();
        data
    }
}

pub(crate) fn vring_config(config: QueueConfig) -> VringConfigData {
    VringConfigData {
        queue_max_size: config.size,
        queue_size: config.size,
        flags: 0,
        desc_table_addr: config.desc,
        used_ring_addr: config.used,
        avail_ring_addr: config.avail,
        log_addr: None,
    }
}

/// A message's bytes; `flags` beside the version.
pub(crate) fn message(request: Request, flags: u32, payload: &[u8]) -> Vec<u8> {
    raw_message(request as u32, flags, payload)
}

pub(crate) const NEED_REPLY: u32 = 8;

pub(crate) fn raw_message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(code.to_ne_bytes());
    bytes.extend((1 | flags).to_ne_bytes());
    bytes.extend((payload.len() as u32).to_ne_bytes());
    bytes.extend(payload);
    bytes
}

/// Sends bytes, the descriptors with the first of them.
pub(crate) fn send_with(stream: &UnixStream, bytes: &[u8], fds: &[RawFd]) {
    let sent = fd_passing::send(stream.as_fd(), &[IoSlice::new(bytes)], fds, MsgFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}

/// Reads a reply: the request's number and the payload. `None`: the connection was closed.
pub(crate) fn receive(stream: &mut UnixStream) -> Option<(u32, Vec<u8>)> {
    let mut header = [0; HEADER_LEN];
    match stream.read_exact(&mut header) {
        Ok(()) => {}
        Err(error) => {
            let kind = error.kind();
            let closed = [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset];
            assert!(closed.contains(&kind), "{error}");
            return None;
        }
    }
    let field = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    assert_eq!(field(4), 5, "version 1, a reply");
    let mut payload = vec![0; field(8) as usize];
    stream.read_exact(&mut payload).unwrap();
    Some((field(0), payload))
}

/// Sends a message and reads the number it is answered with.
pub(crate) fn ask(stream: &mut UnixStream, request: Request, flags: u32, payload: &[u8]) -> u64 {
    send_with(stream, &message(request, flags, payload), &[]);
    number(stream, request as u32)
}

pub(crate) fn number(stream: &mut UnixStream, code: u32) -> u64 {
    let (got, payload) = receive(stream).expect("a reply");
    assert_eq!(got, code);
    u64::from_ne_bytes(payload.try_into().unwrap())
}

/// Negotiates acknowledgements.
pub(crate) fn with_reply_ack(mut stream: UnixStream) -> UnixStream {
    let features = ask(&mut stream, Request::GetFeatures, 0, &[]);
    send_with(&stream, &message(Request::SetFeatures, 0, &features.to_ne_bytes()), &[]);
    let offered = ask(&mut stream, Request::GetProtocolFeatures, 0, &[]);
    let offered = offered.to_ne_bytes();
    assert_eq!(ask(&mut stream, Request::SetProtocolFeatures, NEED_REPLY, &offered), 0);
    stream
}
