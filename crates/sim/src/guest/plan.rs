//! The behaviour of a guest.

use super::life::Disturbance;
use super::{blk, scsi};
use crate::image::Format;
use crate::random::Random;

/// The device that the disk is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    Blk,
    Scsi,
}

impl Device {
    /// Bytes that the device writes to a request besides data.
    pub(super) fn answer(self) -> u32 {
        match self {
            Device::Blk => blk::ANSWER,
            Device::Scsi => scsi::ANSWER,
        }
    }

    /// The index of the first request queue.
    pub(super) fn first_queue(self) -> u16 {
        match self {
            Device::Blk => 0,
            Device::Scsi => scsi::FIRST_QUEUE,
        }
    }
}

/// The behaviour of a guest.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) device: Device,
    /// Number of request queues.
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    /// Maximum requests of a queue in flight.
    pub(crate) depth: u16,
    /// Maximum requests offered at once.
    pub(crate) batch: u16,
    pub(crate) event_idx: bool,
    /// One request in `indirect` has an indirect table; 0 for none.
    pub(crate) indirect: u64,
    /// One kick in `spurious_kick` is without a request.
    pub(crate) spurious_kick: u64,
    /// Maximum pause between batches, nanoseconds.
    pub(crate) think_ns: u64,
    /// The initial indices of the rings.
    pub(crate) first_index: u16,
    pub(crate) format: Format,
    /// Sectors of the disk.
    pub(crate) sectors: u32,
    /// The disk supports discard and write-zeroes.
    pub(crate) ranges: bool,
    /// The VMM negotiates a record of requests in flight.
    pub(crate) inflight: bool,
    /// After a reconnect the VMM starts queues at the available index and relies on the record, as Cloud
    /// Hypervisor does. Otherwise it starts them at the used index, as QEMU does.
    pub(crate) begins_at_available: bool,
    /// Disturbances, and the maximum time between them.
    pub(crate) disturbances: Vec<Disturbance>,
    pub(crate) calm_ns: u64,
}

impl Plan {
    /// Attaches the disk as a logical unit of virtio-scsi.
    pub(crate) fn attach_scsi(&mut self) {
        self.device = Device::Scsi;
        // virtio-scsi has the write cache bit in a mode page, which the driver does not change.
        self.disturbances.retain(|disturbance| *disturbance != Disturbance::WriteCache);
    }

    /// Adds task management; virtio-scsi only.
    pub(crate) fn manage_tasks(&mut self) {
        self.disturbances.extend([Disturbance::Tasks; 3]);
    }

    /// Adds the replacement of kick eventfds.
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
        }
    }
}
