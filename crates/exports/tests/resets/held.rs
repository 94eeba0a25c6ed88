//! A request that is held at a reset of the device is in the in-flight record, but must not be repeated.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use block::job::OnError;
use block::policy::{ErrorPolicy, with_policy};
use exports::vhost_user::Listen;
use exports::vhost_user::wire::Request;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use super::common::vmm::{QUEUE_SIZE, Vmm, inflight_of};
use super::common::{Daemon, Dir, Guest, SECTOR, eventually, message, send_with};

/// For RESET_DEVICE and SET_STATUS: the new driver's descriptors differ from those of the held
/// request.
#[test]
fn held_requests_are_not_repeated_after_a_reset() {
    for reset in [Request::ResetDevice, Request::SetStatus] {
        let daemon = Daemon::new();
        let (policy, _told) = ErrorPolicy::new(OnError::Report, OnError::Stop);
        let node = with_policy(daemon.disk.clone(), policy.clone());
        let dir = Dir::new();
        let export = daemon.start_with(daemon.config(Listen::Path(dir.socket()), 1), node);
        let stream = super::common::connect(&dir.socket());
        let beside = stream.try_clone().unwrap();
        let mut vmm = Vmm::on(stream, Guest::new(1, QUEUE_SIZE));
        let (inflight, record) = vmm.front_end.get_inflight_fd(&inflight_of(1)).unwrap();
        vmm.front_end.set_inflight_fd(&inflight, record.as_raw_fd()).unwrap();
        vmm.start();
        daemon.disk.is_full.store(true, Ordering::SeqCst);
        vmm.guest.offer(0, 1, 5, &[5; SECTOR]);
        eventually("the write is held", || policy.is_stopped());

        let status = 0u64.to_ne_bytes();
        let payload = if reset == Request::SetStatus { status.as_slice() } else { &[] };
        send_with(&beside, &message(reset, 0, payload), &[]);
        let features = vmm.front_end.get_features().unwrap();
        daemon.disk.is_full.store(false, Ordering::SeqCst);
        policy.resume(0);
        vmm.guest = Guest::new(1, QUEUE_SIZE);
        vmm.front_end.set_features(features).unwrap();
        vmm.start();
        assert_eq!(vmm.guest.write(0, 6, &[6; SECTOR]), 0);
        assert_eq!(vmm.guest.queues[0].driver.device_used(), 1, "{reset:?}");
        let disk = daemon.disk.data.lock().unwrap();
        assert_eq!(disk[5 * SECTOR..7 * SECTOR], [[0; SECTOR], [6; SECTOR]].concat());
        drop(export);
    }
}
