//! The way back of a command: its response.

use block::request::RequestOwner;
use event_loop::IoBufs;
use nix::errno::Errno;

use super::requests::{Requests, response_bytes};
use super::slots::{Progress, ScsiSlot};
use super::wire::{RESPONSE_SIZE, Response};
use crate::virtio::VirtQueueWorker;

impl RequestOwner for VirtQueueWorker<Requests> {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let this = &self.service;
        if let Err(errno) = result
            && let Some(slot) = this.slots.borrow_mut().get_mut(tag)
        {
            match self.is_not_begun(errno) {
                true => slot.given_up = true,
                false => this.stats.node_failed(slot.lun, slot.kind, slot.offset, errno),
            }
        }
        let progress = this.slots.borrow_mut().answer(tag, result, bufs);
        match progress {
            Progress::Waits => {}
            // Not from within: a node that answers at once would be called from its own answer, as
            // many times as there are parts.
            Progress::Repeats(bufs) => {
                this.repeats.borrow_mut().push((tag, bufs));
                self.finish_later();
            }
            Progress::Done(slot) => self.respond(slot),
        }
    }

    #[cold]
    fn given_up(&self, tag: u32, bufs: IoBufs) {
        if let Some(slot) = self.service.slots.borrow_mut().get_mut(tag) {
            slot.given_up = true;
        }
        // Ends the command, if it is not left to the next process.
        self.complete(tag, Err(Errno::ECANCELED), bufs);
    }
}

impl VirtQueueWorker<Requests> {
    /// Gives a command back to the driver; it sees it at the end of the section.
    fn respond(&self, slot: ScsiSlot) {
        let this = &self.service;
        if slot.given_up && slot.ended.is_none() && self.leave(slot.head) {
            this.slots.borrow_mut().keep_response(slot.response);
            return this.batch.left(&this.stats);
        }
        let sense = if slot.ended.is_some() { None } else { slot.sense };
        let ok = slot.ended.is_none() && sense.is_none();
        let used = if ok { slot.used } else { 0 };
        let response = slot.ended.unwrap_or(Response::Ok);
        self.trace_response(slot.head, slot.id, response, sense);
        let bytes = response_bytes(response, sense, slot.buffer - used);
        let (begun, now_ns) = (slot.started_ns, self.event_loop.now_ns());
        match ok {
            true => this.batch.done(&this.stats, slot.kind, slot.bytes, begun, now_ns),
            false => this.batch.failed(&this.stats, slot.kind, begun, now_ns),
        }
        let mut rest = bytes.0.as_slice();
        let mut result = Ok(());
        for place in &slot.response {
            let (now, later) = rest.split_at(rest.len().min(place.len as usize));
            result = result.and(slot.memory.write_bytes(place.addr, now));
            rest = later;
        }
        this.slots.borrow_mut().keep_response(slot.response);
        let written = if slot.is_read { used } else { 0 };
        match result {
            Ok(()) => self.add_used(slot.head, RESPONSE_SIZE as u32 + written),
            Err(error) => {
                self.add_used(slot.head, 0);
                self.break_queue(&format_args!("a request's response: {error}"));
            }
        }
    }
}
