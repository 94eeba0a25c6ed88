//! The log of a migration: each page of the guest's memory that a device has written is marked, when
//! the driver sees the answer at the latest. By a model that compares the memory before and after.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

use crate::common;

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::job::OnError;
use block::policy::{ErrorPolicy, with_policy};
use common::{
    Daemon, Dir, Options, PATIENCE, SECTOR, connect, eventually, is_signalled, run_on, vring_config,
};
use exports::vhost_user::session::VHOST_F_LOG_ALL;
use exports::vhost_user::{Listen, VhostUserExport};
use guest_memory::test_util::{USER_BASE, memfd_region};
use guest_memory::{GuestMemory, LOG_PAGE, MemoryView};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use proptest::prelude::*;
use queue::driver::Driver;
use queue::{Segment, used_ring_len};
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Two regions with a hole between them; rings are in the first.
const REGIONS: [(u64, u64); 2] = [(0, 0x20_0000), (0x1000_0000, 0x20_0000)];
/// Where a queue's rings begin, by its number.
const RINGS: u64 = 0x8000;
/// Where buffers begin in either region.
const BUFFERS: u64 = 0x10_0000;
/// Bytes of a log that has a bit for each page.
const LOG_SIZE: u64 = (REGIONS[1].0 + REGIONS[1].1) / LOG_PAGE / 8;
/// What buffers are filled with that the device is to write.
const UNWRITTEN: u8 = 0xa5;

fn file_of(fd: &OwnedFd) -> File {
    fd.try_clone().unwrap().into()
}

