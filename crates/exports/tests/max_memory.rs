//! A hostile front end does not take the address space of the process from the others: the next allocation for one of
//! them would abort the process.

use crate::common;
use crate::vfio_user::client::{self, DMA_MAP, DMA_UNMAP, dma_map, dma_unmap};

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use common::vmm::Vmm;
use common::{
    Daemon, Dir, NEED_REPLY, SECTOR, connect, eventually, message, number, receive, send_with,
    with_reply_ack,
};
use exports::vhost_user::wire::Request;
use exports::vhost_user::{Listen, VhostUserConfig};
use guest_memory::default_max_memory;
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};

const TIB: u64 = 1 << 40;
/// Where the front end has the guest's memory.
const USER: u64 = 1 << 62;

fn sparse(size: u64) -> OwnedFd {
    let fd = memfd_create("hostile", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&fd, size as i64).unwrap();
    fd
}

/// Bytes of hostile memory in this process.
fn mapped() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let size = |line: &str| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        let address = |text| u64::from_str_radix(text, 16).ok();
        Some(address(to)? - address(from)?)
    };
    maps.lines().filter(|line| line.contains("memfd:hostile")).filter_map(size).sum()
}

/// Adds a region, by which the guest's memory ends at `at + size`. Whether it was taken.
fn add(stream: &mut UnixStream, at: u64, size: u64) -> bool {
    let payload: Vec<u8> =
        [0, at, size, USER + at, 0].into_iter().flat_map(u64::to_ne_bytes).collect();
    let fd = sparse(size);
    send_with(stream, &message(Request::AddMemReg, NEED_REPLY, &payload), &[fd.as_raw_fd()]);
    number(stream, Request::AddMemReg as u32) == 0
}

/// Adds as much as is taken: regions of 64 TiB, half as large after each refusal.
fn fill(mut add: impl FnMut(u64, u64) -> bool) {
    let (mut at, mut size) = (0, 64 * TIB);
    while size > 1 << 30 {
        if add(at, size) { at += size } else { size /= 2 }
    }
}

/// That another guest is served.
fn others_are_served() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.start();
    assert_eq!(vmm.guest.write(0, 5, &[5; SECTOR]), 0);
}

#[test]
fn a_vhost_user_front_end_does_not_fill_the_address_space() {
    let daemon = Daemon::new();
    for _ in 0..2 {
        let mut stream = with_reply_ack(daemon.connect());
        fill(|at, size| add(&mut stream, at, size));
        let used = mapped();
        assert!(used > 0 && used <= default_max_memory(), "{used:#x}");
        others_are_served();
        // Also by other messages. The first one is answered, the second ends the connection.
        let fd = sparse(64 * TIB);
        let table: Vec<u8> =
            [1, 0, 64 * TIB, USER, 0].into_iter().flat_map(u64::to_ne_bytes).collect();
        send_with(&stream, &message(Request::SetMemTable, NEED_REPLY, &table), &[fd.as_raw_fd()]);
        assert_eq!(number(&mut stream, Request::SetMemTable as u32), 1);
        let log = [64 * TIB, 0].map(u64::to_ne_bytes).concat();
        send_with(&stream, &message(Request::SetLogBase, 0, &log), &[fd.as_raw_fd()]);
        assert_eq!(receive(&mut stream), None);
        // Memory comes back for the next front end.
        eventually("it is unmapped", || mapped() == 0);
    }
}

#[test]
fn a_vfio_user_client_does_not_fill_the_address_space() {
    let daemon = client::Daemon::new();
    for _ in 0..2 {
        let mut client = daemon.client();
        let mut map = |at, size| {
            let fd = sparse(size);
            let (errno, _) = client.ask(DMA_MAP, &dma_map(at, size), &[fd.as_raw_fd()]);
            assert!(errno == 0 || errno == Errno::ENOMEM as u32, "{errno}");
            errno == 0
        };
        fill(&mut map);
        let used = mapped();
        assert!(used > 0 && used <= default_max_memory(), "{used:#x}");
        others_are_served();
        drop(client);
        eventually("it is unmapped", || mapped() == 0);
    }
    daemon.stop();
}

#[test]
fn max_memory_is_what_a_front_end_may_map_at_a_time() {
    const MIB: u64 = 1 << 20;
    let daemon = client::Daemon::with_max_memory(Some(3 * MIB));
    let mut client = daemon.client();
    let fd = sparse(4 * MIB);
    let fds = [fd.as_raw_fd()];
    client.ok(DMA_MAP, &dma_map(0, MIB), &fds);
    client.ok(DMA_MAP, &dma_map(MIB, 2 * MIB), &fds);
    let (errno, _) = client.ask(DMA_MAP, &dma_map(4 * MIB, 4096), &fds);
    assert_eq!(errno, Errno::ENOMEM as u32);
    client.ok(DMA_UNMAP, &dma_unmap(0, MIB), &[]);
    client.ok(DMA_MAP, &dma_map(4 * MIB, MIB), &fds);
    drop(client);
    daemon.stop();

    let daemon = Daemon::new();
    let dir = Dir::new();
    let config = daemon.config(Listen::Path(dir.socket()), 1);
    let config = VhostUserConfig { max_memory: Some(3 * MIB), ..config };
    let export = daemon.start(config).unwrap();
    let mut stream = with_reply_ack(connect(&dir.socket()));
    assert!(add(&mut stream, 0, MIB) && add(&mut stream, MIB, 2 * MIB));
    assert!(!add(&mut stream, 4 * MIB, 4096));
    // A table replaces the regions.
    let table: Vec<u8> = [1, 0, 3 * MIB, USER, 0].into_iter().flat_map(u64::to_ne_bytes).collect();
    send_with(&stream, &message(Request::SetMemTable, NEED_REPLY, &table), &fds);
    assert_eq!(number(&mut stream, Request::SetMemTable as u32), 0);
    drop(export);
}

/// However much each of them may map.
#[test]
fn front_ends_together_leave_half_of_the_address_space() {
    let daemon = Daemon::new();
    let dirs = [Dir::new(), Dir::new()];
    let exports = dirs.each_ref().map(|dir| {
        let config = daemon.config(Listen::Path(dir.socket()), 1);
        daemon.start(VhostUserConfig { max_memory: Some(u64::MAX), ..config }).unwrap()
    });
    let [mut first, mut second] = dirs.each_ref().map(|dir| with_reply_ack(connect(&dir.socket())));
    assert!(add(&mut first, 0, 40 * TIB));
    assert!(!add(&mut second, 0, 40 * TIB));
    assert!(add(&mut second, 0, 20 * TIB));
    others_are_served();
    drop(first);
    eventually("memory is given back", || mapped() == 20 * TIB);
    assert!(add(&mut second, 40 * TIB, 40 * TIB));
    drop(exports);
}
