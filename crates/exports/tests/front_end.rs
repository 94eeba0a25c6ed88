//! Tests an export with an independent front end: the one of the `vhost` crate.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

use crate::common;

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use common::vmm::{QUEUE_SIZE, Vmm, inflight_of};
use common::{
    Daemon, Guest, NOT_YET, Options, PATIENCE, SECTOR, connect, eventually, is_signalled,
};
use event_loop::RingChoice;
use stats::Kind;
use vhost::VhostBackend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

#[test]
fn a_queue_starts_serves_and_stops() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.start();
    assert_eq!(vmm.guest.write(0, 3, &[7; SECTOR]), 0);
    assert_eq!(daemon.disk.data.lock().unwrap()[3 * SECTOR..4 * SECTOR], [7; SECTOR]);
    assert_eq!(vmm.guest.read(0, 3, SECTOR), [7; SECTOR]);
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 2);
    // Stopped: what is offered now waits, and is served when the queue starts again.
    vmm.guest.offer(0, 0, 3, &[0; SECTOR]);
    vmm.start_queue(0, 2);
    assert_eq!(vmm.guest.wait(0), 0);
    // Published after the signal.
    let stats = &daemon.export().queue_stats()[0];
    eventually("statistics", || (stats.done(Kind::Read), stats.done(Kind::Write)) == (2, 1));
}

#[test]
fn queues_are_spread_over_the_io_threads() {
    let daemon = Daemon::with(Options { num_queues: 4, io_threads: 2, ..Options::default() });
    let mut vmm = Vmm::new(&daemon, 4);
    vmm.start();
    for queue in 0..4 {
        assert_eq!(vmm.guest.write(queue, queue as u64, &[queue as u8 + 1; SECTOR]), 0);
    }
    for queue in 0..4 {
        assert_eq!(vmm.guest.read(3 - queue, queue as u64, SECTOR), [queue as u8 + 1; SECTOR]);
    }
    for stats in daemon.export().queue_stats() {
        eventually("statistics", || (stats.done(Kind::Read), stats.done(Kind::Write)) == (1, 1));
    }
}

#[test]
fn config_space_is_read_and_its_toggle_written() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    let read = |front_end: &mut Frontend, offset, size: u32| {
        let buf = vec![0; size as usize];
        front_end.get_config(offset, size, VhostUserConfigFlags::WRITABLE, &buf).unwrap().1
    };
    let capacity = read(&mut vmm.front_end, 0, 8);
    assert_eq!(capacity, 2048u64.to_le_bytes());
    // struct virtio_blk_config: the writeback toggle is at 32.
    assert_eq!(read(&mut vmm.front_end, 32, 1), [1]);
    // This crate's front end uses 1 for "writable fields", where the specification has 0.
    let flags = VhostUserConfigFlags::empty();
    vmm.front_end.set_config(32, flags, &[0]).unwrap();
    assert_eq!(read(&mut vmm.front_end, 32, 1), [0]);
    // Other fields are not writable: ignored, as of QEMU's own device, and the toggle among them is heeded.
    vmm.front_end.set_config(0, flags, &[0; 8]).unwrap();
    assert_eq!(read(&mut vmm.front_end, 0, 8), capacity);
    vmm.front_end.set_config(31, flags, &[9, 1]).unwrap();
    assert_eq!(read(&mut vmm.front_end, 31, 2), [0, 1]);
    vmm.front_end.set_config(32, flags, &[0]).unwrap();
    // The end of the space is followed by zeroes: a front end may know more fields.
    assert_eq!(read(&mut vmm.front_end, 128, 64), [0; 64]);
    // A reset does not touch what front ends cache.
    vmm.front_end.reset_device().unwrap();
    assert_eq!(read(&mut vmm.front_end, 32, 1), [0]);
    drop(vmm);
    // The next front end that looks first begins anew.
    let mut vmm = Vmm::new(&daemon, 1);
    assert_eq!(read(&mut vmm.front_end, 32, 1), [1]);
}

