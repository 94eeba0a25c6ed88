//! The way back: status, used ring, and once per batch the published index and the signal.

use std::cell::Cell;
use std::rc::Rc;

use block::request::Completion;
use event_loop::{DeferredCall, IoBufs, trace};
use nix::errno::Errno;

use super::handler::QueueHandler;
use super::slots::Slot;
use super::wire::Status;

impl Completion for QueueHandler {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let status = match result {
            Ok(()) => Status::Ok,
            Err(Errno::EOPNOTSUPP) => Status::Unsupp,
            Err(_) => Status::IoErr,
        };
        let done = {
            let mut slots = self.slots.borrow_mut();
            slots.keep_bufs(bufs);
            slots.answer(tag, status)
        };
        if let Some(slot) = done {
            self.answer(slot);
        }
    }
}

impl QueueHandler {
    /// Gives a request back to the driver; it sees it at the end of the section.
    pub(crate) fn answer(&self, slot: Slot) {
        trace!(virtio_blk_req_complete(
            self.trace_dev(),
            self.trace_queue(),
            slot.head,
            slot.status as u8,
        ));
        let ok = slot.status == Status::Ok;
        let latency = self.event_loop.now_ns().saturating_sub(slot.started_ns);
        self.batch.add(slot.kind, ok, slot.bytes, latency);
        match slot.memory.write_u8(slot.status_addr, slot.status as u8) {
            Ok(()) => self.queue.add_used(slot.head, slot.written),
            Err(error) => {
                self.queue.add_used(slot.head, 0);
                self.break_queue(&format_args!("a request's status byte: {error}"));
            }
        }
        if self.batch.is_long() {
            self.queue.show();
        }
        self.finish_later();
    }

    /// Has what ends a batch done once, at the end of the section (contract E10): the first who asks
    /// defers it, the others find it done.
    pub(crate) fn finish_later(&self) {
        if !self.queued.get()
            && let Some(me) = self.me.upgrade()
        {
            self.event_loop.defer(&(me as Rc<dyn DeferredCall>));
        }
    }
}

impl DeferredCall for QueueHandler {
    fn run(&self) {
        if !self.batch.is_empty() {
            let wanted = self.queue.publish();
            if wanted {
                self.signal();
            }
            self.batch.publish(&self.stats, wanted);
        }
        self.enable_kicks();
        self.finish_stop();
    }

    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}
