//! vfio-user: an AHCI controller before a client of the tests' own.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

pub(crate) mod client;
use crate::common;
mod wire;

use std::io::Read;
use std::os::fd::AsRawFd;

use client::*;
use common::{NOT_YET, eventually, is_signalled};
use nix::errno::Errno;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

fn u32_at(payload: &[u8], word: usize) -> u32 {
    u32::from_ne_bytes(payload[4 * word..4 * word + 4].try_into().unwrap())
}

#[test]
fn a_client_finds_an_ahci_controller() {
    let daemon = Daemon::new();
    let mut client = Client::new(daemon.connect());
    let offer = client.ok(VERSION, &version(0), &[]);
    assert_eq!(offer[..4], [0; 4]);
    let offer = String::from_utf8(offer[4..].to_vec()).unwrap();
    assert!(offer.contains("\"write_multiple\":true") && offer.ends_with("}}\0"), "{offer}");
    let info = client.ok(DEVICE_GET_INFO, &words(&[16, 0, 0, 0]), &[]);
    assert_eq!(info, words(&[16, 3, 9, 5]));
    let sizes: Vec<u32> = (0..9)
        .map(|index| {
            let info = client.ok(GET_REGION_INFO, &words(&[32, 0, index, 0, 0, 0, 0, 0]), &[]);
            assert_eq!((u32_at(&info, 2), u32_at(&info, 5)), (index, 0));
            // Neither can be mapped: QEMU posts writes only then.
            assert_eq!(u32_at(&info, 1), if u32_at(&info, 4) == 0 { 0 } else { 3 });
            u32_at(&info, 4)
        })
        .collect();
    assert_eq!(sizes, [0, 0, 0, 0, 0, 0x2000, 0, 256, 0]);
    let irqs: Vec<_> = (0..5)
        .map(|index| {
            let info = client.ok(GET_IRQ_INFO, &words(&[16, 0, index, 0]), &[]);
            (u32_at(&info, 1), u32_at(&info, 3))
        })
        .collect();
    assert_eq!(irqs, [(7, 1), (9, 1), (0, 0), (0, 0), (0, 0)]);
    assert_eq!(client.read(CONFIG, 0), 0x2922_8086);
    assert_eq!(client.read(CONFIG, 8) >> 8, 0x01_06_01);
    client.write(CONFIG, 0x24, u32::MAX);
    assert_eq!(client.read(CONFIG, 0x24), 0xffff_e000);
    assert_eq!(client.read(ABAR, 0x10), 0x0001_0300, "AHCI 1.3");
    client.ok(DEVICE_RESET, &[], &[]);
    assert_eq!(client.read(CONFIG, 0x24), 0);
    daemon.stop();
}

#[test]
fn wrong_and_unknown_messages_are_answered() {
    let daemon = Daemon::new();
    let mut client = daemon.client();
    for (command, payload, errno) in [
        (VERSION, version(0), Errno::EINVAL),
        (DMA_READ, vec![0; 16], Errno::ENOSYS),
        (99, vec![0; 8000], Errno::ENOSYS),
        (DEVICE_FEATURE, words(&[8, 0]), Errno::ENOTTY),
        (GET_REGION_INFO, words(&[32, 0, 9, 0, 0, 0, 0, 0]), Errno::EINVAL),
        (GET_IRQ_INFO, words(&[16, 0, 5, 0]), Errno::EINVAL),
        (REGION_READ, region_read(ABAR, 0x1ffe, 4), Errno::EINVAL),
        (REGION_READ, region_read(0, 0, 4), Errno::EINVAL),
        // Of no bytes, of a region that the device does not have.
        (REGION_READ, region_read(0, 0, 0), Errno::EINVAL),
        (REGION_READ, region_read(CONFIG, u64::MAX, 4), Errno::EINVAL),
        (REGION_READ, region_read(ABAR, 0, 4097), Errno::E2BIG),
        (DEVICE_RESET, vec![0; 4], Errno::EINVAL),
        (DMA_UNMAP, dma_unmap(0, 4096), Errno::ENOENT),
        (DMA_MAP, dma_map(u64::MAX, 2), Errno::EINVAL),
        (SET_IRQS, set_irqs(DATA_NONE | TRIGGER, MSI, 1, 1), Errno::EINVAL),
        (SET_IRQS, set_irqs(DATA_NONE | UNMASK, MSI, 0, 1), Errno::EINVAL),
    ] {
        assert_eq!(
            Errno::from_raw(client.errno(command, &payload)),
            errno,
            "{command} {payload:?}"
        );
    }
    // A pipe is no eventfd.
    let (pipe, _other) = std::io::pipe().unwrap();
    let eventfds = set_irqs(DATA_EVENTFD | TRIGGER, MSI, 0, 1);
    assert_eq!(client.ask(SET_IRQS, &eventfds, &[pipe.as_raw_fd()]).0, Errno::EINVAL as u32);
    assert_eq!(client.read(CONFIG, 0), 0x2922_8086, "it is served on");
    // Who goes on like that is sent away.
    for _ in 0..40 {
        client.send(99, 0, &[], &[]);
    }
    let mut rest = Vec::new();
    let _ = client.socket.read_to_end(&mut rest);
    daemon.client();
    daemon.stop();
}

