//! A queue at work on its I/O thread: from the guest's kick to the block node.

use std::cell::{Cell, RefCell, RefMut};
use std::ffi::CStr;
use std::fmt;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use block::node::Channel;
use block::request::{Completion, Op, Request};
use event_loop::{EventLoop, Handler, HandlerId, Progress, Trigger, trace};
use guest_memory::MemoryView;
use queue::{Chain, Queue, QueueError};

use super::device::Device;
use super::parse::{BlkRequest, Malformed, Parsed, Ranges, parse};
use super::slots::{Slot, SlotTable};
use super::stats::{Batch, Kind, QueueStats};
use super::wire::{
    ID_SIZE, SECTOR, Status, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use crate::virtio::write_eventfd;

/// A started queue of a virtio-blk device. Lives on its I/O thread.
///
/// It takes requests when the guest kicks, or when the loop, polling, sees new ones, and answers
/// them in any order. A guest that breaks the rules of the queue breaks this queue only.
pub struct QueueHandler {
    pub(crate) event_loop: EventLoop,
    device: Arc<Device>,
    channel: Rc<dyn Channel>,
    pub(crate) queue: Queue,
    pub(crate) me: Weak<QueueHandler>,
    pub(crate) slots: RefCell<SlotTable>,
    /// The chain being taken apart, kept for its capacity.
    chain: RefCell<Chain>,
    /// The way out for signals; without one the driver polls.
    call: RefCell<Option<Arc<OwnedFd>>>,
    /// Where a broken queue is reported.
    err: RefCell<Option<Arc<OwnedFd>>>,
    kick: Cell<Option<HandlerId>>,
    enabled: Cell<bool>,
    /// The loop polls: the driver need not kick.
    polled: Cell<bool>,
    /// The driver is to be asked for a kick.
    wants_kick: Cell<bool>,
    /// The answer to `stop`, once nothing is in flight.
    stopping: Cell<Option<StopCall>>,
    stopped: Cell<bool>,
    pub(crate) queued: Cell<bool>,
    pub(crate) batch: Batch,
    pub(crate) stats: Arc<QueueStats>,
}

/// Gets the next available index (GET_VRING_BASE).
type StopCall = Box<dyn FnOnce(u16)>;

impl QueueHandler {
    /// Starts a queue on this loop, disabled: it takes nothing before
    /// [`set_enabled`](Self::set_enabled).
    ///
    /// `kick` fires when the driver has put requests in; without one the queue is looked at only
    /// while the loop polls, or turns for other reasons.
    pub fn start(
        event_loop: &EventLoop,
        device: Arc<Device>,
        channel: Rc<dyn Channel>,
        queue: Queue,
        kick: Option<Arc<OwnedFd>>,
        call: Option<Arc<OwnedFd>>,
        stats: Arc<QueueStats>,
    ) -> Rc<Self> {
        let handler = Rc::new_cyclic(|me| QueueHandler {
            event_loop: event_loop.clone(),
            device,
            channel,
            slots: RefCell::new(SlotTable::new(queue.size())),
            queue,
            me: me.clone(),
            chain: RefCell::new(Chain::new()),
            call: RefCell::new(call),
            err: RefCell::new(None),
            kick: Cell::new(None),
            enabled: Cell::new(false),
            polled: Cell::new(false),
            wants_kick: Cell::new(false),
            stopping: Cell::new(None),
            stopped: Cell::new(false),
            queued: Cell::new(false),
            batch: Batch::default(),
            stats,
        });
        if let Some(kick) = kick {
            let events = nix::poll::PollFlags::POLLIN.bits().cast_unsigned();
            let id = event_loop.add_handler(kick, events.into(), Trigger::Edge, handler.clone());
            handler.kick.set(Some(id));
        }
        handler
    }

    /// Enables or disables the queue (SET_VRING_ENABLE). What waits in an enabled queue is taken at
    /// once: its kick may have come earlier.
    pub fn set_enabled(&self, enabled: bool) {
        self.enabled.set(enabled);
        if enabled {
            self.event_loop.section(|| self.take_turn());
        }
    }

    /// Sets the way out for signals (SET_VRING_CALL).
    pub fn set_call(&self, call: Option<Arc<OwnedFd>>) {
        *self.call.borrow_mut() = call;
    }

    /// Sets where a broken queue is reported (SET_VRING_ERR).
    pub fn set_err(&self, err: Option<Arc<OwnedFd>>) {
        *self.err.borrow_mut() = err;
    }

    /// Goes on in new memory (SET_MEM_TABLE while running). Requests in flight finish in the old.
    ///
    /// # Errors
    ///
    /// The rings are not in the new memory; the queue then is broken.
    pub fn replace_memory(&self, memory: Rc<MemoryView>) -> Result<(), QueueError> {
        self.queue.replace_memory(memory)
    }

    /// Takes no more requests, finishes those in flight, then calls `done` with the next available
    /// index, once, maybe before this returns. Stopping twice finishes the first stop's wait.
    pub fn stop(&self, done: impl FnOnce(u16) + 'static) {
        if self.stopped.get() {
            return done(self.queue.next_avail());
        }
        let earlier = self.stopping.take();
        self.stopping.set(Some(Box::new(move |base| {
            if let Some(earlier) = earlier {
                earlier(base);
            }
            done(base);
        })));
        if let Some(kick) = self.kick.take() {
            self.event_loop.remove_handler(kick);
        }
        self.enabled.set(false);
        if !self.queued.get() {
            self.finish_stop();
        }
    }

    /// Ends a stop once everything is answered and published.
    pub(crate) fn finish_stop(&self) {
        if self.queue.in_flight() == 0
            && let Some(done) = self.stopping.take()
        {
            self.stopped.set(true);
            done(self.queue.next_avail());
        }
    }

    /// Takes requests until there are none: a bounded number, for the sake of other sources (contract
    /// E11).
    fn take_turn(&self) {
        // A broken queue was reported when it broke, not with each kick from then on.
        if !self.enabled.get() || self.queue.is_broken() {
            return;
        }
        let Some(me) = self.me.upgrade() else { return };
        let me: Rc<dyn Completion> = me;
        if !self.polled.get() {
            self.queue.suppress_kicks();
        }
        for _ in 0..self.queue.size() {
            // What comes in meanwhile is taken too: it costs less now than with a submission, and a
            // kick, of its own.
            match self.take_one(&me) {
                Ok(true) => {}
                Ok(false) => break,
                Err(reason) => return self.break_queue(&reason),
            }
        }
        self.ask_for_kick();
    }

    /// The turn is over: unless the loop looks by itself, the driver has to kick. It is told at the
    /// end of the section, after the signal: what it puts in until then, woken or not, is found
    /// without a kick.
    fn ask_for_kick(&self) {
        if !self.polled.get() {
            self.wants_kick.set(true);
            self.finish_later();
        }
    }

    /// The end of the section: tells the driver to kick, and looks once more.
    pub(crate) fn enable_kicks(&self) {
        if self.wants_kick.replace(false)
            && self.enabled.get()
            && !self.polled.get()
            && self.queue.enable_kicks()
            && let Some(kick) = self.kick.get()
        {
            self.event_loop.call_again(kick);
        }
    }

    /// Takes one request and sends it on its way. `false`: there is none.
    fn take_one(&self, me: &Rc<dyn Completion>) -> Result<bool, Broken> {
        let mut chain = self.chain.borrow_mut();
        if !self.queue.pop(&mut chain).map_err(Broken::Queue)? {
            return Ok(false);
        }
        let head = chain.head();
        if let Err(malformed) = self.start_request(me, chain) {
            // It goes back unanswered: there is nowhere to write a status.
            self.queue.add_used(head, 0);
            return Err(Broken::Request(malformed));
        }
        Ok(true)
    }

    /// Sends a request on its way. The chain is let go of before anybody is called.
    fn start_request(
        &self,
        me: &Rc<dyn Completion>,
        chain: RefMut<'_, Chain>,
    ) -> Result<(), Malformed> {
        let memory = self.queue.memory();
        let Parsed { status_addr, request } = parse(&chain, &memory, &self.device)?;
        let mut slot = Slot {
            head: chain.head(),
            written: chain.writable_len(),
            status_addr,
            memory,
            pending: 1,
            status: Status::Ok,
            kind: Kind::Other,
            bytes: 0,
            started_ns: self.event_loop.now_ns(),
        };
        let head = slot.head;
        let other = |kind: Option<u32>| {
            let kind = kind.map_or(-1, i64::from);
            trace!(virtio_blk_handle_other(self.trace_dev(), self.trace_queue(), head, kind));
        };
        let fua = self.device.is_write_through();
        let (op, offset, data) = match request {
            Err(status) => {
                other(None);
                slot.status = status;
                drop(chain);
                self.answer(slot);
                return Ok(());
            }
            Ok(BlkRequest::GetId { data }) => {
                other(Some(VIRTIO_BLK_T_GET_ID));
                let len = data.len().min(ID_SIZE as u32);
                let written = data.write(&slot.memory, self.device.id()).map_err(Malformed::Buffer);
                debug_assert!(written.is_err() || written == Ok(len as usize));
                written?;
                drop(chain);
                self.answer(slot);
                return Ok(());
            }
            Ok(BlkRequest::Ranges { discard, data }) => {
                let kind = if discard { VIRTIO_BLK_T_DISCARD } else { VIRTIO_BLK_T_WRITE_ZEROES };
                other(Some(kind));
                let ranges = Ranges::read(discard, data, &slot.memory, &self.device)?;
                drop(chain);
                match ranges {
                    Ok(ranges) => self.submit_ranges(me, slot, &ranges, fua),
                    Err(status) => {
                        slot.status = status;
                        self.answer(slot);
                    }
                }
                return Ok(());
            }
            Ok(BlkRequest::Flush) => {
                other(Some(VIRTIO_BLK_T_FLUSH));
                (Op::Flush, 0, None)
            }
            Ok(BlkRequest::Read { offset, data }) => {
                trace!(virtio_blk_handle_read(
                    self.trace_dev(),
                    self.trace_queue(),
                    head,
                    offset / SECTOR,
                    u64::from(data.len()) / SECTOR,
                ));
                (Op::Read, offset, Some(data))
            }
            Ok(BlkRequest::Write { offset, data }) => {
                trace!(virtio_blk_handle_write(
                    self.trace_dev(),
                    self.trace_queue(),
                    head,
                    offset / SECTOR,
                    u64::from(data.len()) / SECTOR,
                ));
                (Op::Write { fua }, offset, Some(data))
            }
        };
        let mut slots = self.slots.borrow_mut();
        let mut bufs = slots.take_bufs();
        if let Some(data) = data {
            if let Err(error) = data.push_iovecs(&slot.memory, &mut bufs) {
                slots.keep_bufs(bufs);
                return Err(Malformed::Buffer(error));
            }
            slot.bytes = data.len();
        }
        slot.kind = match op {
            Op::Read => Kind::Read,
            Op::Write { .. } => Kind::Write,
            _ => Kind::Flush,
        };
        let len = slot.bytes.into();
        let tag = slots.insert(slot);
        drop(slots);
        drop(chain);
        if let Some(tag) = tag {
            self.channel.submit(Request::new(op, offset, len, bufs, me, tag));
        }
        Ok(())
    }

    /// Sends each range of a discard or write-zeroes request on its way.
    fn submit_ranges(&self, me: &Rc<dyn Completion>, mut slot: Slot, ranges: &Ranges, fua: bool) {
        slot.kind = Kind::Ranges;
        slot.pending = ranges.iter().count() as u32;
        let Some(tag) = self.slots.borrow_mut().insert(slot) else { return };
        for range in ranges.iter() {
            let op = if ranges.discard {
                Op::Discard
            } else {
                Op::WriteZeroes { may_unmap: range.may_unmap, no_fallback: false, fua }
            };
            let bufs = self.slots.borrow_mut().take_bufs();
            self.channel.submit(Request::new(op, range.offset, range.len, bufs, me, tag));
        }
    }

    /// The driver broke the rules: this queue takes no more, and says so once.
    pub(crate) fn break_queue(&self, reason: &dyn fmt::Display) {
        log::warn!("virtio-blk queue stops, its driver broke the rules: {reason}");
        self.queue.mark_broken();
        write_eventfd(self.err.borrow().as_deref());
    }

    /// The device's name in trace points.
    pub(crate) fn trace_dev(&self) -> &CStr {
        self.device.trace_name()
    }

    /// The queue's number in trace points.
    pub(crate) fn trace_queue(&self) -> u16 {
        self.queue.config().index
    }

    pub(crate) fn signal(&self) {
        trace!(virtio_notify(self.trace_dev(), self.trace_queue()));
        write_eventfd(self.call.borrow().as_deref());
    }
}

impl Handler for QueueHandler {
    fn ready(&self, events: u32) -> Progress {
        trace!(virtio_queue_notify(self.trace_dev(), self.trace_queue(), events == 0));
        self.take_turn();
        Progress::Done
    }

    fn can_poll(&self) -> bool {
        true
    }

    fn poll(&self) -> bool {
        self.enabled.get() && self.queue.has_work()
    }

    fn poll_begin(&self) {
        self.polled.set(true);
        self.queue.suppress_kicks();
    }

    fn poll_end(&self) {
        self.polled.set(false);
        // The loop asks `poll` next, so what raced is found.
        let _ = self.queue.enable_kicks();
    }
}

impl fmt::Debug for QueueHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueHandler")
            .field("queue", &self.queue)
            .field("enabled", &self.enabled)
            .field("in_flight", &self.queue.in_flight())
            .finish_non_exhaustive()
    }
}

/// Why a queue stops.
#[derive(Debug)]
enum Broken {
    Queue(QueueError),
    Request(Malformed),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Broken::Queue(error) => match std::error::Error::source(error) {
                Some(source) => write!(f, "{error}: {source}"),
                None => error.fmt(f),
            },
            Broken::Request(malformed) => malformed.fmt(f),
        }
    }
}
