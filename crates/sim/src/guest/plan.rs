//! What a guest is like.

use super::life::Disturbance;
use super::{blk, scsi};
use crate::image::Format;
use crate::random::Random;

/// What its disk is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    Blk,
    Scsi,
}

impl Device {
    /// Bytes that it writes besides data.
    pub(super) fn answer(self) -> u32 {
        match self {
            Device::Blk => blk::ANSWER,
            Device::Scsi => scsi::ANSWER,
        }
    }

    /// The first queue for requests.
    pub(super) fn first_queue(self) -> u16 {
        match self {
            Device::Blk => 0,
            Device::Scsi => scsi::FIRST_QUEUE,
        }
    }
}

/// What a guest is like.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) device: Device,
    /// For requests.
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    /// Requests of a queue at the same time, at most.
    pub(crate) depth: u16,
    /// Requests offered at once, at most.
    pub(crate) batch: u16,
    pub(crate) event_idx: bool,
    /// A request goes by an indirect table once in so many times; 0 for never.
    pub(crate) indirect: u64,
    /// It kicks for nothing once in so many times.
    pub(crate) spurious_kick: u64,
    /// How long it thinks between batches, at most, nanoseconds.
    pub(crate) think_ns: u64,
    /// Where the rings' indices begin.
    pub(crate) first_index: u16,
    pub(crate) format: Format,
    /// Sectors of the disk.
    pub(crate) sectors: u32,
    /// The disk takes discards and write-zeroes.
    pub(crate) ranges: bool,
    /// It asks for a record of what is in flight.
    pub(crate) inflight: bool,
    /// Its VMM has queues begin at the available index when it connects again, as Cloud Hypervisor does,
    /// and believes the record to know better; else at the used index, as QEMU does.
    pub(crate) begins_at_available: bool,
    /// What its VMM does now and then, and how long it leaves it alone in between, at most.
    pub(crate) disturbances: Vec<Disturbance>,
    pub(crate) calm_ns: u64,
    /// How long a request may take, undisturbed, nanoseconds.
    pub(crate) patience_ns: u64,
}

impl Plan {
    /// Has its disk as a logical unit of a virtio-scsi device.
    pub(crate) fn attach_scsi(&mut self) {
        self.device = Device::Scsi;
        // That is in a mode page there.
        self.disturbances.retain(|disturbance| *disturbance != Disturbance::WriteCache);
    }

    /// Has its driver manage tasks, too; of virtio-scsi.
    pub(crate) fn manage_tasks(&mut self) {
        self.disturbances.extend([Disturbance::Tasks; 3]);
    }

    /// Has its VMM replace kick eventfds, too.
    pub(crate) fn replace_kicks(&mut self) {
        self.disturbances.push(Disturbance::Kick);
    }

    pub(crate) fn new(random: &Random) -> Self {
        let queue_size = random.pick(&[4, 16, 64, 128, 256]);
        let depth = random.pick(&[1, 2, 8, 32, 64]).min(queue_size);
        let calm = random.one_in(3);
        let inflight = !random.one_in(4);
        let disturbances = Disturbance::ALL.iter().filter(|_| !calm && random.one_in(2));
        Plan {
            device: Device::Blk,
            queues: random.pick(&[1, 1, 2, 4]),
            queue_size,
            depth,
            batch: random.pick(&[1, 4, 16, 64]),
            event_idx: !random.one_in(3),
            indirect: random.pick(&[0, 1, 1, 2]),
            spurious_kick: random.pick(&[0, 4, 50]),
            think_ns: random.pick(&[0, 5_000, 100_000]),
            first_index: random.pick(&[0, 0xffff - 100, 0x7ff0]),
            format: Format::Raw,
            sectors: random.pick(&[64, 1024, 4096]),
            ranges: !random.one_in(4),
            inflight,
            begins_at_available: inflight && random.one_in(2),
            disturbances: disturbances.copied().collect(),
            calm_ns: random.pick(&[200_000, 1_000_000, 10_000_000]),
            patience_ns: 100_000_000,
        }
    }
}
