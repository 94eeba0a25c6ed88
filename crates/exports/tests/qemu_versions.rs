//! The orders of messages of QEMU's versions, from a front end that repeats them.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

use crate::common;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use block::job::OnError;
use block::policy::{ErrorPolicy, with_policy};
use common::{
    Daemon, Dir, Guest, MEMORY, Options, PATIENCE, SECTOR, ask, connect, eventually, message,
    receive, run_on, send_with,
};
use exports::vhost_user::session::{
    VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES, protocol_features,
};
use exports::vhost_user::wire::{HEADER_LEN, Request};
use exports::vhost_user::{Listen, VhostUserExport, fd_passing};
use guest_memory::LOG_PAGE;
use guest_memory::test_util::USER_BASE;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// `queue-size` of QEMU's vhost-user-blk-pci, in its message for an in-flight record.
const ASKED: u16 = 128;
/// Entries of QEMU 10.0.13's rings, whatever `queue-size` says.
const RING: u16 = 1024;

/// The record of requests in flight, as QEMU keeps it: the memory's size from the reply, the number of entries from its
/// own property.
#[derive(Debug)]
struct Record {
    mmap_size: u64,
    queue_size: u16,
    fd: OwnedFd,
}

impl Record {
    /// The record that ringmill 0.1 made for one ring: as many entries as asked for, and the write cache mode.
    fn of_an_earlier_version(entries: u16) -> Self {
        let mmap_size = u64::from(16 + 16 * entries).next_multiple_of(64) + 64;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create("earlier", flags).unwrap();
        nix::unistd::ftruncate(&fd, mmap_size as i64).unwrap();
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW)).unwrap();
        Record { mmap_size, queue_size: entries, fd }
    }

    /// The same record, which QEMU gives to the next daemon.
    fn again(&self) -> Self {
        Record { fd: self.fd.try_clone().unwrap(), ..*self }
    }

    fn payload(&self, num_queues: u16) -> Vec<u8> {
        let mut payload = [self.mmap_size, 0].map(u64::to_ne_bytes).concat();
        payload.extend([num_queues, self.queue_size].map(u16::to_ne_bytes).concat());
        payload.extend([0; 4]);
        payload
    }
}

/// Versions of QEMU that stop a device in different orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    /// Sets status 0 first. Debian 12.
    Q7_2,
    /// Sets status 0 last. Debian 13.
    Q10_0,
}

const VERSIONS: [Version; 2] = [Version::Q7_2, Version::Q10_0];

/// QEMU with one disk.
struct Qemu {
    stream: UnixStream,
    guest: Guest,
    record: Option<Record>,
    features: u64,
}

impl Qemu {
    /// Connects, as a vhost-user-blk device does when it is created.
    fn connect(daemon: &Daemon, guest: Guest, record: Option<Record>) -> Self {
        Self::on(connect(&daemon.socket()), guest, record)
    }

    fn on(mut stream: UnixStream, guest: Guest, record: Option<Record>) -> Self {
        let offered = ask(&mut stream, Request::GetFeatures, 0, &[]);
        assert_ne!(offered & VHOST_USER_F_PROTOCOL_FEATURES, 0);
        let of_protocol = ask(&mut stream, Request::GetProtocolFeatures, 0, &[]);
        assert_ne!(of_protocol & protocol_features::STATUS, 0);
        // Without REPLY_ACK a refused message ends the connection.
        let wanted = of_protocol & !protocol_features::REPLY_ACK;
        send_with(&stream, &message(Request::SetProtocolFeatures, 0, &wanted.to_ne_bytes()), &[]);
        ask(&mut stream, Request::GetQueueNum, 0, &[]);
        send_with(&stream, &message(Request::SetOwner, 0, &[]), &[]);
        let features = offered & !VHOST_F_LOG_ALL;
        Qemu { stream, guest, record, features }
    }

    fn send(&self, request: Request, payload: &[u8], fds: &[RawFd]) {
        send_with(&self.stream, &message(request, 0, payload), fds);
    }

    fn state(&self, request: Request, index: usize, num: u32) {
        self.send(request, &[index as u32, num].map(u32::to_ne_bytes).concat(), &[]);
    }

