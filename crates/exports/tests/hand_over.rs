//! Rings continue where they were stopped, also if another process stopped them. Tests also which front ends
//! are not handed over.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

use crate::common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use common::vmm::{Vmm, inflight_of};
use common::{Daemon, SECTOR, run_on};
use exports::vhost_user::handover::SavedServer;
use exports::vhost_user::session::VHOST_F_LOG_ALL;
use exports::vhost_user::{Listen, TakenOver, VhostUserConfig, VhostUserExport};
use guest_memory::LOG_PAGE;
use nix::sys::memfd::{MFdFlags, memfd_create};
use stats::Kind;
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserDirtyLogRegion};

/// Begins with a restored guest: its old requests are abandoned, and its inflight record is new.
fn begin_behind_flushes(vmm: &mut Vmm) {
    let features = vmm.front_end.get_features().unwrap() & !VHOST_F_LOG_ALL;
    vmm.front_end.set_features(features).unwrap();
    let (inflight, file) = vmm.front_end.get_inflight_fd(&inflight_of(1)).unwrap();
    vmm.front_end.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    vmm.guest.offer_flushes(0, 2);
    vmm.front_end.set_mem_table(&[vmm.guest.region()]).unwrap();
    vmm.start_queue(0, 2);
    assert_eq!(vmm.guest.write(0, 5, &[1; SECTOR]), 0);
}

fn done_by(export: &VhostUserExport) -> [u64; 2] {
    [Kind::Flush, Kind::Write].map(|kind| export.queue_stats()[0].done(kind))
}

#[test]
fn a_queue_continues_at_the_base_reported_to_the_front_end() {
    let daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    begin_behind_flushes(&mut vmm);
    let base = vmm.front_end.get_vring_base(0).unwrap() as u16;
    assert_eq!(base, 3);
    vmm.start_queue(0, base);
    assert_eq!(vmm.guest.write(0, 5, &[2; SECTOR]), 0);
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 4);
    assert_eq!(done_by(daemon.export()), [0, 2], "nothing twice");
}

/// As to another process, with the front end that is connected.
fn hand_over(daemon: &mut Daemon) -> VhostUserExport {
    let config = daemon.config(Listen::Path(daemon.socket()), 1);
    let (disk, export) = (daemon.disk.clone(), daemon.take());
    run_on(&daemon.control, move |event_loop| async move {
        let SavedServer { listener, file, session } = export.hand_over().describe().await.unwrap();
        let listen = Listen::TakenOver(Arc::new(listener), file);
        let config = VhostUserConfig { listen, taken_over: Some(TakenOver { session }), ..config };
        let next = VhostUserExport::blk(event_loop, config, disk, "serial".into()).await.unwrap();
        next.begin(export.hand_over().stop(true).await.unwrap()).await;
        next
    })
}

#[test]
fn a_queue_continues_where_the_previous_process_stopped_it() {
    let mut daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    begin_behind_flushes(&mut vmm);
    let next = hand_over(&mut daemon);
    assert_eq!(vmm.guest.write(0, 5, &[2; SECTOR]), 0);
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 4);
    assert_eq!(done_by(&next), [0, 1], "nothing twice");
    run_on(&daemon.control, move |_| next.stop()).unwrap();
}

/// The front end has said where the ring of a driver that was reset begins; the next process starts it.
#[test]
fn a_ring_that_is_set_up_after_a_reset_begins_where_the_front_end_says() {
    let mut daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    let features = vmm.front_end.get_features().unwrap() & !VHOST_F_LOG_ALL;
    vmm.front_end.set_features(features).unwrap();
    vmm.start();
    assert_eq!(vmm.guest.write(0, 5, &[1; SECTOR]), 0);
    vmm.front_end.reset_device().unwrap();
    vmm.front_end.set_vring_base(0, 0).unwrap();
    let next = hand_over(&mut daemon);
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 0);
    run_on(&daemon.control, move |_| next.stop()).unwrap();
}