#[test]
fn a_front_end_that_does_not_look_finds_the_write_cache_as_it_was() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.front_end.set_config(32, VhostUserConfigFlags::empty(), &[0]).unwrap();
    drop(vmm);
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.start();
    assert_eq!(vmm.guest.write(0, 0, &[1; SECTOR]), 0);
    let (_, data) = vmm.front_end.get_config(32, 1, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    assert_eq!(data, [0]);
}

#[test]
fn the_call_eventfd_is_signalled_when_it_is_handed_over() {
    let daemon = Daemon::new();
    let vmm = Vmm::new(&daemon, 1);
    let call = &vmm.guest.queues[0].call;
    assert!(!is_signalled(call, Duration::ZERO));
    vmm.front_end.set_vring_call(0, call).unwrap();
    assert_eq!(call.read().unwrap(), 1);
}

#[test]
fn a_disabled_ring_waits_until_it_is_enabled() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.start();
    vmm.front_end.set_vring_enable(0, false).unwrap();
    vmm.guest.offer(0, 1, 0, &[1; SECTOR]);
    // Whatever the queue would have done is done when the loop has answered this.
    vmm.front_end.set_vring_call(0, &vmm.guest.queues[0].call).unwrap();
    assert_eq!(vmm.guest.reap(0), None);
    vmm.front_end.set_vring_enable(0, true).unwrap();
    assert_eq!(vmm.guest.wait(0), 0);
}

#[test]
fn stopping_a_queue_waits_for_its_requests() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.start();
    daemon.disk.close_gate();
    vmm.guest.offer(0, 1, 5, &[5; SECTOR]);
    eventually("the request is in flight", || daemon.disk.waiting() == 1);
    std::thread::scope(|scope| {
        let front_end = &vmm.front_end;
        let (sender, stopped) = mpsc::channel();
        scope.spawn(move || sender.send(front_end.get_vring_base(0).unwrap()));
        stopped.recv_timeout(NOT_YET).unwrap_err();
        daemon.disk.open_gate();
        assert_eq!(stopped.recv_timeout(PATIENCE), Ok(1));
    });
    assert_eq!(vmm.guest.reap(0), Some(0));
}

#[test]
fn memory_is_added_and_removed_while_a_queue_runs() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.front_end.add_mem_region(&vmm.guest.region()).unwrap();
    vmm.start_queue(0, 0);
    assert_eq!(vmm.guest.write(0, 1, &[1; SECTOR]), 0);
    let more = Guest::new(0, 1);
    let mut region = more.region();
    region.guest_phys_addr += common::MEMORY;
    region.userspace_addr += common::MEMORY;
    vmm.front_end.add_mem_region(&region).unwrap();
    assert_eq!(vmm.guest.write(0, 2, &[2; SECTOR]), 0);
    // The same again overlaps.
    vmm.front_end.add_mem_region(&region).unwrap_err();
    vmm.front_end.remove_mem_region(&region).unwrap();
    vmm.front_end.remove_mem_region(&region).unwrap_err();
    assert_eq!(vmm.guest.read(0, 2, SECTOR), [2; SECTOR]);
    let regions = [vmm.guest.region()];
    vmm.front_end.set_mem_table(&regions).unwrap();
    assert_eq!(vmm.guest.read(0, 1, SECTOR), [1; SECTOR]);
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 4);
}

/// KiB that the process has pinned.
fn pinned_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    field.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