    fn status(&self, status: u64) {
        self.send(Request::SetStatus, &status.to_ne_bytes(), &[]);
    }

    fn num_queues(&self) -> u16 {
        self.guest.queues.len() as u16
    }

    /// Starts the device, with the rings at `bases`.
    fn start(&mut self, bases: &[u16]) {
        if self.record.is_none() {
            self.record = Some(self.new_record());
        }
        if let Some(record) = &self.record {
            let payload = record.payload(self.num_queues());
            self.send(Request::SetInflightFd, &payload, &[record.fd.as_raw_fd()]);
        }
        self.send(Request::SetFeatures, &self.features.to_ne_bytes(), &[]);
        let table: Vec<u8> =
            [1, 0, MEMORY, USER_BASE, 0].into_iter().flat_map(u64::to_ne_bytes).collect();
        self.send(Request::SetMemTable, &table, &[self.guest.files[0].as_raw_fd()]);
        for (index, (queue, base)) in self.guest.queues.iter().zip(bases).enumerate() {
            let config = queue.driver.config();
            self.state(Request::SetVringNum, index, config.size.into());
            self.state(Request::SetVringBase, index, (*base).into());
            let addr: Vec<u8> = [index as u64, config.desc, config.used, config.avail, 0]
                .into_iter()
                .flat_map(u64::to_ne_bytes)
                .collect();
            self.send(Request::SetVringAddr, &addr, &[]);
            let index = (index as u64).to_ne_bytes();
            self.send(Request::SetVringKick, &index, &[queue.kick.as_raw_fd()]);
            self.send(Request::SetVringCall, &index, &[queue.call.as_raw_fd()]);
        }
        for index in 0..self.guest.queues.len() {
            self.state(Request::SetVringEnable, index, 1);
        }
        self.status(4);
    }

    /// Stops the device: the guest is paused, or has reset its driver. Returns where the rings were stopped.
    fn stop(&mut self, version: Version) -> Vec<u16> {
        let rings = 0..self.guest.queues.len();
        if version == Version::Q7_2 {
            self.status(0);
        }
        for index in rings.clone() {
            self.state(Request::SetVringEnable, index, 0);
        }
        let bases = rings.map(|index| self.base_of(index)).collect();
        if version == Version::Q10_0 {
            self.status(0);
        }
        bases
    }

    fn base_of(&mut self, index: usize) -> u16 {
        self.state(Request::GetVringBase, index, 0);
        let (code, payload) = receive(&mut self.stream).expect("a reply");
        assert_eq!(code, Request::GetVringBase as u32);
        assert_eq!(payload[..4], (index as u32).to_ne_bytes());
        u32::from_ne_bytes(payload[4..].try_into().unwrap()).try_into().unwrap()
    }

    /// Gets a record: the reply's size counts, the number of entries stays the property's.
    fn new_record(&mut self) -> Record {
        let mut payload = [0; 24];
        payload[16..20]
            .copy_from_slice([self.num_queues(), ASKED].map(u16::to_ne_bytes).as_flattened());
        self.send(Request::GetInflightFd, &payload, &[]);
        let mut bytes = [0; HEADER_LEN + 24];
        let mut fds = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let patience = PollTimeout::try_from(PATIENCE).unwrap();
            poll(&mut [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)], patience).unwrap();
            let received = fd_passing::receive(self.stream.as_fd(), &mut bytes[at..]).unwrap();
            assert_ne!(received.len, 0, "closed");
            at += received.len;
            fds.extend(received.fds);
        }
        let mmap_size = u64::from_ne_bytes(bytes[HEADER_LEN..HEADER_LEN + 8].try_into().unwrap());
        Record { mmap_size, queue_size: ASKED, fd: fds.pop().unwrap() }
    }
}

fn write_one(qemu: &mut Qemu, queue: usize, byte: u8) {
    assert_eq!(qemu.guest.write(queue, u64::from(byte), &[byte; SECTOR]), 0);
    assert_eq!(qemu.guest.read(queue, u64::from(byte), SECTOR), [byte; SECTOR]);
}

/// As if the process had died: it takes no more requests, and answers none while the disk's gate is closed.
fn kill(daemon: &mut Daemon) -> VhostUserExport {
    let export = daemon.take();
    run_on(&daemon.control, move |_| async move {
        export.set_paused(true).await;
        export
    })
}