/// Its memory was taken away by mistake, and comes back when another process serves it; there is no record.
#[test]
fn a_queue_without_memory_continues_where_the_previous_process_stopped_it() {
    let mut daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    let features = vmm.front_end.get_features().unwrap() & !VHOST_F_LOG_ALL;
    vmm.front_end.set_features(features).unwrap();
    vmm.start();
    assert_eq!(vmm.guest.write(0, 5, &[1; SECTOR]), 0);
    let region = vmm.guest.region();
    let mut elsewhere = region;
    elsewhere.guest_phys_addr += 1 << 40;
    elsewhere.userspace_addr += 1 << 40;
    vmm.front_end.set_mem_table(&[elsewhere]).unwrap_err();
    let next = hand_over(&mut daemon);
    vmm.front_end.set_mem_table(&[region]).unwrap();
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 1);
    vmm.front_end.set_vring_kick(0, &vmm.guest.queues[0].kick).unwrap();
    assert_eq!(vmm.guest.write(0, 5, &[2; SECTOR]), 0);
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 2);
    assert_eq!(done_by(&next), [0, 1], "nothing twice");
    run_on(&daemon.control, move |_| next.stop()).unwrap();
}

/// Returns whether the export can be handed over, or why not, and resumes it.
fn describe(daemon: &Daemon, export: VhostUserExport) -> (VhostUserExport, Result<(), String>) {
    run_on(&daemon.control, move |_| async move {
        let described = export.hand_over().describe().await.map(drop);
        export.hand_over().resume();
        (export, described)
    })
}

/// Refused while writes are logged, or were: another process would not have the log.
#[test]
fn a_front_end_with_a_log_of_a_migration_is_not_handed_over() {
    let mut daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    vmm.start();
    let features = vmm.front_end.get_features().unwrap() & !VHOST_F_LOG_ALL;
    let log = memfd_create(c"log", MFdFlags::MFD_CLOEXEC).unwrap();
    let mmap_size = common::MEMORY / LOG_PAGE / 8;
    nix::unistd::ftruncate(&log, mmap_size as i64).unwrap();
    let mmap_handle = log.as_raw_fd();
    let region = VhostUserDirtyLogRegion { mmap_size, mmap_offset: 0, mmap_handle };
    let mut export = daemon.take();
    // It may be switched on before there is memory for it, or afterwards.
    for (on, log, is_refused) in [
        (true, None, false),
        (false, None, false),
        (false, Some(region), true),
        (true, None, true),
        (false, None, true),
    ] {
        let log_all = if on { VHOST_F_LOG_ALL } else { 0 };
        vmm.front_end.set_features(features | log_all).unwrap();
        if log.is_some() {
            vmm.front_end.set_log_base(0, log).unwrap();
        }
        let described;
        (export, described) = describe(&daemon, export);
        let why = is_refused.then_some("its guest is being migrated, or was");
        assert_eq!(described.err().as_deref(), why);
        assert_eq!(vmm.guest.write(0, 5, &[1; SECTOR]), 0);
    }
    assert_eq!(vmm.front_end.get_vring_base(0).unwrap(), 5);
    run_on(&daemon.control, move |_| export.stop()).unwrap();
}

/// VHOST_F_LOG_ALL alone is no veto against an upgrade. The next process logs once it has the memory.
#[test]
fn logging_without_memory_for_the_log_is_handed_over() {
    let mut daemon = Daemon::new();
    let mut vmm = Vmm::new(&daemon, 1);
    let features = vmm.front_end.get_features().unwrap() | VHOST_F_LOG_ALL;
    vmm.front_end.set_features(features).unwrap();
    vmm.start();
    assert_eq!(vmm.guest.write(0, 5, &[1; SECTOR]), 0);
    let next = hand_over(&mut daemon);
    let log = memfd_create(c"log", MFdFlags::MFD_CLOEXEC).unwrap();
    let mmap_size = common::MEMORY / LOG_PAGE / 8;
    nix::unistd::ftruncate(&log, mmap_size as i64).unwrap();
    let mmap_handle = log.as_raw_fd();
    let region = VhostUserDirtyLogRegion { mmap_size, mmap_offset: 0, mmap_handle };
    vmm.front_end.set_log_base(0, Some(region)).unwrap();
    assert_eq!(vmm.guest.read(0, 5, SECTOR), [1; SECTOR]);
    let mut bits = vec![0; mmap_size as usize];
    File::from(log).read_exact_at(&mut bits, 0).unwrap();
    assert!(bits.iter().any(|&byte| byte != 0), "the read is logged");
    run_on(&daemon.control, move |_| next.stop()).unwrap();
}
