//! A front end with a guest whose memory is poisoned after each reset.

use std::collections::HashMap;
use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use exports::vhost_user::session::VHOST_F_LOG_ALL;
use exports::vhost_user::wire::Request as Code;
use fastrand::Rng;
use guest_memory::test_util::{USER_BASE, memfd_region};
use guest_memory::{GuestMemory, MemoryView};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use queue::Inflight;
use queue::driver::Driver;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::common::{
    NEED_REPLY, ask, connect, eventually, message, number, receive, send_with, with_reply_ack,
};
use super::load::{Device, OWN, PLACES, ROOM, Request, UNWRITTEN};

/// Request queues, and places per queue. A request takes up to three descriptors.
const QUEUES: usize = 2;
const DEPTH: usize = PLACES / QUEUES;
const QUEUE_SIZE: u16 = 128;
/// Bytes of memory for all rings, and for the rings of each queue.
const RINGS: u64 = 0x8000;
const RINGS_OF_EACH: u64 = RINGS / QUEUES as u64;
/// Bytes of memory for buffers.
const BUFFERS: u64 = (PLACES * ROOM) as u64;
/// Guest addresses of the two areas, and offset of the buffers in each.
const AREAS: [u64; 2] = [0, 0x4000_0000];
const BUFFERS_AT: u64 = 0x100_0000;
/// Not valid as a sector's contents, a status or an index.
static POISON: [u8; BUFFERS as usize] = [0xdb; BUFFERS as usize];

/// Operations that reset the device, or take the guest's memory away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reset {
    GetVringBase,
    Device,
    Status,
    /// Replaces the memory of all buffers, at the same guest addresses.
    MemTable,
    /// The front end disconnects. When the device closes the connection, it no longer uses the
    /// memory.
    Disconnect,
}

impl Reset {
    pub(crate) const ALL: [Reset; 5] =
        [Reset::GetVringBase, Reset::Device, Reset::Status, Reset::MemTable, Reset::Disconnect];
}

/// Memory that is shared with the device.
struct Shared(File);

impl Shared {
    fn of(fd: &OwnedFd) -> Self {
        Shared(fd.try_clone().unwrap().into())
    }

    /// Makes memory that cannot shrink.
    fn new(len: u64) -> Self {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"guest-memory", flags).unwrap());
        file.set_len(len).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        Shared(file)
    }

    fn len(&self) -> usize {
        self.0.metadata().unwrap().len() as usize
    }

    /// Reads the contents into existing memory, which is fast: a late write has little time before
    /// the poisoning.
    fn read(&self, into: &mut Vec<u8>) {
        into.resize(self.len(), 0);
        self.0.read_exact_at(into, 0).unwrap();
    }

    fn write(&self, bytes: &[u8]) {
        self.0.write_all_at(bytes, 0).unwrap();
    }

    fn poison(&self) {
        self.write(&POISON[..self.len()]);
    }

    fn assert_poisoned(&self, what: &str) {
        let mut bytes = Vec::new();
        self.read(&mut bytes);
        if bytes != POISON[..bytes.len()] {
            let at = bytes.iter().position(|byte| *byte != POISON[0]).unwrap_or_default();
            let found = &bytes[at..bytes.len().min(at + 16)];
            panic!("{what} were touched after the reset, at {at:#x}: {found:x?}");
        }
    }
}

/// One half of the guest's memory. While this half is in use, the other is poisoned, and must stay
/// untouched.
struct Area {
    at: u64,
    rings: Shared,
    /// View of the rings.
    view: Rc<MemoryView>,
    buffers: Shared,
    record: Shared,
    /// Memory that MemTable has replaced.
    retired: Option<Shared>,
}

impl Area {
    fn new(at: u64) -> Self {
        let region = memfd_region(at, RINGS).unwrap();
        let rings = Shared::of(&region.fd);
        let memory = GuestMemory::from_regions([Arc::new(region.map().unwrap())]).unwrap();
        let view = MemoryView::new(Arc::new(memory));
        let (buffers, record) = (Shared::new(BUFFERS), Shared::new(8));
        [&rings, &buffers, &record].into_iter().for_each(Shared::poison);
        Area { at, rings, view, buffers, record, retired: None }
    }

    fn assert_poisoned(&self) {
        self.rings.assert_poisoned("rings");
        self.buffers.assert_poisoned("buffers");
        self.record.assert_poisoned("records of what is in flight");
        self.retired.iter().for_each(|memory| memory.assert_poisoned("replaced buffers"));
    }

    fn buffers_at(&self, place: usize) -> u64 {
        self.at + BUFFERS_AT + (place * ROOM) as u64
    }
}

/// A queue's driver, and the place of each offered request, by head.
struct Queue {
    driver: Driver,
    kick: EventFd,
    call: EventFd,
    places: HashMap<u16, usize>,
}