/// As QEMU 10.0.13 does it. The record outlives a daemon that is killed with requests in flight in both rings.
#[test]
fn rings_larger_than_asked_for_have_a_record() {
    let options = || Options { num_queues: 2, ..Options::default() };
    let mut first = Daemon::with(options());
    let mut qemu = Qemu::connect(&first, Guest::new(2, RING), None);
    qemu.start(&[0, 0]);
    write_one(&mut qemu, 0, 1);
    write_one(&mut qemu, 1, 2);
    // Entries of the descriptor table beyond those that were asked for.
    qemu.guest.offer_flushes(1, ASKED.into());
    for _ in 0..ASKED {
        assert_eq!(qemu.guest.wait(1), 0);
    }
    first.disk.close_gate();
    qemu.guest.offer(0, 1, 5, &[5; SECTOR]);
    qemu.guest.offer(1, 1, 6, &[6; SECTOR]);
    eventually("the requests are in flight", || first.disk.waiting() == 2);
    let killed = kill(&mut first);
    let Qemu { guest, record, stream: _first, .. } = qemu;
    let second = Daemon::with(options());
    let mut qemu = Qemu::connect(&second, guest, record.map(|record| record.again()));
    // QEMU does not know where the rings were.
    qemu.start(&[0, 0]);
    for (queue, byte) in [(0, 5), (1, 6)] {
        assert_eq!(qemu.guest.wait(queue), 0);
        let at = usize::from(byte) * SECTOR;
        assert_eq!(second.disk.data.lock().unwrap()[at..at + SECTOR], [byte; SECTOR]);
        write_one(&mut qemu, queue, 9);
    }
    first.disk.open_gate();
    drop(killed);
}

/// The disk starts all the same, and the record of a ring that fits is used.
#[test]
fn a_ring_runs_without_a_record_that_is_too_small() {
    for (entries, size, is_kept) in [(64, 1024, false), (64, 64, true)] {
        let mut first = Daemon::new();
        let record = Record::of_an_earlier_version(entries);
        let mut qemu = Qemu::connect(&first, Guest::new(1, size), Some(record));
        qemu.start(&[0]);
        write_one(&mut qemu, 0, 1);
        first.disk.close_gate();
        qemu.guest.offer(0, 1, 5, &[5; SECTOR]);
        eventually("the request is in flight", || first.disk.waiting() == 1);
        let killed = kill(&mut first);
        let Qemu { guest, record, stream: _first, .. } = qemu;
        let second = Daemon::new();
        let mut qemu = Qemu::connect(&second, guest, record.map(|record| record.again()));
        qemu.start(&[3]);
        if is_kept {
            assert_eq!(qemu.guest.wait(0), 0);
        }
        write_one(&mut qemu, 0, 2);
        let disk = second.disk.data.lock().unwrap();
        assert_eq!(disk[5 * SECTOR], if is_kept { 5 } else { 0 }, "{entries}");
        drop(disk);
        first.disk.open_gate();
        drop(killed);
    }
}

/// By `stop` and `cont`, and by `virsh save`: another QEMU begins where the first one stopped.
#[test]
fn a_paused_guest_continues_where_it_was() {
    for version in VERSIONS {
        let daemon = Daemon::with(Options { num_queues: 2, ..Options::default() });
        let mut qemu = Qemu::connect(&daemon, Guest::new(2, 128), None);
        qemu.start(&[0, 0]);
        write_one(&mut qemu, 0, 1);
        write_one(&mut qemu, 1, 2);
        write_one(&mut qemu, 1, 3);
        for _ in 0..2 {
            let bases = qemu.stop(version);
            assert_eq!(bases, [2, 4], "{version:?}");
            // QEMU asks once more when it saves the state.
            assert_eq!(qemu.base_of(1), 4, "{version:?}");
            qemu.start(&bases);
        }
        // Saved, and restored by another QEMU.
        let bases = qemu.stop(version);
        let Qemu { guest, stream, .. } = qemu;
        drop(stream);
        let mut qemu = Qemu::connect(&daemon, guest, None);
        qemu.start(&bases);
        write_one(&mut qemu, 0, 5);
        write_one(&mut qemu, 1, 6);
        assert_eq!(qemu.stop(version), [4, 6], "{version:?}");
    }
}

