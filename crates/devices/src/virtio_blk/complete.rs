//! The way back of a request: its status.

use block::request::RequestOwner;
use event_loop::IoBufs;
use nix::errno::Errno;
use trace::trace;

use super::probes;
use super::requests::Requests;
use super::slots::BlkSlot;
use super::wire::{SECTOR, Status};
use crate::virtio::VirtQueueWorker;
use stats::Kind;

impl RequestOwner for VirtQueueWorker<Requests> {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let status = match result {
            Ok(()) => Status::Ok,
            Err(Errno::EOPNOTSUPP) => Status::Unsupp,
            Err(errno) => self.failed(tag, errno),
        };
        self.answered(tag, status, bufs);
    }

    #[cold]
    fn given_up(&self, tag: u32, bufs: IoBufs) {
        self.service.slots.borrow_mut().give_up(tag);
        self.answered(tag, Status::IoErr, bufs);
    }
}

impl VirtQueueWorker<Requests> {
    /// Counts an answer of the node. The last one answers the request.
    #[inline(always)]
    fn answered(&self, tag: u32, status: Status, bufs: IoBufs) {
        let done = {
            let mut slots = self.service.slots.borrow_mut();
            let done = slots.answer(tag, status);
            if let Some(slot) = &done
                && slot.kind == Kind::Read
            {
                slot.memory.mark_bufs(&bufs, u64::from(slot.sectors) * SECTOR);
            }
            slots.keep_bufs(bufs);
            done
        };
        if let Some(slot) = done {
            let Requests { batch, stats, .. } = &self.service;
            let now_ns = self.event_loop.now_ns();
            match slot.status {
                Status::Ok => {
                    let bytes = u64::from(slot.sectors) * SECTOR;
                    batch.done(stats, slot.kind, bytes, slot.started_ns, now_ns);
                }
                _ if slot.given_up && self.leave(slot.head) => {
                    return batch.left(stats);
                }
                _ => batch.failed(stats, slot.kind, slot.started_ns, now_ns),
            }
            self.give_back(&slot);
        }
    }

    /// A part of a request has failed.
    #[cold]
    fn failed(&self, tag: u32, errno: Errno) -> Status {
        let mut slots = self.service.slots.borrow_mut();
        if self.is_not_begun(errno) {
            slots.give_up(tag);
        } else if let Some(slot) = slots.get(tag) {
            self.service.stats.node_failed(0, slot.kind, slot.offset, errno);
        }
        Status::IoErr
    }

    /// Gives a request back to the driver; it sees it at the end of the section.
    #[inline(always)]
    fn give_back(&self, slot: &BlkSlot) {
        let Requests { device, .. } = &self.service;
        trace!(probes::virtio_blk_req_complete(
            device.trace_name(),
            self.queue.config().index,
            slot.head,
            slot.status as u8,
        ));
        match slot.memory.write_u8(slot.status_addr, slot.status as u8) {
            Ok(()) => self.add_used(slot.head, slot.written),
            Err(error) => {
                self.add_used(slot.head, 0);
                self.break_queue(&format_args!("a request's status byte: {error}"));
            }
        }
    }

    /// The same, with a request that was answered at once.
    #[cold]
    pub(super) fn give_back_at_once(&self, slot: &BlkSlot) {
        self.give_back(slot);
    }
}
