//! The orders of messages of QEMU's versions, from a front end that repeats them.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

mod common;

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use common::{
    Daemon, Guest, MEMORY, Options, PATIENCE, SECTOR, ask, connect, eventually, message, run_on,
    send_with,
};
use exports::vhost_user::session::{
    VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES, protocol_features,
};
use exports::vhost_user::wire::{HEADER_LEN, Request};
use exports::vhost_user::{VhostUserExport, fd_passing};
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
        let mut stream = connect(&daemon.socket());
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