/// With the record that the front end has kept: the driver's new rings begin at 0.
#[test]
fn a_driver_s_reset_begins_anew() {
    for version in VERSIONS {
        let daemon = Daemon::new();
        let mut qemu = Qemu::connect(&daemon, Guest::new(1, 128), None);
        for round in 1..4 {
            qemu.start(&[0]);
            write_one(&mut qemu, 0, round);
            assert_eq!(qemu.stop(version), [2], "{version:?}");
            qemu.guest = Guest::new(1, 128);
        }
    }
}

/// A disk that is full holds writes (`werror=stop`) beyond a pause of the guest, which sees no error. A reset of the
/// driver ends them.
#[test]
fn held_requests_outlive_a_pause_and_not_a_reset() {
    for (version, is_reset) in VERSIONS.into_iter().flat_map(|v| [(v, false), (v, true)]) {
        let daemon = Daemon::new();
        let (policy, _told) = ErrorPolicy::new(OnError::Report, OnError::Stop);
        let node = with_policy(daemon.disk.clone(), policy.clone());
        let dir = Dir::new();
        let export = daemon.start_with(daemon.config(Listen::Path(dir.socket()), 1), node);
        let mut qemu = Qemu::on(connect(&dir.socket()), Guest::new(1, 128), None);
        qemu.start(&[0]);
        write_one(&mut qemu, 0, 1);
        daemon.disk.is_full.store(true, Ordering::SeqCst);
        qemu.guest.offer(0, 1, 5, &[5; SECTOR]);
        eventually("the write is held", || policy.is_stopped());
        let bases = qemu.stop(version);
        assert_eq!((bases.as_slice(), qemu.guest.reap(0)), (&[3][..], None), "{version:?}");
        daemon.disk.is_full.store(false, Ordering::SeqCst);
        policy.resume(0);
        if is_reset {
            qemu.guest = Guest::new(1, 128);
            qemu.start(&[0]);
        } else {
            qemu.start(&bases);
            assert_eq!(qemu.guest.wait(0), 0, "{version:?}");
        }
        write_one(&mut qemu, 0, 6);
        let disk = daemon.disk.data.lock().unwrap();
        assert_eq!(disk[5 * SECTOR], if is_reset { 0 } else { 5 }, "{version:?}");
        drop(export);
    }
}

/// At the end of a migration, requests in flight end before the log does.
#[test]
fn requests_that_end_at_the_end_of_a_migration_are_logged() {
    for version in VERSIONS {
        let daemon = Daemon::new();
        let mut qemu = Qemu::connect(&daemon, Guest::new(1, 128), None);
        let log = memfd_create("log", MFdFlags::MFD_CLOEXEC).unwrap();
        let log_size = MEMORY / LOG_PAGE / 8;
        nix::unistd::ftruncate(&log, log_size as i64).unwrap();
        qemu.features |= VHOST_F_LOG_ALL;
        let payload = [log_size, 0].map(u64::to_ne_bytes).concat();
        qemu.send(Request::SetLogBase, &payload, &[log.as_raw_fd()]);
        receive(&mut qemu.stream).expect("a reply");
        qemu.start(&[0]);
        daemon.disk.close_gate();
        qemu.guest.offer(0, 0, 5, &[0xee; SECTOR]);
        eventually("the read is in flight", || daemon.disk.waiting() == 1);
        if version == Version::Q7_2 {
            qemu.status(0);
        }
        daemon.disk.open_gate();
        assert_eq!(qemu.stop(version), [1], "{version:?}");
        assert_eq!(qemu.guest.reap(0), Some(0), "{version:?}");
        let mut bits = vec![0; log_size as usize];
        File::from(log).read_exact_at(&mut bits, 0).unwrap();
        let page = (common::DATA + 0x1000) / LOG_PAGE;
        assert_ne!(bits[(page / 8) as usize] & 1 << (page % 8), 0, "{version:?}");
        // The migration failed, and the guest continues here.
        qemu.features &= !VHOST_F_LOG_ALL;
        qemu.start(&[1]);
        write_one(&mut qemu, 0, 1);
    }
}
