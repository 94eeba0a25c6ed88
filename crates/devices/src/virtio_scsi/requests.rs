//! A request queue: turns chains into commands in flight.

use std::cell::{Cell, RefCell, RefMut};
use std::ffi::CStr;
use std::rc::Rc;
use std::sync::Arc;

use block::node::Channel;
use block::request::{Op, Request as BlockRequest, RequestOwner};
use event_loop::IoBufs;
use queue::{Chain, Segments, SegmentsError};
use trace::trace;

use super::device::Device;
use super::execute::{Data, Refused, Work, execute, repetitions};
use super::probes;
use super::sense::{CHECK_CONDITION, GOOD, Sense};
use super::slots::{Repeat, ScsiSlot, SlotTable};
use super::tasks::{Sequence, Tally, Tasks, Wait};
use super::wire::{Address, REQUEST_SIZE, RESPONSE_SIZE, Request, Response, ResponseBytes};
use crate::virtio::{Broken, RANGE_BYTES, VirtQueueWorker, VirtioBackend};
use stats::{Batch, InFlight, Kind, QueueStats};

/// The request queue's service.
pub(crate) struct Requests {
    pub(crate) device: Arc<Device>,
    /// The channels of the logical units' nodes.
    pub(crate) channels: Rc<[Rc<dyn Channel>]>,
    pub(crate) slots: RefCell<SlotTable>,
    /// Numbers the chains taken.
    numbers: Sequence,
    /// Waits for the end of tasks.
    waits: RefCell<Vec<Wait>>,
    /// Chains from this number on are not part of any wait.
    waited_until: Cell<u64>,
    /// WRITE SAME commands with another part to write.
    pub(crate) repeats: RefCell<Vec<(u32, IoBufs)>>,
    /// A write cache was switched on, and the answer is not published yet.
    cache_on: Cell<bool>,
    pub(crate) batch: Batch,
    pub(super) stats: Arc<QueueStats>,
}

impl Requests {
    pub(crate) fn new(
        device: Arc<Device>,
        channels: Rc<[Rc<dyn Channel>]>,
        queue_size: u16,
        stats: Arc<QueueStats>,
    ) -> Self {
        Requests {
            device,
            channels,
            slots: RefCell::new(SlotTable::new(queue_size)),
            numbers: Sequence::default(),
            waits: RefCell::default(),
            waited_until: Cell::default(),
            repeats: RefCell::default(),
            cache_on: Cell::default(),
            batch: Batch::default(),
            stats,
        }
    }
}

/// The parts of a request's chain.
struct Parts<'a> {
    request: Request,
    data: Data<'a>,
    response: Segments<'a>,
}

impl<'a> Parts<'a> {
    /// Splits a chain into its parts, with any distribution over descriptors (VIRTIO_F_ANY_LAYOUT).
    fn of(chain: &'a Chain, memory: &guest_memory::MemoryView) -> Result<Self, Broken> {
        let (bytes, out) = chain
            .readable()
            .split_array::<REQUEST_SIZE>(memory)
            .map_err(|error| Broken::Part("a request", error))?;
        let (wanted, writable) = (RESPONSE_SIZE as u32, chain.writable());
        let short = SegmentsError::Short { wanted, len: writable.len() };
        let (response, inward) =
            writable.split_at(wanted).ok_or(Broken::Part("a request's response", short))?;
        let request = Request::from_bytes(bytes);
        Ok(Parts { request, data: Data { out, inward }, response })
    }
}

impl VirtioBackend for Requests {
    const NAME: &'static str = "virtio-scsi request queue";

    fn trace_name(&self) -> &CStr {
        self.device.trace_name()
    }

    fn drain_begin(&self) {
        self.channels.iter().for_each(|channel| channel.drain_begin());
    }

    fn drain_end(&self) {
        self.channels.iter().for_each(|channel| channel.drain_end());
    }