pub(crate) struct Guest {
    path: PathBuf,
    stream: UnixStream,
    device: Device,
    /// Index of the first request queue.
    first_queue: usize,
    areas: [Area; 2],
    /// Index of the area to use next.
    next: usize,
    /// Number of each sector's contents.
    disk: Vec<u64>,
    requests: u64,
    /// Reusable memory for snapshots of the guest's memory after a reset.
    snapshots: [Vec<u8>; 3],
    /// The device has the memory table.
    is_told: bool,
    /// Requests that were in flight at a reset.
    pub(crate) interrupted: u64,
    /// Resets while memory was pinned.
    pub(crate) pinned: u64,
}

/// Whether the process has pinned memory.
fn has_pinned() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    field.trim() != "0 kB"
}

impl Guest {
    pub(crate) fn new(path: PathBuf, device: Device) -> Self {
        let stream = with_reply_ack(connect(&path));
        let first_queue = if device == Device::Scsi { 2 } else { 0 };
        let (areas, disk) = (AREAS.map(Area::new), vec![0; PLACES * OWN]);
        Guest {
            path,
            stream,
            device,
            first_queue,
            areas,
            next: 0,
            disk,
            requests: 0,
            snapshots: Default::default(),
            is_told: false,
            interrupted: 0,
            pinned: 0,
        }
    }

    /// Sends requests, and resets the device as soon as `served` requests are done.
    pub(crate) fn round(&mut self, random: &mut Rng, reset: Reset, served: usize) {
        let requests: Vec<Request> = (0..PLACES)
            .map(|place| {
                self.requests += 1;
                Request::any(random, self.device, place, self.requests << 16)
            })
            .collect();
        self.serve(&requests, reset, served);
    }

    /// Reads the whole disk, and checks the contents.
    pub(crate) fn check_disk(&mut self) {
        let of = |place| Request::read_all(self.device, place);
        let requests: Vec<_> = (0..PLACES).map(of).collect();
        self.serve(&requests, Reset::GetVringBase, PLACES);
        self.areas.iter().for_each(Area::assert_poisoned);
    }

    fn serve(&mut self, requests: &[Request], reset: Reset, served: usize) {
        let current = self.next;
        self.next = 1 - current;
        self.areas[current].assert_poisoned();
        self.areas[current].retired = None;

        let mut buffers = vec![UNWRITTEN; BUFFERS as usize];
        for (request, room) in requests.iter().zip(buffers.chunks_mut(ROOM)) {
            request.put(room);
        }
        self.areas[current].buffers.write(&buffers);
        let mut queues = self.start(current);
        for (place, request) in requests.iter().enumerate() {
            let [readable, writable] = request.buffers(self.areas[current].buffers_at(place));
            let queue = &mut queues[place / DEPTH];
            let head = queue.driver.add(&readable, &writable).expect("room in the queue");
            queue.places.insert(head, place);
        }
        for queue in &mut queues {
            if queue.driver.publish() {
                queue.kick.write(1).unwrap();
            }
        }
        let done = |queues: &[Queue]| -> usize {
            queues.iter().map(|queue| usize::from(queue.driver.device_used())).sum()
        };
        eventually("so many requests are done", || done(&queues) >= served);
        self.interrupted += (PLACES - done(&queues)) as u64;
        self.pinned += u64::from(has_pinned());

        let [mut replaced, mut last, mut record] = std::mem::take(&mut self.snapshots);
        replaced.clear();
        if reset == Reset::MemTable {
            let memory = Shared::new(BUFFERS);
            memory.write(&buffers);
            let before = std::mem::replace(&mut self.areas[current].buffers, memory);
            self.set_mem_table(NEED_REPLY);
            assert_eq!(number(&mut self.stream, Code::SetMemTable as u32), 0);
            before.read(&mut replaced);
            before.poison();
            self.areas[current].retired = Some(before);
        }
        self.reset(reset, &queues);
        let area = &self.areas[current];
        let mut used = Vec::with_capacity(PLACES);
        for queue in &mut queues {
            while let Some(one) = queue.driver.reap() {
                used.push(queue.places.remove(&one.head).expect("given back once"));
            }
        }
        area.rings.poison();
        area.buffers.read(&mut last);
        area.buffers.poison();
        area.record.read(&mut record);
        area.record.poison();

        assert!(used.len() >= served);
        for place in used {
            let request = &requests[place];
            let mut rooms = [&replaced, &last].into_iter().filter_map(|memory| {
                let room = memory.get(place * ROOM..)?.get(..ROOM)?;
                request.is_answered(room).then_some(room)
            });
            let room = rooms.next_back().expect("an answer in one of the two");
            request.check(room, &mut self.disk);
        }
        // The in-flight record, which decides what is repeated, must be empty.
        for record in record.chunks(Inflight::region_len(QUEUE_SIZE)) {
            let entries = record[16..].chunks(16).take(QUEUE_SIZE.into());
            assert!(entries.map(|entry| entry[0]).all(|in_flight| in_flight == 0), "{reset:?}");
        }
        self.snapshots = [replaced, last, record];
    }