/// A log's memory.
fn log_file(size: u64) -> File {
    let fd = memfd_create(c"log-of-a-test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING);
    let file = File::from(fd.unwrap());
    file.set_len(size).unwrap();
    file
}

/// The pages that are marked.
fn marked(log: &File) -> BTreeSet<u64> {
    let mut bytes = vec![0; LOG_SIZE as usize];
    log.read_exact_at(&mut bytes, 0).unwrap();
    let bits = bytes.iter().zip(0u64..).flat_map(|(byte, i)| {
        (0..8).filter(move |bit| byte & 1 << bit != 0).map(move |bit| i * 8 + bit)
    });
    bits.collect()
}

/// The pages of these buffers.
fn pages(segments: &[Segment]) -> impl Iterator<Item = u64> {
    segments.iter().flat_map(|s| s.addr / LOG_PAGE..=(s.addr + u64::from(s.len) - 1) / LOG_PAGE)
}

struct Queue {
    /// Its number in the device.
    index: usize,
    driver: Driver,
    kick: EventFd,
    call: EventFd,
    err: EventFd,
    base: u16,
}

/// A front end, its guest, and the log that it may keep.
struct Vmm {
    front_end: Frontend,
    features: u64,
    files: Vec<File>,
    view: Rc<MemoryView>,
    queues: Vec<Queue>,
    /// The next free address for buffers, in each region.
    next: [u64; 2],
}

impl Vmm {
    fn new(daemon: &Daemon, first_queue: usize, num_queues: usize, size: u16) -> Self {
        Self::on(&daemon.socket(), first_queue, num_queues, size)
    }

    fn on(path: &std::path::Path, first_queue: usize, num_queues: usize, size: u16) -> Self {
        let mut front_end = Frontend::from_stream(connect(path), 64);
        let offered = front_end.get_features().unwrap();
        assert_ne!(offered & VHOST_F_LOG_ALL, 0);
        let features = offered & !VHOST_F_LOG_ALL;
        let wanted = front_end.get_protocol_features().unwrap();
        assert!(wanted.contains(VhostUserProtocolFeatures::LOG_SHMFD));
        let wanted = wanted & VhostUserProtocolFeatures::all();
        front_end.set_protocol_features(wanted).unwrap();
        front_end.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
        front_end.set_owner().unwrap();
        front_end.set_features(features).unwrap();

        let regions = REGIONS.map(|(addr, size)| memfd_region(addr, size).unwrap());
        let files: Vec<_> = regions.iter().map(|region| file_of(&region.fd)).collect();
        let mapped = regions.map(|region| Arc::new(region.map().unwrap()));
        let memory = Arc::new(GuestMemory::from_regions(mapped).unwrap());
        let view = MemoryView::new(memory);
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let queue = |i: usize| Queue {
            index: first_queue + i,
            driver: Driver::new(&view, RINGS * i as u64, size, true).unwrap(),
            kick: event(),
            call: event(),
            err: event(),
            base: 0,
        };
        let queues = (0..num_queues).map(queue).collect();
        let next = REGIONS.map(|(addr, _)| addr + BUFFERS);
        let mut vmm = Vmm { front_end, features, files, view, queues, next };
        vmm.set_memory();
        (0..num_queues).for_each(|i| vmm.start(i, false));
        vmm
    }

    fn set_memory(&mut self) {
        let info = |(&(addr, size), file): (&(u64, u64), &File)| VhostUserMemoryRegionInfo {
            guest_phys_addr: addr,
            memory_size: size,
            userspace_addr: USER_BASE + addr,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        let infos: Vec<_> = REGIONS.iter().zip(&self.files).map(info).collect();
        self.front_end.set_mem_table(&infos).unwrap();
    }

    fn set_addr(&mut self, queue: usize, log: bool) {
        let Queue { index, driver, .. } = &self.queues[queue];
        let mut config = vring_config(driver.config());
        if log {
            config.flags = 1;
            config.log_addr = Some(driver.config().used - USER_BASE);
        }
        self.front_end.set_vring_addr(*index, &config).unwrap();
    }

    /// Starts a queue, disabled.
    fn start(&mut self, queue: usize, log: bool) {
        let Queue { index, driver, base, .. } = &self.queues[queue];
        let index = *index;
        self.front_end.set_vring_num(index, driver.config().size).unwrap();
        self.front_end.set_vring_base(index, *base).unwrap();
        self.set_addr(queue, log);
        let Queue { kick, call, err, .. } = &self.queues[queue];
        self.front_end.set_vring_kick(index, kick).unwrap();
        self.front_end.set_vring_call(index, call).unwrap();
        self.front_end.set_vring_err(index, err).unwrap();
    }

    fn enable(&mut self, on: bool) {
        for queue in &self.queues {
            self.front_end.set_vring_enable(queue.index, on).unwrap();
        }
    }

    fn stop(&mut self) {
        for queue in &mut self.queues {
            queue.base = self.front_end.get_vring_base(queue.index).unwrap() as u16;
        }
    }

    fn set_log(&mut self, log: &impl AsRawFd, size: u64) -> vhost::Result<()> {
        let mmap_handle = log.as_raw_fd();
        let region = VhostUserDirtyLogRegion { mmap_size: size, mmap_offset: 0, mmap_handle };
        self.front_end.set_log_base(0, Some(region))
    }

    fn set_features(&mut self, logging: bool) -> vhost::Result<()> {
        let log = if logging { VHOST_F_LOG_ALL } else { 0 };
        self.front_end.set_features(self.features | log)
    }

    /// As QEMU does when a migration begins and ends.
    fn set_logging(&mut self, on: bool) {
        self.set_features(on).unwrap();
        (0..self.queues.len()).for_each(|queue| self.set_addr(queue, on));
    }

    fn snapshot(&self) -> Vec<Vec<u8>> {
        let read = |(file, (_, size)): (&File, (u64, u64))| {
            let mut bytes = vec![0; size as usize];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        self.files.iter().zip(REGIONS).map(read).collect()
    }

    /// The pages that are not as they were.
    fn changed(&self, before: &[Vec<u8>]) -> BTreeSet<u64> {
        let now = self.snapshot();
        let both = before.iter().zip(&now).zip(REGIONS);
        let changed = both.flat_map(|((before, now), (addr, _))| {
            let page = LOG_PAGE as usize;
            let pairs = before.chunks(page).zip(now.chunks(page)).zip(addr / LOG_PAGE..);
            pairs.filter(|((before, now), _)| before != now).map(|(_, page)| page)
        });
        changed.collect()
    }

    /// Buffers for `len` bytes, cut up and scattered.
    fn buffers(&mut self, mut len: u32, cuts: &mut impl Iterator<Item = u32>) -> Vec<Segment> {
        let mut segments = Vec::new();
        while len > 0 {
            let cut = cuts.next().unwrap();
            // Few pieces, so that they fit a small queue.
            let part = if segments.len() == 4 { len } else { (1 + cut % 9000).min(len) };
            let next = &mut self.next[(cut >> 16) as usize % 2];
            let addr = *next + u64::from(cut >> 20);
            *next = addr + u64::from(part);
            segments.push(Segment { addr, len: part });
            len -= part;
        }
        segments
    }

    /// Adds a request, not yet shown. Returns the buffers that the device may write.
    fn add(
        &mut self,
        queue: usize,
        request: &Request,
        cuts: &mut impl Iterator<Item = u32>,
    ) -> Vec<Segment> {
        let readable = self.buffers(request.readable.len() as u32, cuts);
        let mut rest = request.readable.as_slice();
        for segment in &readable {
            let (now, later) = rest.split_at(segment.len as usize);
            self.view.write_bytes(segment.addr, now).unwrap();
            rest = later;
        }
        let writable = self.buffers(request.writable, cuts);
        for segment in &writable {
            self.view.write_bytes(segment.addr, &vec![UNWRITTEN; segment.len as usize]).unwrap();
        }
        self.queues[queue].driver.add(&readable, &writable).expect("room");
        writable
    }

    fn kick(&mut self) {
        for queue in &mut self.queues {
            queue.driver.publish();
            queue.kick.write(1).unwrap();
        }
    }

    fn wait(&mut self, queue: usize, count: usize) {
        let driver = &mut self.queues[queue].driver;
        for _ in 0..count {
            eventually("an answer", || driver.reap().is_some());
        }
    }

    fn used_rings(&self) -> Vec<Segment> {
        let of = |queue: &Queue| {
            let config = queue.driver.config();
            let len = used_ring_len(config.size) as u32;
            Segment { addr: config.used - USER_BASE, len }
        };
        self.queues.iter().map(of).collect()
    }
}

/// A request of a driver's, whatever the device.
#[derive(Debug, Clone)]
struct Request {
    readable: Vec<u8>,
    writable: u32,
}

/// virtio-blk: kind, sector, bytes.
fn blk(kind: u32, sector: u64, len: u32) -> Request {
    let mut readable = [kind.to_le_bytes(), [0; 4]].concat();
    readable.extend(sector.to_le_bytes());
    match kind {
        1 => Request { readable: [readable, vec![9; len as usize]].concat(), writable: 1 },
        _ => Request { readable, writable: len + 1 },
    }
}

/// virtio-scsi on LUN 0.
fn scsi(cdb: &[u8], out: u32, inward: u32) -> Request {
    let mut readable = vec![1, 0, 0x40, 0, 0, 0, 0, 0];
    readable.resize(19, 0);
    readable.extend(cdb);
    readable.resize(51 + out as usize, 3);
    Request { readable, writable: 108 + inward }
}

fn blk_requests() -> impl Strategy<Value = Request> {
    prop_oneof![
        4 => (0..2000u64, 1..40u32).prop_map(|(sector, n)| blk(0, sector, n * 512)),
        2 => (0..2000u64, 1..40u32).prop_map(|(sector, n)| blk(1, sector, n * 512)),
        1 => Just(blk(4, 0, 0)),
        1 => (1..40u32).prop_map(|len| blk(8, 0, len)),
        1 => Just(blk(77, 0, 100)),
    ]
}

fn scsi_requests() -> impl Strategy<Value = Request> {
    let rw = |code: u8, sector: u16, count: u8| {
        let [high, low] = sector.to_be_bytes();
        [code, 0, 0, 0, high, low, 0, 0, count, 0]
    };
    prop_oneof![
        4 => (0..2000u16, 0..40u8).prop_map(move |(sector, n)| {
            scsi(&rw(0x28, sector, n), 0, u32::from(n) * 512)
        }),
        2 => (0..2000u16, 1..40u8).prop_map(move |(sector, n)| {
            scsi(&rw(0x2a, sector, n), u32::from(n) * 512, 0)
        }),
        1 => Just(scsi(&[0x12, 0, 0, 0, 96, 0], 0, 96)),
        1 => Just(scsi(&[0x12, 1, 0x83, 0, 255, 0], 0, 255)),
        1 => Just(scsi(&rw(0x35, 0, 0), 0, 0)),
        1 => Just(scsi(&[0; 6], 0, 0)),
        1 => Just(scsi(&[0xff; 6], 0, 512)),
    ]
}

/// For each of three queues, up to five requests.
fn rounds(
    request: impl Strategy<Value = Request>,
) -> impl Strategy<Value = Vec<[Vec<Request>; 3]>> {
    let queue = prop::collection::vec(request, 0..5);
    let round = prop::collection::vec(queue, 3).prop_map(|v| v.try_into().unwrap());
    prop::collection::vec(round, 1..4)
}

/// Carries out rounds of requests; after each, the rings are stopped as at the end of a migration.
fn compare(mut vmm: Vmm, rounds: &[[Vec<Request>; 3]], cuts: &[u32]) {
    let cuts = &mut cuts.iter().copied().cycle();
    let log = log_file(LOG_SIZE);
    vmm.set_log(&log, LOG_SIZE).unwrap();
    vmm.set_logging(true);
    for (round, queues) in rounds.iter().enumerate() {
        log.write_all_at(&vec![0; LOG_SIZE as usize], 0).unwrap();
        if round > 0 {
            (0..3).for_each(|queue| vmm.start(queue, true));
        }
        vmm.next = REGIONS.map(|(addr, _)| addr + BUFFERS);
        let mut may_change: BTreeSet<u64> = pages(&vmm.used_rings()).collect();
        for (queue, requests) in queues.iter().enumerate() {
            for request in requests {
                may_change.extend(pages(&vmm.add(queue, request, cuts)));
            }
        }
        // The rings are disabled, so the export ignores them.
        vmm.queues.iter_mut().for_each(|queue| _ = queue.driver.publish());
        let before = vmm.snapshot();
        vmm.enable(true);
        for (queue, requests) in queues.iter().enumerate() {
            vmm.wait(queue, requests.len());
        }
        vmm.stop();
        let (changed, marked) = (vmm.changed(&before), marked(&log));
        let missed: Vec<_> = changed.difference(&marked).collect();
        assert!(missed.is_empty(), "round {round}: pages {missed:x?} are not marked");
        let surplus: Vec<_> = marked.difference(&may_change).collect();
        assert!(surplus.is_empty(), "round {round}: pages {surplus:x?} were nobody's to write");
        vmm.queues.iter().for_each(|q| vmm.front_end.set_vring_enable(q.index, false).unwrap());
    }
}

fn daemon() -> Daemon {
    let daemon = Daemon::with(Options { num_queues: 3, io_threads: 2, ..Options::default() });
    fill(&daemon);
    daemon
}

fn fill(daemon: &Daemon) {
    for (i, byte) in daemon.disk.data.lock().unwrap().iter_mut().enumerate() {
        *byte = (i % 251) as u8;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn writes_of_virtio_blk_are_logged(
        rounds in rounds(blk_requests()),
        cuts in prop::collection::vec(any::<u32>(), 40),
        size in prop_oneof![Just(64u16), Just(256)],
    ) {
        compare(Vmm::new(&daemon(), 0, 3, size), &rounds, &cuts);
    }

    #[test]
    fn writes_of_virtio_scsi_are_logged(
        rounds in rounds(scsi_requests()),
        cuts in prop::collection::vec(any::<u32>(), 40),
        size in prop_oneof![Just(64u16), Just(256)],
    ) {
        let daemon = daemon();
        let dir = Dir::new();
        let (config, disk) = (daemon.config(Listen::Path(dir.socket()), 3), daemon.disk.clone());
        let export = run_on(&daemon.control, move |event_loop| {
            VhostUserExport::scsi(event_loop, config, vec![disk])
        });
        // Requests are in queues 2 to 4.
        compare(Vmm::on(&dir.socket(), 2, 3, size), &rounds, &cuts);
        let export = export.unwrap();
        run_on(&daemon.control, move |_| export.stop()).unwrap();
    }
}

#[test]
fn requests_in_flight_at_the_start_of_logging_are_logged_and_none_after_its_end() {
    // Memory for the log comes first with QEMU, or last when a device starts during a migration.
    for base_first in [true, false] {
        let daemon = daemon();
        let mut vmm = Vmm::new(&daemon, 0, 1, 64);
        vmm.enable(true);
        daemon.disk.close_gate();
        let cuts = &mut [0x0123_4567].into_iter().cycle();
        let read = vmm.add(0, &blk(0, 5, 20_000 / 512 * 512), cuts);
        vmm.kick();
        eventually("the request is in flight", || daemon.disk.waiting() == 1);
        let log = log_file(LOG_SIZE);
        if base_first {
            vmm.set_log(&log, LOG_SIZE).unwrap();
            vmm.set_logging(true);
        } else {
            vmm.set_logging(true);
            vmm.set_log(&log, LOG_SIZE).unwrap();
        }
        daemon.disk.open_gate();
        vmm.wait(0, 1);
        // In time: when the driver sees the answer. The used ring is marked once the queue stops.
        let now = marked(&log);
        assert!(pages(&read).all(|page| now.contains(&page)), "{now:x?}");

        // A new log, as after a change of the memory: from its answer on it is that one.
        let other = log_file(LOG_SIZE * 2);
        vmm.set_log(&other, LOG_SIZE * 2).unwrap();
        let before = marked(&log);
        let read = vmm.add(0, &blk(0, 9, 4096), cuts);
        vmm.kick();
        vmm.wait(0, 1);
        let now = marked(&other);
        assert!(pages(&read).all(|page| now.contains(&page)), "{now:x?}");
        assert_eq!(marked(&log), before);

        vmm.set_logging(false);
        let before = marked(&other);
        vmm.add(0, &blk(0, 100, 4096), cuts);
        vmm.kick();
        vmm.wait(0, 1);
        vmm.stop();
        assert_eq!(marked(&other), before);
        drop(vmm);
        eventually("the log is unmapped", || {
            !std::fs::read_to_string("/proc/self/maps").unwrap().contains("log-of-a-test")
        });
    }
}

#[test]
fn the_log_eventfd_is_signalled() {
    let daemon = daemon();
    let mut vmm = Vmm::new(&daemon, 0, 1, 64);
    vmm.enable(true);
    let log = log_file(LOG_SIZE);
    let told = EventFd::new(EFD_NONBLOCK).unwrap();
    vmm.set_log(&log, LOG_SIZE).unwrap();
    vmm.front_end.set_log_fd(told.as_raw_fd()).unwrap();
    vmm.add(0, &blk(0, 0, 512), &mut [0x77].into_iter().cycle());
    vmm.kick();
    vmm.wait(0, 1);
    assert!(!is_signalled(&told, Duration::ZERO), "nothing is logged yet");
    vmm.set_logging(true);
    vmm.add(0, &blk(0, 0, 512), &mut [0x77].into_iter().cycle());
    vmm.kick();
    vmm.wait(0, 1);
    assert!(is_signalled(&told, PATIENCE));
}

/// Where the guest goes, its record does not come along.
#[test]
fn a_held_request_fails_if_its_queue_ends_while_writes_are_logged_and_is_left_else() {
    let daemon = daemon();
    let (policy, _told) = ErrorPolicy::new(OnError::Report, OnError::Stop);
    let node = with_policy(daemon.disk.clone(), policy.clone());
    let dir = Dir::new();
    let _export = daemon.start_with(daemon.config(Listen::Path(dir.socket()), 1), node).unwrap();
    let mut vmm = Vmm::on(&dir.socket(), 0, 1, 64);
    vmm.stop();
    let wanted = VhostUserInflight { mmap_size: 0, mmap_offset: 0, num_queues: 1, queue_size: 64 };
    let (inflight, record) = vmm.front_end.get_inflight_fd(&wanted).unwrap();
    vmm.front_end.set_inflight_fd(&inflight, record.as_raw_fd()).unwrap();
    vmm.start(0, false);
    vmm.enable(true);
    let cuts = &mut [0x77].into_iter().cycle();

    daemon.disk.is_full.store(true, Ordering::SeqCst);
    let status = vmm.add(0, &blk(1, 5, 512), cuts);
    vmm.kick();
    eventually("the write is held", || policy.is_stopped());
    vmm.stop();
    assert!(vmm.queues[0].driver.reap().is_none(), "left");

    vmm.start(0, false);
    let log = log_file(LOG_SIZE);
    vmm.set_log(&log, LOG_SIZE).unwrap();
    vmm.set_logging(true);
    // The queue stops for the change of the memory, and continues after it.
    vmm.set_memory();
    assert!(vmm.queues[0].driver.reap().is_none(), "left");
    vmm.stop();
    assert!(vmm.queues[0].driver.reap().is_some(), "answered");
    assert_eq!(vmm.view.read_u8(status[0].addr).unwrap(), 1, "an I/O error");
    let now = marked(&log);
    let answer = [status, vmm.used_rings()].concat();
    assert!(pages(&answer).all(|page| now.contains(&page)), "{now:x?}");

    // It does not go after all, and nothing is done again.
    vmm.set_logging(false);
    daemon.disk.is_full.store(false, Ordering::SeqCst);
    policy.resume(0);
    vmm.start(0, false);
    let status = vmm.add(0, &blk(1, 6, 512), cuts);
    vmm.kick();
    vmm.wait(0, 1);
    assert_eq!(vmm.view.read_u8(status[0].addr).unwrap(), 0);
    let disk = daemon.disk.data.lock().unwrap();
    assert!(
        disk[5 * SECTOR..6 * SECTOR] != [9; SECTOR] && disk[6 * SECTOR..7 * SECTOR] == [9; SECTOR]
    );
}

/// Memory that is no good as a log; and a word of what the log file says.
fn no_logs() -> [(OwnedFd, u64); 5] {
    let (_, pipe) = nix::unistd::pipe().unwrap();
    let directory = File::open("/").unwrap();
    let sealed = log_file(LOG_SIZE);
    fcntl(&sealed, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)).unwrap();
    [
        (pipe, LOG_SIZE),
        (directory.into(), LOG_SIZE),
        (sealed.into(), LOG_SIZE),
        (log_file(LOG_SIZE - 1).into(), LOG_SIZE),
        (log_file(LOG_SIZE).into(), 0),
    ]
}

#[test]
fn memory_that_is_no_good_for_a_log_costs_its_connection_and_no_other() {
    let daemon = daemon();
    let dir = Dir::new();
    let _other = daemon.start(daemon.config(Listen::Path(dir.socket()), 1)).unwrap();
    let mut neighbour = Vmm::on(&dir.socket(), 0, 1, 64);
    neighbour.enable(true);
    for (fd, size) in no_logs() {
        let mut vmm = Vmm::new(&daemon, 0, 1, 64);
        vmm.set_log(&fd, size).unwrap_err();
        vmm.front_end.get_features().unwrap_err();
        drop(vmm);
        neighbour.add(0, &blk(0, 0, 512), &mut [0x77].into_iter().cycle());
        neighbour.kick();
        neighbour.wait(0, 1);
    }
    // Too short for the guest's memory: that shows when it is to be used.
    let mut vmm = Vmm::new(&daemon, 0, 1, 64);
    vmm.set_log(&log_file(LOG_SIZE - 1), LOG_SIZE - 1).unwrap();
    vmm.set_features(true).unwrap_err();
    vmm.set_features(false).unwrap();
    // Or for memory that is added.
    vmm.set_log(&log_file(LOG_SIZE), LOG_SIZE).unwrap();
    vmm.set_features(true).unwrap();
    let region = memfd_region(REGIONS[1].0 * 2, 0x1000).unwrap();
    let info = VhostUserMemoryRegionInfo {
        guest_phys_addr: region.guest_addr,
        memory_size: region.size,
        userspace_addr: region.user_addr,
        mmap_offset: 0,
        mmap_handle: region.fd.as_raw_fd(),
    };
    vmm.front_end.add_mem_region(&info).unwrap_err();
    // Or for a used ring.
    let mut config = vring_config(vmm.queues[0].driver.config());
    config.flags = 1;
    config.log_addr = Some(LOG_SIZE * 8 * LOG_PAGE - 1);
    vmm.front_end.set_vring_addr(0, &config).unwrap_err();
    vmm.set_features(false).unwrap();
    vmm.front_end.add_mem_region(&info).unwrap();
}

#[test]
fn a_log_that_is_taken_away_breaks_its_queues_and_no_others() {
    let daemon = daemon();
    let dir = Dir::new();
    let _other = daemon.start(daemon.config(Listen::Path(dir.socket()), 1)).unwrap();
    let mut neighbour = Vmm::on(&dir.socket(), 0, 1, 64);
    neighbour.enable(true);
    let mut vmm = Vmm::new(&daemon, 0, 1, 64);
    vmm.enable(true);
    let log = log_file(LOG_SIZE);
    vmm.set_log(&log, LOG_SIZE).unwrap();
    vmm.set_logging(true);
    log.set_len(0).unwrap();
    let cuts = &mut [0x77].into_iter().cycle();
    // The mark of the first answer is lost, because the pages of the log are gone.
    vmm.add(0, &blk(0, 0, 512), cuts);
    vmm.kick();
    vmm.wait(0, 1);
    vmm.add(0, &blk(0, 0, 512), cuts);
    vmm.kick();
    assert!(is_signalled(&vmm.queues[0].err, PATIENCE), "the queue is broken");
    neighbour.add(0, &blk(0, 0, SECTOR as u32), cuts);
    neighbour.kick();
    neighbour.wait(0, 1);
}

#[test]
fn a_log_needs_shared_memory_agreed_on() {
    let daemon = daemon();
    let mut stream = daemon.connect();
    let payload = [LOG_SIZE, 0].map(u64::to_ne_bytes).concat();
    let request = exports::vhost_user::wire::Request::SetLogBase;
    let log = log_file(LOG_SIZE);
    common::send_with(&stream, &common::message(request, 0, &payload), &[log.as_raw_fd()]);
    assert_eq!(common::receive(&mut stream), None);
}