    fn process(
        worker: &Rc<VirtQueueWorker<Self>>,
        chain: RefMut<'_, Chain>,
    ) -> Result<u32, Broken> {
        let this = &worker.service;
        let memory = worker.queue.memory();
        let Parts { request, data, response } = Parts::of(&chain, &memory)?;
        let started_ns = worker.event_loop.now_ns();
        let number = this.numbers.next();
        trace!(probes::virtio_scsi_cmd_req(
            this.trace_name(),
            worker.queue.config().index,
            chain.head(),
            request.address.trace_lun(),
            request.id,
            request.cdb[0],
        ));
        let answer = |answer: Response, sense: Option<Sense>, used: u32| {
            let bytes = response_bytes(answer, sense, data.len() - used);
            response.write(&memory, &bytes.0).map_err(Broken::Buffer)?;
            let written = if data.inward.is_empty() { 0 } else { used };
            match (answer, sense) {
                (Response::Ok, None) => {
                    this.batch.done(&this.stats, Kind::Other, 0, started_ns, started_ns);
                }
                _ => this.batch.invalid(&this.stats, Kind::Other),
            }
            worker.trace_response(chain.head(), request.id, answer, sense);
            worker.add_used(chain.head(), RESPONSE_SIZE as u32 + written);
            Ok(0)
        };
        if number < this.waited_until.get()
            && let Some(response) = worker.ended_before(&request, number)
        {
            return answer(response, None, 0);
        }
        let work = match execute(&this.device, &request, data, &memory) {
            Ok(Work::Answered(used)) => return answer(Response::Ok, None, used),
            Ok(Work::CacheOn(used)) => {
                this.cache_on.set(true);
                return answer(Response::Ok, None, used);
            }
            Ok(work) => work,
            Err(Refused::Sense(sense)) => return answer(Response::Ok, Some(sense), 0),
            Err(Refused::Response(refusal)) => return answer(refusal, None, 0),
            Err(Refused::Access(error)) => return Err(Broken::Buffer(error)),
        };
        let mut slots = this.slots.borrow_mut();
        let mut slot = ScsiSlot {
            head: chain.head(),
            lun: 0,
            id: request.id,
            number,
            response: slots.take_response(response),
            memory,
            buffer: data.len(),
            used: 0,
            is_read: !data.inward.is_empty(),
            op: Op::Flush,
            pending: 1,
            sense: None,
            repeat: None,
            given_up: false,
            ended: None,
            kind: Kind::Other,
            offset: 0,
            bytes: 0,
            started_ns,
        };
        let mut bufs = slots.take_bufs();
        let (mut discards, mut beyond) = (None, 0);
        let (offset, len) = match work {
            Work::Transfer { lun, op, offset, data } => {
                let is_read = op == Op::Read;
                let kind = if is_read { Kind::Read } else { Kind::Write };
                data.push_iovecs(&slot.memory, &mut bufs).map_err(Broken::Buffer)?;
                let bytes = u64::from(data.len());
                slot = ScsiSlot { lun, op, used: data.len(), kind, offset, bytes, ..slot };
                (offset, bytes)
            }
            Work::Plain { lun, op, offset, len, used } => {
                slot = ScsiSlot { lun, op, used, kind: Kind::Flush, ..slot };
                (offset, len)
            }
            Work::Unmap { lun, ranges, used } => {
                let (op, pending) = (Op::Discard, ranges.iter().len() as u32);
                let first = ranges.iter().next().map_or(0, |(offset, _)| offset);
                let bytes = ranges.iter().map(|(_, len)| len).sum();
                let slot_of = ScsiSlot { lun, op, used, pending, ..slot };
                slot = ScsiSlot { kind: Kind::Discard, offset: first, bytes, ..slot_of };
                discards = Some(ranges);
                beyond = pending * RANGE_BYTES;
                (0, 0)
            }
            Work::WriteSame { lun, offset, len, block, may_unmap, fua } => {
                block.push_iovecs(&slot.memory, &mut bufs).map_err(Broken::Buffer)?;
                slot = ScsiSlot { lun, used: block.len(), offset, bytes: len, ..slot };
                if bufs.is_zero() {
                    bufs.clear();
                    slot.op = Op::WriteZeroes { may_unmap, no_fallback: false, fua };
                    slot.kind = Kind::WriteZeroes;
                    (offset, len)
                } else {
                    let times = repetitions(block, len);
                    for _ in 1..times {
                        block.push_iovecs(&slot.memory, &mut bufs).map_err(Broken::Buffer)?;
                    }
                    let now = times * u64::from(block.len());
                    beyond = u32::try_from(now).unwrap_or(u32::MAX);
                    slot.op = Op::Write { fua };
                    slot.kind = Kind::Write;
                    slot.repeat = Repeat::from(offset + now, len - now);
                    (offset, now)
                }
            }
            Work::Answered(_) | Work::CacheOn(_) => (0, 0),
        };
        let (lun, op) = (slot.lun, slot.op);
        let tag = slots.insert(slot);
        drop(slots);
        drop(chain);
        let (Some(tag), Some(channel)) = (tag, this.channels.get(usize::from(lun))) else {
            return Ok(beyond);
        };
        let me: Rc<dyn RequestOwner> = worker.clone();
        match discards {
            None => channel.submit(BlockRequest::new(op, offset, len, bufs, &me, tag)),
            Some(ranges) => {
                for (offset, len) in ranges.iter() {
                    let bufs = IoBufs::new();
                    channel.submit(BlockRequest::new(op, offset, len, bufs, &me, tag));
                }
            }
        }
        Ok(beyond)
    }

    fn took(&self, chains: u16) {
        self.stats.taken.add(chains.into());
    }

    fn in_flight(&self) -> Vec<InFlight> {
        let of = |slot: &ScsiSlot| InFlight {
            id: slot.number,
            kind: slot.kind,
            lun: Some(slot.lun),
            offset: slot.offset,
            len: slot.bytes,
            started_ns: slot.started_ns,
        };
        self.slots.borrow().iter().map(of).collect()
    }