/// The only test here that pins memory, so what is pinned is its own.
#[test]
fn pinned_memory_follows_that_of_the_guest() {
    let pin_memory = true;
    let daemon =
        Daemon::with(Options { num_queues: 2, io_threads: 2, pin_memory, ..Options::default() });
    // By each I/O thread.
    let region_kib = 2 * common::MEMORY / 1024;
    let pinned = |regions: u64| {
        eventually("what is to be pinned is", || pinned_kib() == regions * region_kib);
    };
    for _ in 0..2 {
        let mut vmm = Vmm::new(&daemon, 2);
        vmm.front_end.add_mem_region(&vmm.guest.region()).unwrap();
        vmm.start_queue(0, 0);
        vmm.start_queue(1, 0);
        pinned(1);
        let more = Guest::new(0, 1);
        let mut region = more.region();
        region.guest_phys_addr += common::MEMORY;
        region.userspace_addr += common::MEMORY;
        let use_disk = |vmm: &mut Vmm, value: u8| {
            for queue in 0..2 {
                let sector = queue as u64;
                assert_eq!(vmm.guest.write(queue, sector, &[value; SECTOR]), 0);
                assert_eq!(vmm.guest.read(queue, sector, SECTOR), [value; SECTOR]);
            }
        };
        for round in 0..3 {
            vmm.front_end.add_mem_region(&region).unwrap();
            pinned(2);
            use_disk(&mut vmm, round);
            vmm.front_end.remove_mem_region(&region).unwrap();
            pinned(1);
            use_disk(&mut vmm, round + 100);
        }
        // Faster than it can be pinned.
        for round in 0..100 {
            vmm.front_end.add_mem_region(&region).unwrap();
            use_disk(&mut vmm, round);
            vmm.front_end.remove_mem_region(&region).unwrap();
        }
        let regions = [vmm.guest.region()];
        vmm.front_end.set_mem_table(&regions).unwrap();
        pinned(1);
        use_disk(&mut vmm, 200);
        // With requests in flight.
        daemon.disk.close_gate();
        vmm.guest.offer(0, 0, 5, &[0; SECTOR]);
        eventually("the request is in flight", || daemon.disk.waiting() == 1);
        drop(vmm);
        daemon.disk.open_gate();
        pinned(0);
    }
}

/// Logged warnings.
static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

#[test]
fn memory_that_cannot_be_pinned_is_used_as_it_is() {
    struct Warnings;
    impl log::Log for Warnings {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.level() == log::Level::Warn
        }
        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                WARNINGS.lock().unwrap().push(record.args().to_string());
            }
        }
        fn flush(&self) {}
    }
    log::set_logger(&Warnings).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let ring = RingChoice::Epoll;
    let daemon = Daemon::with(Options { num_queues: 2, io_threads: 2, ring, pin_memory: true });
    let warnings = || {
        let warnings = WARNINGS.lock().unwrap();
        warnings
            .iter()
            .filter(|warning| warning.contains("not pinned"))
            .cloned()
            .collect::<Vec<_>>()
    };
    for connection in 1..=2 {
        let mut vmm = Vmm::new(&daemon, 2);
        vmm.start();
        eventually("a warning", || warnings().len() == connection);
        for queue in 0..2 {
            assert_eq!(vmm.guest.write(queue, 1, &[1; SECTOR]), 0);
            assert_eq!(vmm.guest.read(queue, 1, SECTOR), [1; SECTOR]);
        }
        drop(vmm);
        eventually("its leave", || !daemon.export().is_connected());
        let warnings = warnings();
        assert_eq!(warnings.len(), connection, "{warnings:?}");
        let warning = &warnings[connection - 1];
        assert!(warning.contains("export e0") && warning.contains("ringmill probe"), "{warning}");
    }
}

#[test]
fn memory_is_unmapped_only_after_its_requests() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.front_end.add_mem_region(&vmm.guest.region()).unwrap();
    vmm.start_queue(0, 0);
    daemon.disk.close_gate();
    vmm.guest.offer(0, 0, 5, &[0; SECTOR]);
    eventually("the request is in flight", || daemon.disk.waiting() == 1);
    let region = vmm.guest.region();
    std::thread::scope(|scope| {
        let front_end = &mut vmm.front_end;
        let (sender, removed) = mpsc::channel();
        scope.spawn(move || sender.send(front_end.remove_mem_region(&region)));
        assert!(removed.recv_timeout(NOT_YET).is_err());
        daemon.disk.open_gate();
        // The reply reports that the ring could not continue, because its memory is gone.
        removed.recv_timeout(PATIENCE).unwrap().unwrap_err();
    });
    assert_eq!(vmm.guest.reap(0), Some(0));
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 1);
}