#[test]
fn a_client_without_a_version_is_not_served() {
    let daemon = Daemon::new();
    for (command, payload) in [(DEVICE_GET_INFO, words(&[16, 0, 0, 0])), (VERSION, version(1))] {
        let mut client = Client::new(daemon.connect());
        client.send(command, 0, &payload, &[]);
        assert_eq!(client.socket.read(&mut [0; 1]).unwrap(), 0);
    }
    daemon.stop();
}

#[test]
fn a_guest_writes_and_reads_sectors() {
    let daemon = Daemon::new();
    let (mut client, guest) = (daemon.client(), Guest::new());
    guest.start(&mut client, MSI);
    for (command, byte) in [(WRITE, 7), (READ, 0)] {
        guest.put(byte);
        guest.prepare(command, 3);
        client.write(ABAR, PX_CI, 1);
        assert!(guest.is_interrupted());
        assert_eq!(client.read(ABAR, PX_CI), 0);
        client.write(ABAR, PX_IS, u32::MAX);
        client.write(ABAR, IS, 1);
    }
    assert_eq!(guest.data(), [7; 512]);
    assert_eq!(daemon.disk.data.lock().unwrap()[3 * 512..4 * 512], [7; 512]);
    daemon.stop();
}

/// As QEMU writes registers: several at once, and without a reply.
#[test]
fn posted_writes_are_not_answered() {
    let daemon = Daemon::new();
    let (mut client, guest) = (daemon.client(), Guest::new());
    guest.start(&mut client, MSI);
    guest.put(9);
    guest.prepare(WRITE, 0);
    let mut writes = 2u64.to_ne_bytes().to_vec();
    for (offset, value) in [(PX_IS, u32::MAX), (PX_CI, 1)] {
        writes.extend(region(ABAR, offset, &value.to_ne_bytes()));
        writes.extend([0; 4]);
    }
    client.send(REGION_WRITE_MULTI, NO_REPLY, &writes, &[]);
    client.send(99, NO_REPLY, &[], &[]);
    assert!(guest.is_interrupted());
    assert_eq!(client.read(ABAR, PX_CI), 0);
    assert_eq!(daemon.disk.data.lock().unwrap()[..512], [9; 512]);
    daemon.stop();
}

#[test]
fn level_interrupts_are_masked_until_they_are_ended() {
    let daemon = Daemon::new();
    let (mut client, guest) = (daemon.client(), Guest::new());
    guest.start(&mut client, INTX);
    guest.prepare(READ, 0);
    client.write(ABAR, PX_CI, 1);
    assert!(guest.is_interrupted());
    let unmask = set_irqs(DATA_NONE | UNMASK, INTX, 0, 1);
    client.ok(SET_IRQS, &unmask, &[]);
    assert!(guest.is_interrupted(), "the guest has not ended it in the device");
    client.write(ABAR, PX_IS, u32::MAX);
    client.write(ABAR, IS, 1);
    client.ok(SET_IRQS, &unmask, &[]);
    client.read(CONFIG, 0);
    assert!(!is_signalled(&guest.interrupt, NOT_YET));
    // KVM tells the end by an eventfd.
    let end = EventFd::new(EFD_NONBLOCK).unwrap();
    let by_eventfd = set_irqs(DATA_EVENTFD | UNMASK, INTX, 0, 1);
    client.ok(SET_IRQS, &by_eventfd, &[end.as_raw_fd()]);
    client.write(ABAR, PX_CI, 1);
    assert!(guest.is_interrupted());
    end.write(1).unwrap();
    assert!(guest.is_interrupted());
    // Taken away, nothing is signalled.
    client.ok(SET_IRQS, &set_irqs(DATA_NONE | TRIGGER, INTX, 0, 0), &[]);
    client.ok(SET_IRQS, &unmask, &[]);
    client.read(CONFIG, 0);
    assert!(!is_signalled(&guest.interrupt, NOT_YET));
    daemon.stop();
}

/// A driver that clears IS after more was set gets another message (AHCI 1.3.1, 10.6).
#[test]
fn an_interrupt_is_repeated_while_its_status_is_set() {
    let daemon = Daemon::new();
    let (mut client, guest) = (daemon.client(), Guest::new());
    guest.start(&mut client, MSI);
    guest.prepare(READ, 0);
    client.write(ABAR, PX_CI, 1);
    assert!(guest.is_interrupted());
    client.write(ABAR, IS, 1);
    assert!(guest.is_interrupted(), "PxIS is set still");
    client.write(ABAR, PX_IS, u32::MAX);
    client.write(ABAR, IS, 1);
    client.read(CONFIG, 0);
    assert!(!is_signalled(&guest.interrupt, NOT_YET));
    daemon.stop();
}

