//! The way back of a request: its status.

use block::request::Completion;
use event_loop::{IoBufs, trace};
use nix::errno::Errno;

use super::requests::Requests;
use super::slots::Slot;
use super::wire::Status;
use crate::virtio::Runner;

impl Completion for Runner<Requests> {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let status = match result {
            Ok(()) => Status::Ok,
            Err(Errno::EOPNOTSUPP) => Status::Unsupp,
            Err(_) => Status::IoErr,
        };
        let done = {
            let mut slots = self.service.slots.borrow_mut();
            slots.keep_bufs(bufs);
            slots.answer(tag, status)
        };
        if let Some(slot) = done {
            self.answer(slot);
        }
    }
}

impl Runner<Requests> {
    /// Gives a request back to the driver; it sees it at the end of the section.
    pub(super) fn answer(&self, slot: Slot) {
        let Requests { device, batch, .. } = &self.service;
        trace!(virtio_blk_req_complete(
            device.trace_name(),
            self.queue.config().index,
            slot.head,
            slot.status as u8,
        ));
        let ok = slot.status == Status::Ok;
        let latency = self.event_loop.now_ns().saturating_sub(slot.started_ns);
        batch.add(slot.kind, ok, slot.bytes, latency);
        match slot.memory.write_u8(slot.status_addr, slot.status as u8) {
            Ok(()) => self.add_used(slot.head, slot.written),
            Err(error) => {
                self.add_used(slot.head, 0);
                self.break_queue(&format_args!("a request's status byte: {error}"));
            }
        }
    }
}
