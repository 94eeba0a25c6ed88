//! An independent front end, the one of the `vhost` crate, and its guest.

use std::os::unix::net::UnixStream;

use exports::vhost_user::session::{VHOST_USER_F_PROTOCOL_FEATURES, protocol_features};
use vhost::VhostBackend;
use vhost::vhost_user::message::{
    VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};

use super::{Daemon, Guest, connect, vring_config};

pub(crate) const QUEUE_SIZE: u16 = 16;

/// A front end and its guest.
pub(crate) struct Vmm {
    pub(crate) front_end: Frontend,
    pub(crate) guest: Guest,
}

impl Vmm {
    /// Connects and negotiates, in QEMU's order.
    pub(crate) fn new(daemon: &Daemon, num_queues: u16) -> Self {
        Self::with_guest(daemon, Guest::new(num_queues, QUEUE_SIZE))
    }

    /// Connects a front end for an existing guest.
    pub(crate) fn with_guest(daemon: &Daemon, guest: Guest) -> Self {
        Self::on(connect(&daemon.socket()), guest)
    }

    /// Makes the same on an existing connection.
    pub(crate) fn on(stream: UnixStream, guest: Guest) -> Self {
        let num_queues = guest.queues.len();
        let mut front_end = Frontend::from_stream(stream, num_queues as u64);
        let features = front_end.get_features().unwrap();
        assert_ne!(features & VHOST_USER_F_PROTOCOL_FEATURES, 0);
        let offered = front_end.get_protocol_features().unwrap();
        assert_eq!(offered.bits(), protocol_features::OFFERED);
        let wanted = offered & VhostUserProtocolFeatures::all();
        front_end.set_protocol_features(wanted).unwrap();
        front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        assert!(front_end.get_queue_num().unwrap() >= num_queues as u64);
        front_end.set_owner().unwrap();
        front_end.set_features(features).unwrap();
        Vmm { front_end, guest }
    }

    pub(crate) fn start(&mut self) {
        let regions = [self.guest.region()];
        self.front_end.set_mem_table(&regions).unwrap();
        for queue in 0..self.guest.queues.len() {
            self.start_queue(queue, 0);
        }
    }

    pub(crate) fn start_queue(&mut self, index: usize, base: u16) {
        let queue = &self.guest.queues[index];
        let config = queue.driver.config();
        self.front_end.set_vring_num(index, config.size).unwrap();
        self.front_end.set_vring_base(index, base).unwrap();
        self.front_end.set_vring_addr(index, &vring_config(config)).unwrap();
        self.front_end.set_vring_kick(index, &queue.kick).unwrap();
        self.front_end.set_vring_call(index, &queue.call).unwrap();
        self.front_end.set_vring_enable(index, true).unwrap();
    }
}

pub(crate) fn inflight_of(num_queues: u16) -> VhostUserInflight {
    VhostUserInflight { mmap_size: 0, mmap_offset: 0, num_queues, queue_size: QUEUE_SIZE }
}