#[test]
fn wrong_requests_are_refused_and_the_session_continues() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    let features = vmm.front_end.get_features().unwrap();
    vmm.front_end.set_features(features | 1 << 63).unwrap_err();
    // Nothing known of the ring yet.
    vmm.front_end.set_vring_kick(0, &vmm.guest.queues[0].kick).unwrap_err();
    vmm.front_end.set_vring_num(0, 3).unwrap_err();
    // Rings outside of all memory.
    let config = vmm.guest.queues[0].driver.config();
    vmm.front_end.set_vring_num(0, config.size).unwrap();
    vmm.front_end.set_vring_addr(0, &common::vring_config(config)).unwrap();
    vmm.front_end.set_vring_kick(0, &vmm.guest.queues[0].kick).unwrap_err();
    // Memory that its file does not hold.
    let mut region = vmm.guest.region();
    region.memory_size *= 2;
    vmm.front_end.set_mem_table(&[region]).unwrap_err();
    vmm.start();
    assert_eq!(vmm.guest.write(0, 0, &[1; SECTOR]), 0);
    // Not while the ring runs.
    vmm.front_end.set_vring_base(0, 0).unwrap_err();
    vmm.front_end.set_features(0).unwrap_err();
    assert_eq!(vmm.guest.read(0, 0, SECTOR), [1; SECTOR]);
}

#[test]
fn a_reset_stops_the_rings_and_all_can_start_again() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.start();
    assert_eq!(vmm.guest.write(0, 0, &[1; SECTOR]), 0);
    vmm.front_end.reset_device().unwrap();
    let features = vmm.front_end.get_features().unwrap();
    vmm.front_end.set_features(features).unwrap();
    vmm.guest = Guest::new(1, QUEUE_SIZE);
    vmm.start();
    assert_eq!(vmm.guest.read(0, 0, SECTOR), [1; SECTOR]);
}

#[test]
fn a_front_end_that_vanishes_in_flight_is_followed_by_the_next() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.start();
    daemon.disk.close_gate();
    vmm.guest.offer(0, 1, 9, &[9; SECTOR]);
    eventually("the request is in flight", || daemon.disk.waiting() == 1);
    let Vmm { front_end, mut guest } = vmm;
    drop(front_end);
    // The next one waits in the backlog, its first message with it.
    std::thread::scope(|scope| {
        let (sender, answered) = mpsc::channel();
        let socket = daemon.socket();
        scope.spawn(move || {
            let front_end = Frontend::from_stream(connect(&socket), 1);
            sender.send(front_end.get_features().unwrap())
        });
        answered.recv_timeout(NOT_YET).unwrap_err();
        daemon.disk.open_gate();
        assert_ne!(answered.recv_timeout(PATIENCE), Ok(0));
    });
    assert_eq!(guest.reap(0), Some(0));
    assert_eq!(daemon.disk.data.lock().unwrap()[9 * SECTOR], 9);
}

#[test]
fn stopping_the_export_finishes_requests_in_flight_and_flushes() {
    let mut daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.start();
    daemon.disk.close_gate();
    vmm.guest.offer(0, 1, 9, &[9; SECTOR]);
    eventually("the request is in flight", || daemon.disk.waiting() == 1);
    let stopped = daemon.begin_stop();
    assert!(stopped.recv_timeout(NOT_YET).is_err());
    daemon.disk.open_gate();
    // The flush waits at no gate: it is open.
    stopped.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(vmm.guest.reap(0), Some(0));
    assert_eq!(daemon.disk.flushes.load(std::sync::atomic::Ordering::SeqCst), 1);
    assert!(!daemon.socket().exists());
    // Nobody has the node any more.
    assert_eq!(Arc::strong_count(&daemon.disk), 1);
    vmm.front_end.get_features().unwrap_err();
}

#[test]
fn a_queue_that_is_full_when_it_starts_is_served_on() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.guest.offer_flushes(0, QUEUE_SIZE.into());
    // A kick that went to another back end.
    vmm.guest.queues[0].kick.read().unwrap();
    vmm.start();
    for _ in 0..QUEUE_SIZE {
        assert_eq!(vmm.guest.wait(0), 0);
    }
    vmm.guest.offer_flushes(0, 1);
    assert_eq!(vmm.guest.wait(0), 0);
}