    fn batch_ended(worker: &VirtQueueWorker<Self>, signalled: Option<bool>) {
        let this = &worker.service;
        if let Some(signalled) = signalled {
            this.batch.publish(&this.stats, signalled);
            if this.cache_on.replace(false) {
                this.device.write_caches_are_known();
            }
        }
        if !this.repeats.borrow().is_empty() {
            worker.continue_repeats();
        }
        // Answers not yet published end waits in the section that publishes them.
        if !worker.is_unpublished() && !this.waits.borrow().is_empty() {
            let slots = this.slots.borrow();
            // A wait does not include chains that will not be taken.
            let taken = if worker.is_taking() { this.numbers.peek() } else { u64::MAX };
            // Dropping a wait may call back, so the borrows end first.
            let ended: Vec<Wait> = this
                .waits
                .borrow_mut()
                .extract_if(.., |wait| {
                    wait.before <= taken && slots.count(wait.tasks, wait.before) == 0
                })
                .collect();
            drop(slots);
            drop(ended);
        }
    }
}

impl VirtQueueWorker<Requests> {
    /// Ends tasks among those that the driver has submitted until now. Drops `tally` once the driver can see the last
    /// end.
    pub(crate) fn end_tasks(&self, tasks: Tasks, response: Response, tally: Rc<Tally>) {
        let this = &self.service;
        // Chains not yet taken are in flight from the driver's view.
        let before = this.numbers.peek() + u64::from(self.queue.offered());
        this.slots.borrow_mut().end(tasks, response);
        this.waits.borrow_mut().push(Wait { tasks, response, before, _tally: tally });
        this.waited_until.update(|until| until.max(before));
        // Release tasks that an error policy holds. Otherwise the function, and a stop of the control queue, would
        // wait for the operator too.
        let has_ended = |tag| this.slots.borrow().has_ended(tag);
        self.event_loop.section(|| {
            this.channels.iter().for_each(|channel| channel.abandon(&has_ended));
        });
        // What exceeds this turn is ended in the next turns.
        self.process_batch();
        self.finish_later();
    }

    /// The response to chain `number`, if a task management function ended it before it was taken.
    #[cold]
    fn ended_before(&self, request: &Request, number: u64) -> Option<Response> {
        // Check the waits at the end of the section, whatever the result.
        self.finish_later();
        let Address::Lun(Some(lun)) = request.address else { return None };
        let ends = |wait: &&Wait| number < wait.before && wait.tasks.have(lun, request.id);
        self.service.waits.borrow().iter().find(ends).map(|wait| wait.response)
    }

    /// Traces the end of a command.
    #[inline]
    pub(crate) fn trace_response(
        &self,
        head: u16,
        id: u64,
        response: Response,
        sense: Option<Sense>,
    ) {
        trace!(probes::virtio_scsi_cmd_resp(
            self.service.trace_name(),
            self.queue.config().index,
            head,
            id,
            response as u8,
            if sense.is_some() { CHECK_CONDITION } else { GOOD },
        ));
    }

    /// Number of matching tasks in flight.
    pub(crate) fn count_tasks(&self, tasks: Tasks) -> usize {
        self.service.slots.borrow().count(tasks, u64::MAX)
    }

    /// Writes the next parts of WRITE SAME commands.
    fn continue_repeats(&self) {
        let this = &self.service;
        let Some(me) = self.me() else { return };
        let me: Rc<dyn RequestOwner> = me;
        for (tag, mut bufs) in this.repeats.take() {
            let mut slots = this.slots.borrow_mut();
            let Some(slot) = slots.get_mut(tag) else { continue };
            if slot.ended.is_some() {
                drop(slots);
                self.complete(tag, Ok(()), bufs);
                continue;
            }
            let Some(Repeat { offset, left }) = slot.repeat else { continue };
            let now = left.min(bufs.len() as u64);
            slot.repeat = Repeat::from(offset + now, left - now);
            let (op, lun) = (slot.op, slot.lun);
            if now < bufs.len() as u64 {
                let mut part = slots.take_bufs();
                part.set_part(&bufs, 0, now as usize, usize::MAX);
                std::mem::swap(&mut part, &mut bufs);
                slots.keep_bufs(part);
            }
            drop(slots);
            if let Some(channel) = this.channels.get(usize::from(lun)) {
                channel.submit(BlockRequest::new(op, offset, now, bufs, &me, tag));
            }
        }
    }
}

impl Repeat {
    /// Returns `None` if nothing is left.
    fn from(offset: u64, left: u64) -> Option<Self> {
        (left > 0).then_some(Repeat { offset, left })
    }
}

/// The response to a command, with a SCSI status or a transport error.
pub(crate) fn response_bytes(
    response: Response,
    sense: Option<Sense>,
    residual: u32,
) -> ResponseBytes {
    match sense {
        Some(sense) => ResponseBytes::new(response, CHECK_CONDITION, residual, &sense.to_bytes()),
        None => ResponseBytes::new(response, GOOD, residual, &[]),
    }
}
