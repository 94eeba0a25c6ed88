//! A request queue: from a chain to a request under way.

use std::cell::{RefCell, RefMut};
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::node::Channel;
use block::request::{Op, Request, RequestOwner};
use event_loop::{EventLoop, Signal};
use queue::{Chain, Queue};
use trace::trace;

use super::device::Device;
use super::parse::{BlkRequest, Parsed, Ranges, parse};
use super::probes;
use super::slots::{BlkSlot, SlotTable};
use super::wire::{
    ID_SIZE, SECTOR, Status, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use crate::virtio::{Broken, RANGE_BYTES, VirtQueueWorker, VirtioBackend, Virtqueue};
use stats::{Batch, InFlight, Kind, QueueStats};

/// What a request queue does.
pub(crate) struct Requests {
    pub(super) device: Arc<Device>,
    channel: Rc<dyn Channel>,
    pub(super) slots: RefCell<SlotTable>,
    pub(super) batch: Batch,
    pub(super) stats: Arc<QueueStats>,
}

/// Starts a queue of a device on this loop, disabled.
///
/// The queue takes nothing before it is [enabled](Virtqueue::set_enabled).
///
/// `kick` fires when the driver has put requests in; without one the queue is looked at only while
/// the loop polls, or turns for other reasons.
pub fn start_queue(
    event_loop: &EventLoop,
    device: Arc<Device>,
    channel: Rc<dyn Channel>,
    queue: Queue,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Signal>,
    stats: Arc<QueueStats>,
) -> Rc<dyn Virtqueue> {
    let slots = RefCell::new(SlotTable::new(queue.size()));
    let service = Requests { device, channel, slots, batch: Batch::default(), stats };
    VirtQueueWorker::start(event_loop, queue, kick, call, service)
}

impl VirtioBackend for Requests {
    const NAME: &'static str = "virtio-blk queue";

    fn trace_name(&self) -> &CStr {
        self.device.trace_name()
    }

    fn drain_begin(&self) {
        self.channel.drain_begin();
    }

    fn drain_end(&self) {
        self.channel.drain_end();
    }

    fn process(
        worker: &Rc<VirtQueueWorker<Self>>,
        chain: RefMut<'_, Chain>,
    ) -> Result<u32, Broken> {
        let Requests { device, channel, slots, batch, stats } = &worker.service;
        let memory = worker.queue.memory();
        let Parsed { status_addr, request } = parse(&chain, &memory, device)?;
        let mut slot = BlkSlot {
            head: chain.head(),
            written: chain.writable_len(),
            status_addr,
            memory,
            pending: 1,
            status: Status::Ok,
            given_up: false,
            kind: Kind::Other,
            offset: 0,
            sectors: 0,
            started_ns: worker.event_loop.now_ns(),
        };
        let head = slot.head;
        let other = |kind: Option<u32>| {
            let kind = kind.map_or(-1, i64::from);
            trace!(probes::virtio_blk_handle_other(
                device.trace_name(),
                worker.queue.config().index,
                head,
                kind
            ));
        };
        let fua = device.is_write_through();
        let (op, offset, data) = match request {
            Err((kind, status)) => {
                other(None);
                slot.status = status;
                drop(chain);
                batch.invalid(stats, kind);
                worker.give_back_at_once(&slot);
                return Ok(0);
            }
            Ok(BlkRequest::GetId { data }) => {
                other(Some(VIRTIO_BLK_T_GET_ID));
                let len = data.len().min(ID_SIZE as u32);
                let written = data.write(&slot.memory, device.id()).map_err(Broken::Buffer)?;
                debug_assert_eq!(written, len as usize);
                drop(chain);
                batch.done(stats, Kind::Other, 0, slot.started_ns, slot.started_ns);
                worker.give_back_at_once(&slot);
                return Ok(0);
            }
            Ok(BlkRequest::Ranges { discard, data }) => {
                let kind = if discard { VIRTIO_BLK_T_DISCARD } else { VIRTIO_BLK_T_WRITE_ZEROES };
                other(Some(kind));
                let ranges = Ranges::read(discard, data, &slot.memory, device)?;
                drop(chain);
                match ranges {
                    Ok(ranges) => {
                        worker.submit_ranges(slot, &ranges, fua);
                        return Ok(ranges.iter().count() as u32 * RANGE_BYTES);
                    }
                    Err(status) => {
                        slot.status = status;
                        batch.invalid(stats, Ranges::kind(discard));
                        worker.give_back_at_once(&slot);
                        return Ok(0);
                    }
                }
            }
            Ok(BlkRequest::Flush) => {
                other(Some(VIRTIO_BLK_T_FLUSH));
                (Op::Flush, 0, None)
            }
            Ok(BlkRequest::Read { offset, data }) => {
                trace!(probes::virtio_blk_handle_read(
                    device.trace_name(),
                    worker.queue.config().index,
                    head,
                    offset / SECTOR,
                    u64::from(data.len()) / SECTOR,
                ));
                (Op::Read, offset, Some(data))
            }
            Ok(BlkRequest::Write { offset, data }) => {
                trace!(probes::virtio_blk_handle_write(
                    device.trace_name(),
                    worker.queue.config().index,
                    head,
                    offset / SECTOR,
                    u64::from(data.len()) / SECTOR,
                ));
                (Op::Write { fua }, offset, Some(data))
            }
        };
        let mut slots = slots.borrow_mut();
        let mut bufs = slots.take_bufs();
        if let Some(data) = data {
            if let Err(error) = data.push_iovecs(&slot.memory, &mut bufs) {
                slots.keep_bufs(bufs);
                return Err(Broken::Buffer(error));
            }
            slot.offset = offset;
            slot.sectors = data.len() / SECTOR as u32;
        }
        slot.kind = match op {
            Op::Read => Kind::Read,
            Op::Write { .. } => Kind::Write,
            _ => Kind::Flush,
        };
        let len = u64::from(slot.sectors) * SECTOR;
        let tag = slots.insert(slot);
        drop(slots);
        drop(chain);
        if let Some(tag) = tag {
            let me: Rc<dyn RequestOwner> = worker.clone();
            channel.submit(Request::new(op, offset, len, bufs, &me, tag));
        }
        Ok(0)
    }

    fn took(&self, chains: u16) {
        self.stats.taken.add(chains.into());
    }

    fn in_flight(&self) -> Vec<InFlight> {
        let of = |slot: &BlkSlot| InFlight {
            id: slot.head.into(),
            kind: slot.kind,
            lun: None,
            offset: slot.offset,
            len: u64::from(slot.sectors) * SECTOR,
            started_ns: slot.started_ns,
        };
        self.slots.borrow().iter().map(of).collect()
    }

    fn batch_ended(worker: &VirtQueueWorker<Self>, signalled: Option<bool>) {
        let Requests { batch, stats, .. } = &worker.service;
        if let Some(signalled) = signalled {
            batch.publish(stats, signalled);
        }
    }
}

impl VirtQueueWorker<Requests> {
    /// Sends each range of a discard or write-zeroes request on its way.
    fn submit_ranges(self: &Rc<Self>, mut slot: BlkSlot, ranges: &Ranges, fua: bool) {
        let Requests { channel, slots, .. } = &self.service;
        let me: Rc<dyn RequestOwner> = self.clone();
        slot.kind = Ranges::kind(ranges.discard);
        slot.offset = ranges.iter().next().map_or(0, |range| range.offset);
        slot.sectors = (ranges.iter().map(|range| range.len).sum::<u64>() / SECTOR) as u32;
        slot.pending = ranges.iter().count() as u8;
        let Some(tag) = slots.borrow_mut().insert(slot) else { return };
        for range in ranges.iter() {
            let op = if ranges.discard {
                Op::Discard
            } else {
                Op::WriteZeroes { may_unmap: range.may_unmap, no_fallback: false, fua }
            };
            let bufs = slots.borrow_mut().take_bufs();
            channel.submit(Request::new(op, range.offset, range.len, bufs, &me, tag));
        }
    }
}