    /// Starts the queues, with rings in area `current` and a new in-flight record.
    fn start(&mut self, current: usize) -> Vec<Queue> {
        let queues: Vec<_> = (0..QUEUES as u64)
            .map(|index| {
                let area = &self.areas[current];
                let at = area.at + index * RINGS_OF_EACH;
                let event = || EventFd::new(EFD_NONBLOCK).unwrap();
                let driver = Driver::new(&area.view, at, QUEUE_SIZE, true).unwrap();
                Queue { driver, kick: event(), call: event(), places: HashMap::new() }
            })
            .collect();
        let features = ask(&mut self.stream, Code::GetFeatures, 0, &[]) & !VHOST_F_LOG_ALL;
        self.send(Code::SetFeatures, &features.to_ne_bytes(), &[]);
        if !std::mem::replace(&mut self.is_told, true) {
            self.set_mem_table(0);
        }
        let rings = (self.first_queue + QUEUES) as u16;
        let record = Shared::new(u64::from(rings) * Inflight::region_len(QUEUE_SIZE) as u64);
        let sizes = [record.len() as u64, 0].map(u64::to_ne_bytes);
        let numbers = [rings, QUEUE_SIZE].map(u16::to_ne_bytes);
        let payload = [sizes.as_flattened(), numbers.as_flattened()].concat();
        self.send(Code::SetInflightFd, &payload, &[record.0.as_raw_fd()]);
        self.areas[current].record = record;
        for (index, queue) in (self.first_queue as u32..).zip(&queues) {
            let config = queue.driver.config();
            let state = |number: u32| [index, number].map(u32::to_ne_bytes).concat();
            self.send(Code::SetVringNum, &state(config.size.into()), &[]);
            self.send(Code::SetVringBase, &state(0), &[]);
            let addr = [u64::from(index), config.desc, config.used, config.avail, 0];
            self.send(Code::SetVringAddr, &addr.map(u64::to_ne_bytes).concat(), &[]);
            let number = u64::from(index).to_ne_bytes();
            self.send(Code::SetVringCall, &number, &[queue.call.as_raw_fd()]);
            self.send(Code::SetVringKick, &number, &[queue.kick.as_raw_fd()]);
            self.send(Code::SetVringEnable, &state(1), &[]);
        }
        queues
    }

    fn reset(&mut self, reset: Reset, queues: &[Queue]) {
        match reset {
            Reset::GetVringBase | Reset::MemTable => {
                for (index, queue) in (self.first_queue as u32..).zip(queues) {
                    let state = [index, 0].map(u32::to_ne_bytes).concat();
                    self.send(Code::GetVringBase, &state, &[]);
                    let (code, reply) = receive(&mut self.stream).expect("a reply");
                    assert_eq!(code, Code::GetVringBase as u32);
                    let base = u32::from_ne_bytes(reply[4..].try_into().unwrap());
                    // Every request that was taken from the ring is completed.
                    assert_eq!(base, u32::from(queue.driver.device_used()));
                }
            }
            Reset::Device => {
                assert_eq!(ask(&mut self.stream, Code::ResetDevice, NEED_REPLY, &[]), 0);
            }
            Reset::Status => {
                let status = 0u64.to_ne_bytes();
                assert_eq!(ask(&mut self.stream, Code::SetStatus, NEED_REPLY, &status), 0);
            }
            Reset::Disconnect => {
                self.stream.shutdown(Shutdown::Write).unwrap();
                assert_eq!(receive(&mut self.stream), None);
                self.stream = with_reply_ack(connect(&self.path));
                self.is_told = false;
            }
        }
    }

    fn set_mem_table(&self, flags: u32) {
        let regions = self.areas.iter().flat_map(|area| {
            [(area.at, RINGS, &area.rings), (area.at + BUFFERS_AT, BUFFERS, &area.buffers)]
        });
        let (fields, files): (Vec<_>, Vec<_>) = regions
            .map(|(at, len, memory)| ([at, len, USER_BASE + at, 0], memory.0.as_raw_fd()))
            .unzip();
        let fields = [[files.len() as u64].as_slice(), fields.as_flattened()].concat();
        let payload: Vec<u8> = fields.into_iter().flat_map(u64::to_ne_bytes).collect();
        send_with(&self.stream, &message(Code::SetMemTable, flags, &payload), &files);
    }

    fn send(&self, code: Code, payload: &[u8], fds: &[RawFd]) {
        send_with(&self.stream, &message(code, 0, payload), fds);
    }
}