#[test]
fn the_next_daemon_finishes_requests_in_flight() {
    let first = Daemon::new();
    first.disk.close_gate();
    let mut vmm = Vmm::new(&first, 1);
    let (inflight, file) = vmm.front_end.get_inflight_fd(&inflight_of(1)).unwrap();
    vmm.front_end.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    vmm.start();
    vmm.guest.offer(0, 1, 5, &[0x5a; SECTOR]);
    eventually("the request is in flight", || first.disk.waiting() == 1);
    // As if the process had died: its clients get no more answers.
    let Vmm { guest, front_end: _first } = vmm;
    let second = Daemon::new();
    let mut vmm = Vmm::with_guest(&second, guest);
    vmm.front_end.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    vmm.start();
    assert_eq!(vmm.guest.wait(0), 0);
    assert_eq!(second.disk.data.lock().unwrap()[5 * SECTOR..6 * SECTOR], [0x5a; SECTOR]);
    assert_eq!(vmm.guest.read(0, 5, SECTOR), [0x5a; SECTOR], "and it goes on");
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 2);
    first.disk.open_gate();
}

/// As it connects again, Cloud Hypervisor has a queue begin where its guest is.
#[test]
fn the_next_daemon_carries_out_requests_made_without_a_daemon() {
    let mut first = Daemon::new();
    let mut vmm = Vmm::new(&first, 1);
    let (inflight, file) = vmm.front_end.get_inflight_fd(&inflight_of(1)).unwrap();
    let start = |vmm: &mut Vmm| {
        vmm.front_end.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
        vmm.front_end.set_mem_table(&[vmm.guest.region()]).unwrap();
        let available = vmm.guest.queues[0].driver.available();
        vmm.start_queue(0, available);
    };
    start(&mut vmm);
    assert_eq!(vmm.guest.write(0, 5, &[1; SECTOR]), 0);
    first.stop().unwrap();
    // Nothing is in flight.
    vmm.guest.offer_flushes(0, 3);
    let second = Daemon::new();
    second.disk.close_gate();
    let mut vmm = Vmm::with_guest(&second, vmm.guest);
    start(&mut vmm);
    eventually("all are in flight", || second.disk.waiting() == 3);
    // As if the process had died: its clients get no more answers.
    let Vmm { mut guest, front_end: _second } = vmm;
    guest.offer_flushes(0, 2);
    let third = Daemon::new();
    let mut vmm = Vmm::with_guest(&third, guest);
    start(&mut vmm);
    for _ in 0..5 {
        assert_eq!(vmm.guest.wait(0), 0);
    }
    assert_eq!(vmm.guest.write(0, 5, &[1; SECTOR]), 0, "and it goes on");
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 7);
    second.disk.open_gate();
}

#[test]
fn memory_for_requests_in_flight_is_looked_at() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    // More queues than there are.
    assert!(vmm.front_end.get_inflight_fd(&inflight_of(2)).is_err());
    let mut vmm = Vmm::new(&daemon, 1);
    let (inflight, file) = vmm.front_end.get_inflight_fd(&inflight_of(1)).unwrap();
    assert_eq!(file.metadata().unwrap().len(), inflight.mmap_size);
    file.set_len(0).expect_err("sealed");
    let mut refused = |inflight, file: &std::fs::File| {
        vmm.front_end.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap_err();
    };
    refused(VhostUserInflight { num_queues: 2, ..inflight }, &file);
    refused(VhostUserInflight { mmap_offset: 4096, ..inflight }, &file);
    refused(VhostUserInflight { queue_size: 6, ..inflight }, &file);
    refused(VhostUserInflight { queue_size: 2048, mmap_size: 1 << 20, ..inflight }, &file);
    let could_shrink = tempfile();
    could_shrink.set_len(inflight.mmap_size).unwrap();
    refused(inflight, &could_shrink);
    vmm.front_end.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    vmm.start();
    vmm.front_end.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap_err();
    assert_eq!(vmm.guest.write(0, 1, &[1; SECTOR]), 0);
}