#[test]
fn memory_goes_after_its_requests() {
    let daemon = Daemon::new();
    let (mut client, guest) = (daemon.client(), Guest::new());
    guest.start(&mut client, MSI);
    for (command, payload) in
        [(DMA_UNMAP, dma_unmap(0, MEMORY)), (DMA_UNMAP, unmap_all()), (DEVICE_RESET, vec![])]
    {
        daemon.disk.close_gate();
        guest.prepare(READ, 0);
        client.write(ABAR, PX_CI, 1);
        eventually("a request in flight", || daemon.disk.waiting() == 1);
        client.send(command, 0, &payload, &[]);
        client.socket.set_read_timeout(Some(NOT_YET)).unwrap();
        let early = client.socket.read(&mut [0; 1]);
        assert!(early.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
        client.socket.set_read_timeout(Some(common::PATIENCE)).unwrap();
        guest.put(1);
        daemon.disk.open_gate();
        let (errno, _) = client.answer(command);
        assert_eq!(errno, 0);
        assert_eq!(guest.data(), [0; 512], "it was read before the answer");
        if command == DEVICE_RESET {
            client.ok(DMA_UNMAP, &unmap_all(), &[]);
        }
        client.ok(DEVICE_RESET, &[], &[]);
        guest.start(&mut client, MSI);
    }
    daemon.stop();
}

fn unmap_all() -> Vec<u8> {
    [words(&[24, 2]), vec![0; 16]].concat()
}

#[test]
fn memory_without_a_file_is_none_for_the_device() {
    let daemon = Daemon::new();
    let (mut client, guest) = (daemon.client(), Guest::new());
    client.ok(DMA_MAP, &dma_map(MEMORY, 4096), &[]);
    guest.start(&mut client, MSI);
    assert_eq!(client.errno(DMA_MAP, &dma_map(MEMORY + 4095, 1)), Errno::EEXIST as i32);
    assert_eq!(client.errno(DMA_UNMAP, &dma_unmap(0, 4096)), Errno::ENOENT as i32);
    client.ok(DMA_UNMAP, &dma_unmap(0, MEMORY + 4096), &[]);
    guest.prepare(READ, 0);
    client.write(ABAR, PX_CI, 1);
    eventually("a host bus error", || client.read(ABAR, PX_IS) & 1 << 29 != 0);
    daemon.stop();
}

/// The next client is served when the requests of the one before have ended.
#[test]
fn a_client_leaves_with_a_request_in_flight() {
    let daemon = Daemon::new();
    let (mut client, guest) = (daemon.client(), Guest::new());
    guest.start(&mut client, MSI);
    daemon.disk.close_gate();
    guest.prepare(READ, 0);
    client.write(ABAR, PX_CI, 1);
    eventually("a request in flight", || daemon.disk.waiting() == 1);
    drop(client);
    let mut next = Client::new(daemon.connect());
    next.send(VERSION, 0, &version(0), &[]);
    next.socket.set_read_timeout(Some(NOT_YET)).unwrap();
    assert!(next.socket.read(&mut [0; 1]).is_err());
    next.socket.set_read_timeout(Some(common::PATIENCE)).unwrap();
    daemon.disk.open_gate();
    assert_eq!(next.answer(VERSION).0, 0);
    assert!(!is_signalled(&guest.interrupt, NOT_YET));
    let guest = Guest::new();
    guest.start(&mut next, MSI);
    guest.prepare(READ, 0);
    next.write(ABAR, PX_CI, 1);
    assert!(guest.is_interrupted());
    daemon.stop();
}

#[test]
fn a_client_may_die_at_any_byte() {
    let daemon = Daemon::new();
    let session = [
        message(1, VERSION, 0, &version(0)),
        message(2, DEVICE_GET_INFO, 0, &words(&[16, 0, 0, 0])),
        message(3, DMA_MAP, 0, &dma_map(0, 4096)),
        message(4, SET_IRQS, 0, &set_irqs(DATA_NONE | TRIGGER, MSI, 0, 0)),
        message(5, REGION_WRITE, 0, &region(ABAR, PX_IS, &[0xff; 4])),
        message(6, REGION_READ, 0, &region_read(CONFIG, 0, 256)),
        message(7, DMA_UNMAP, 0, &dma_unmap(0, 4096)),
        message(8, DEVICE_RESET, 0, &[]),
    ]
    .concat();
    for len in 0..=session.len() {
        Client::new(daemon.connect()).die(&session[..len]);
    }
    assert_eq!(daemon.client().read(CONFIG, 0), 0x2922_8086);
    daemon.stop();
}

/// One byte after the other is as good as all at once, and so is all at once.
#[test]
fn messages_come_in_any_pieces() {
    use std::io::Write;
    let daemon = Daemon::new();
    let session = [
        message(1, VERSION, 0, &version(0)),
        message(2, REGION_READ, 0, &region_read(CONFIG, 0, 4)),
        message(3, DEVICE_RESET, 0, &[]),
    ];
    for piece in [1, 7, 1000] {
        let mut socket = daemon.connect();
        for piece in session.concat().chunks(piece) {
            socket.write_all(piece).unwrap();
        }
        let mut client = Client::new(socket);
        for command in [VERSION, REGION_READ, DEVICE_RESET] {
            client.expect_next();
            assert_eq!(client.answer(command).0, 0);
        }
    }
    daemon.stop();
}