/// The writeback toggle, as the front end sees it.
fn writeback(vmm: &mut Vmm) -> u8 {
    let buf = [0];
    vmm.front_end.get_config(32, 1, VhostUserConfigFlags::WRITABLE, &buf).unwrap().1[0]
}

/// A front end that reconnects to another daemon hands over its memory, and says nothing of the mode.
#[test]
fn the_write_cache_mode_is_kept_with_the_in_flight_record() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    let (inflight, file) = vmm.front_end.get_inflight_fd(&inflight_of(1)).unwrap();
    vmm.front_end.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    vmm.start();
    let flags = VhostUserConfigFlags::empty();
    vmm.front_end.set_config(32, flags, &[0]).unwrap();
    let reconnected = |inflight: &VhostUserInflight, before: bool| {
        let daemon = Daemon::new();
        let mut vmm = Vmm::new(&daemon, 1);
        // The front end may read the configuration first. The mode is the default until the front
        // end passes the inflight record of its guest.
        let seen = before.then(|| writeback(&mut vmm));
        assert!(seen.is_none_or(|seen| seen == 1));
        vmm.front_end.set_inflight_fd(inflight, file.as_raw_fd()).unwrap();
        (daemon, vmm)
    };
    // Not yet started, started, and stopped: the mode is the same.
    for looks_before in [false, true] {
        let (_daemon, mut vmm) = reconnected(&inflight, looks_before);
        assert_eq!(writeback(&mut vmm), 0);
        vmm.start();
        assert_eq!(writeback(&mut vmm), 0);
        vmm.front_end.get_vring_base(0).unwrap();
        assert_eq!(writeback(&mut vmm), 0);
    }
    // What another back end has made ends with the rings.
    let short = VhostUserInflight { mmap_size: inflight.mmap_size - 1, ..inflight };
    let (_daemon, mut vmm) = reconnected(&short, false);
    assert_eq!(writeback(&mut vmm), 1);
    vmm.start();
    assert_eq!(vmm.guest.write(0, 1, &[1; SECTOR]), 0);
    // On again, once that is acknowledged.
    let (_daemon, mut vmm) = reconnected(&inflight, false);
    vmm.front_end.set_config(32, flags, &[1]).unwrap();
    assert_eq!(writeback(&mut vmm), 1);
    let (_daemon, mut vmm) = reconnected(&inflight, false);
    assert_eq!(writeback(&mut vmm), 1);
}

fn tempfile() -> std::fs::File {
    let name = c"not sealed";
    nix::sys::memfd::memfd_create(name, nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap().into()
}

#[test]
fn shrinking_its_memory_costs_a_front_end_only_its_own_queues() {
    let daemon = Daemon::with(Options { num_queues: 2, ..Options::default() });
    let neighbour = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 2);
    let mut other = Vmm::new(&neighbour, 1);
    vmm.start();
    other.start();
    let errs: Vec<_> = (0..2).map(|_| EventFd::new(EFD_NONBLOCK).unwrap()).collect();
    for (index, err) in errs.iter().enumerate() {
        vmm.front_end.set_vring_err(index, err).unwrap();
        assert_eq!(vmm.guest.write(index, 1, &[1; SECTOR]), 0);
    }
    nix::unistd::ftruncate(&vmm.guest.files[0], 0).unwrap();
    for (queue, err) in vmm.guest.queues.iter().zip(&errs) {
        queue.kick.write(1).unwrap();
        assert!(is_signalled(err, PATIENCE), "the queue has not noticed");
    }
    assert_eq!(other.guest.write(0, 2, &[2; SECTOR]), 0);
    assert_eq!(other.guest.read(0, 2, SECTOR), [2; SECTOR]);
    drop(vmm);
    eventually("the front end is gone", || !daemon.export().is_connected());
    let mut next = Vmm::new(&daemon, 1);
    next.start();
    assert_eq!(next.guest.read(0, 1, SECTOR), [1; SECTOR]);
}
