//! The admin queue and its commands (section 5).

use std::pin::Pin;
use std::sync::atomic::Ordering;

use event_loop::sync::lock;
use event_loop::{LoopGone, oneshot};

use super::bits::{
    COMPLETION, Configuration, DoorbellOf, MAX_ADMIN_ENTRIES, MAX_ENTRIES, PAGE, SUBMISSION,
};
use super::command::Entry;
use super::controller::{Controller, ControllerState};
use super::features::{Feature, Features, Select};
use super::identify::{self, Cns};
use super::logs::{self, LogPage, Wanted};
use super::namespace::DoorbellMode;
use super::probes;
use super::queue::{CompletionQueue, QueueError, ShadowPages, SubmissionQueue};
use super::status::{Answer, Status};
use super::worker::Order;
use stats::QueueStats;
use trace::trace;

/// Opcodes.
const DELETE_SUBMISSION: u8 = 0x00;
const CREATE_SUBMISSION: u8 = 0x01;
const GET_LOG_PAGE: u8 = 0x02;
const DELETE_COMPLETION: u8 = 0x04;
const CREATE_COMPLETION: u8 = 0x05;
const IDENTIFY: u8 = 0x06;
const ABORT: u8 = 0x08;
const SET_FEATURES: u8 = 0x09;
const GET_FEATURES: u8 = 0x0a;
const ASYNC_EVENT: u8 = 0x0c;
const DOORBELL_BUFFERS: u8 = 0x7c;

/// Bytes of the data of the feature Host Behavior Support.
const HOST_BEHAVIOR_LEN: usize = 512;

/// Commands taken in a row, for the sake of the control loop's other tasks (fairness contract).
const TURN: u32 = 32;

/// The admin queues.
#[derive(Debug)]
pub(super) struct Admin {
    pub(super) submission: SubmissionQueue,
    pub(super) completion: CompletionQueue,
    /// A command is carried out by the worker; the next one waits.
    pub(super) is_busy: bool,
}

impl Admin {
    /// Queues at an address, of a number of entries. `None`: they are too small, or reach beyond all addresses.
    pub(super) fn new(submission: (u64, u32), completion: (u64, u32)) -> Option<Self> {
        let fits = |(base, size): (u64, u32), entry| {
            let len = u64::from(size) * entry;
            (2..=MAX_ADMIN_ENTRIES).contains(&size) && base.checked_add(len).is_some()
        };
        (fits(submission, SUBMISSION) && fits(completion, COMPLETION)).then(|| Admin {
            submission: SubmissionQueue::new(submission.0, submission.1),
            completion: CompletionQueue::new(completion.0, completion.1),
            is_busy: false,
        })
    }

    /// The queues as another process left them, with no command under way.
    pub(super) fn restored(submission: SubmissionQueue, completion: CompletionQueue) -> Self {
        Admin { submission, completion, is_busy: false }
    }
}

/// The I/O queues that the driver has made.
#[derive(Debug)]
pub(super) struct Queues {
    /// By number, less one: the completion queue of each submission queue.
    submissions: Vec<Option<u16>>,
    completions: Vec<bool>,
}

impl Queues {
    pub(super) fn new(queues: u16) -> Self {
        let queues = queues.into();
        Queues { submissions: vec![None; queues], completions: vec![false; queues] }
    }

    pub(super) fn clear(&mut self) {
        self.submissions.fill(None);
        self.completions.fill(false);
    }

    fn is_empty(&self) -> bool {
        self.submissions.iter().all(Option::is_none) && !self.completions.contains(&true)
    }

    /// Returns the completion queue of a doorbell, or of the doorbell's submission queue. `None`: the doorbell's queue
    /// does not exist.
    pub(super) fn completion_of(&self, bell: DoorbellOf) -> Option<u16> {
        let at = |qid: u16| usize::from(qid).checked_sub(1);
        match bell {
            DoorbellOf::Submission(qid) => *self.submissions.get(at(qid)?)?,
            DoorbellOf::Completion(qid) => self.completions.get(at(qid)?)?.then_some(qid),
        }
    }

    /// Adds a completion queue.
    pub(super) fn add_completion(&mut self, qid: u16) -> Result<(), Status> {
        match std::mem::replace(self.completion(qid)?, true) {
            true => Err(Status::INVALID_QUEUE_ID),
            false => Ok(()),
        }
    }

    /// Adds a submission queue of a completion queue.
    pub(super) fn add_submission(&mut self, qid: u16, cqid: u16) -> Result<(), Status> {
        if !*self.completion(cqid)? {
            return Err(Status::INVALID_COMPLETION_QUEUE);
        }
        let place = self.submission(qid)?;
        if place.is_some() {
            return Err(Status::INVALID_QUEUE_ID);
        }
        *place = Some(cqid);
        Ok(())
    }

    /// The place of a submission queue.
    fn submission(&mut self, qid: u16) -> Result<&mut Option<u16>, Status> {
        let at = usize::from(qid).checked_sub(1).ok_or(Status::INVALID_QUEUE_ID)?;
        self.submissions.get_mut(at).ok_or(Status::INVALID_QUEUE_ID)
    }

    /// The place of a completion queue.
    fn completion(&mut self, qid: u16) -> Result<&mut bool, Status> {
        let at = usize::from(qid).checked_sub(1).ok_or(Status::INVALID_QUEUE_ID)?;
        self.completions.get_mut(at).ok_or(Status::INVALID_QUEUE_ID)
    }
}

/// What becomes of an admin command.
enum Outcome {
    Now(Answer),
    /// It is answered when an event happens.
    Waits,
    /// Workers carry it out.
    Later(Pin<Box<dyn Future<Output = Answer>>>),
}

impl From<Status> for Outcome {
    fn from(status: Status) -> Self {
        Outcome::Now(status.into())
    }
}

/// A number, as the only result.
fn result(result: u32) -> Outcome {
    Outcome::Now(Answer { result, status: Status::SUCCESS })
}

impl Controller {
    /// Carries admin commands out, and tells of events.
    pub(super) fn run_admin(&self) {
        if self.state.borrow().is_paused {
            return;
        }
        let (mut has_posts, mut left) = (false, TURN);
        let ran = loop {
            if left == 0 {
                self.run_admin_later();
                break Ok(());
            }
            left -= 1;
            match self.pop_admin() {
                Ok(Some(entry)) => match self.admin_command(&entry) {
                    Ok(is_answered) => has_posts |= is_answered,
                    Err(error) => break Err(error),
                },
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        match ran.and_then(|()| self.tell_events()) {
            Ok(told) => has_posts |= told,
            Err(QueueError::NotMemory | QueueError::Doorbell) => self.fail(),
        }
        if has_posts {
            self.messages.send(0);
        }
    }

    /// Others get their turn first.
    fn run_admin_later(&self) {
        let me = self.me.clone();
        self.event_loop.spawn(async move {
            event_loop::take_turns().await;
            if let Some(me) = me.upgrade() {
                me.run_admin();
            }
        });
    }

    fn pop_admin(&self) -> Result<Option<Entry>, QueueError> {
        let ControllerState { admin, memory, .. } = &mut *self.state.borrow_mut();
        let Some(admin) = admin.as_mut().filter(|admin| !admin.is_busy) else { return Ok(None) };
        if admin.submission.is_empty() || !admin.completion.reserve(memory)? {
            return Ok(None);
        }
        admin.submission.pop(memory)
    }

    /// Carries a command out. Returns whether it is answered.
    fn admin_command(&self, entry: &Entry) -> Result<bool, QueueError> {
        trace!(probes::pci_nvme_admin_cmd(self.shared.trace_id(), entry.cid, entry.opcode));
        let outcome = {
            let state = &mut *self.state.borrow_mut();
            self.execute(state, entry).unwrap_or_else(Outcome::from)
        };
        match outcome {
            Outcome::Now(answer) => self.answer_admin(entry.cid, answer).map(|()| true),
            Outcome::Waits => {
                if let Some(admin) = &mut self.state.borrow_mut().admin {
                    admin.completion.unreserve();
                }
                Ok(false)
            }
            Outcome::Later(done) => {
                let life = {
                    let mut state = self.state.borrow_mut();
                    if let Some(admin) = &mut state.admin {
                        admin.is_busy = true;
                    }
                    state.life
                };
                let (me, cid) = (self.me.clone(), entry.cid);
                self.event_loop.spawn(async move {
                    let answer = done.await;
                    if let Some(me) = me.upgrade() {
                        me.end_admin(life, cid, answer);
                    }
                });
                Ok(false)
            }
        }
    }

    /// The worker has carried a command out.
    fn end_admin(&self, life: u64, cid: u16, answer: Answer) {
        {
            let state = &mut *self.state.borrow_mut();
            match &mut state.admin {
                Some(admin) if state.life == life => admin.is_busy = false,
                Some(_) | None => return,
            }
        }
        match self.answer_admin(cid, answer) {
            Ok(()) => self.messages.send(0),
            Err(_) => self.fail(),
        }
        self.tell_idle();
        self.run_admin();
    }

    fn answer_admin(&self, cid: u16, answer: Answer) -> Result<(), QueueError> {
        let ControllerState { admin, memory, .. } = &mut *self.state.borrow_mut();
        let Some(Admin { submission, completion, .. }) = admin else { return Ok(()) };
        let (controller, status) = (self.shared.trace_id(), answer.status.code_and_type());
        trace!(probes::pci_nvme_enqueue_req_completion(controller, 0u64, cid, status));
        if !answer.status.is_success() {
            let status = answer.status;
            let failed = logs::Failed { sqid: 0, cid, status, lba: 0, nsid: 0 };
            lock(&self.shared.errors).add(failed);
        }
        completion.post(memory, answer, (0, submission.head()), cid)
    }

    /// Answers requests for events. Returns whether there were some.
    fn tell_events(&self) -> Result<bool, QueueError> {
        let ControllerState { admin, memory, events, .. } = &mut *self.state.borrow_mut();
        let Some(Admin { submission, completion, .. }) = admin else { return Ok(false) };
        let mut told = false;
        while completion.reserve(memory)? {
            let Some((cid, result)) = events.answer() else {
                completion.unreserve();
                break;
            };
            let answer = Answer { result, status: Status::SUCCESS };
            completion.post(memory, answer, (0, submission.head()), cid)?;
            told = true;
        }
        Ok(told)
    }

    fn execute(&self, state: &mut ControllerState, entry: &Entry) -> Result<Outcome, Status> {
        match entry.opcode {
            DELETE_SUBMISSION => self.delete_submission(state, entry),
            CREATE_SUBMISSION => self.create_submission(state, entry),
            DELETE_COMPLETION => self.delete_completion(state, entry),
            CREATE_COMPLETION => self.create_completion(state, entry),
            GET_LOG_PAGE => self.log_page(state, entry),
            IDENTIFY => self.identify(state, entry),
            ABORT => self.abort(state, entry),
            SET_FEATURES => self.set_feature(state, entry),
            GET_FEATURES => self.feature(state, entry),
            ASYNC_EVENT if state.events.request(entry.cid) => Ok(Outcome::Waits),
            ASYNC_EVENT => Err(Status::TOO_MANY_EVENT_REQUESTS),
            DOORBELL_BUFFERS if self.config.doorbells == DoorbellMode::Auto => {
                self.set_doorbell_buffers(entry)
            }
            // Format NVM, firmware and namespace management among them.
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    /// Has the worker of a completion queue do something.
    fn later(&self, cqid: u16, order: impl FnOnce(oneshot::Sender<()>) -> Order) -> Outcome {
        let (done, is_done) = oneshot::channel();
        self.order(cqid, order(done));
        Outcome::Later(Box::pin(async move {
            match is_done.await {
                Ok(()) => Status::SUCCESS.into(),
                Err(_gone) => Status::INTERNAL_ERROR.into(),
            }
        }))
    }

    /// Aborts a command that waits in its queue, or a request for an event. The node cannot take a command back that was
    /// begun: bit 0 of the answer says that it was not aborted.
    fn abort(&self, state: &mut ControllerState, entry: &Entry) -> Result<Outcome, Status> {
        const NOT_ABORTED: u32 = 1;
        let [dword10, ..] = entry.dwords;
        let (qid, cid) = (dword10 as u16, (dword10 >> 16) as u16);
        if qid == 0 {
            let ControllerState { admin, memory, events, .. } = state;
            let Some(Admin { submission, completion, .. }) = admin else {
                return Ok(result(NOT_ABORTED));
            };
            if !events.waits(cid) || !completion.reserve(memory).unwrap_or(false) {
                return Ok(result(NOT_ABORTED));
            }
            events.abort(cid);
            let posted = completion.post(
                memory,
                Status::ABORT_REQUESTED.into(),
                (0, submission.head()),
                cid,
            );
            // The answer to this command meets the same error, which is fatal.
            return posted.map(|()| result(0)).map_err(|_| Status::INTERNAL_ERROR);
        }
        let Some(cqid) = state.queues.completion_of(DoorbellOf::Submission(qid)) else {
            return Ok(result(NOT_ABORTED));
        };
        let (answer, is_aborted) = oneshot::channel();
        self.order(cqid, Order::Abort { qid, cid, answer });
        Ok(Outcome::Later(Box::pin(async move {
            match is_aborted.await {
                Ok(is_aborted) => {
                    Answer { result: u32::from(!is_aborted), status: Status::SUCCESS }
                }
                Err(_gone) => Status::INTERNAL_ERROR.into(),
            }
        })))
    }

    fn create_completion(
        &self,
        state: &mut ControllerState,
        entry: &Entry,
    ) -> Result<Outcome, Status> {
        let has_size = Configuration::has_completion_size;
        let (qid, size, base) = new_queue(entry, COMPLETION, has_size(state.cc))?;
        let [_, dword11, ..] = entry.dwords;
        let (wants_interrupts, vector) = (dword11 & 2 != 0, (dword11 >> 16) as u16);
        if vector > self.config.num_queues {
            return Err(Status::INVALID_VECTOR);
        }
        state.queues.add_completion(qid)?;
        let vector = wants_interrupts.then_some(vector);
        Ok(self.later(qid, |done| Order::CreateCompletion { qid, base, size, vector, done }))
    }

    fn create_submission(
        &self,
        state: &mut ControllerState,
        entry: &Entry,
    ) -> Result<Outcome, Status> {
        let has_size = Configuration::has_submission_size;
        let (qid, size, base) = new_queue(entry, SUBMISSION, has_size(state.cc))?;
        let [_, dword11, ..] = entry.dwords;
        let cqid = (dword11 >> 16) as u16;
        state.queues.add_submission(qid, cqid)?;
        Ok(self.later(cqid, |done| Order::CreateSubmission { qid, base, size, cqid, done }))
    }

    fn delete_submission(
        &self,
        state: &mut ControllerState,
        entry: &Entry,
    ) -> Result<Outcome, Status> {
        let [dword10, ..] = entry.dwords;
        let qid = dword10 as u16;
        let cqid = state.queues.submission(qid)?.take().ok_or(Status::INVALID_QUEUE_ID)?;
        Ok(self.later(cqid, |done| Order::DeleteSubmission { qid, done }))
    }

    fn delete_completion(
        &self,
        state: &mut ControllerState,
        entry: &Entry,
    ) -> Result<Outcome, Status> {
        let [dword10, ..] = entry.dwords;
        let qid = dword10 as u16;
        if state.queues.submissions.contains(&Some(qid)) {
            return Err(Status::INVALID_QUEUE_DELETION);
        }
        if !std::mem::take(state.queues.completion(qid)?) {
            return Err(Status::INVALID_QUEUE_ID);
        }
        Ok(self.later(qid, |done| Order::DeleteCompletion { qid, done }))
    }

    fn set_doorbell_buffers(&self, entry: &Entry) -> Result<Outcome, Status> {
        let (doorbells, events) = entry.prp_entries();
        let pages = ShadowPages::new(doorbells, events).ok_or(Status::INVALID_FIELD)?;
        let done = self.order_all(move |done| Order::Shadow { pages, done });
        Ok(Outcome::Later(Box::pin(async move {
            match done.await.into_iter().collect() {
                Ok(()) => Status::SUCCESS.into(),
                Err(LoopGone) => Status::INTERNAL_ERROR.into(),
            }
        })))
    }

    fn identify(&self, state: &ControllerState, entry: &Entry) -> Result<Outcome, Status> {
        let data = entry.admin_data()?;
        let [dword10, ..] = entry.dwords;
        let namespace = || self.shared.namespace(entry.nsid).ok_or(Status::INVALID_NAMESPACE);
        let page = match Cns::parse(dword10)? {
            Cns::Namespace => identify::namespace(namespace()?),
            Cns::Controller => identify::controller(&self.config, &self.shared.namespaces),
            Cns::List if entry.nsid >= u32::MAX - 1 => return Err(Status::INVALID_NAMESPACE),
            Cns::List => identify::list(entry.nsid, self.shared.namespaces.len()),
            Cns::Descriptors => {
                namespace()?;
                identify::descriptors(&self.config, entry.nsid)
            }
        };
        data.write(&state.memory, page.bytes())?;
        Ok(Status::SUCCESS.into())
    }

    fn log_page(&self, state: &mut ControllerState, entry: &Entry) -> Result<Outcome, Status> {
        let data = entry.admin_data()?;
        let Wanted { page, notes, offset, len } = Wanted::parse(&entry.dwords)?;
        let errors = &self.shared.errors;
        let bytes = match page {
            LogPage::Errors => lock(errors).page(),
            LogPage::Health => {
                let hours = self.event_loop.now_ns() / 3_600_000_000_000;
                let queues = self.shared.stats.iter().map(|stats| -> &QueueStats { stats });
                logs::health(&lock(errors), queues, hours)
            }
            LogPage::Firmware => logs::firmware(),
            LogPage::ChangedNamespaces => logs::changed_namespaces(&state.changed),
            LogPage::Effects => logs::effects(),
        };
        let bytes = bytes.bytes().get(offset..offset + len).unwrap_or_default();
        data.write(&state.memory, bytes)?;
        if let Some(number) = notes {
            state.events.was_read(number);
            if page == LogPage::ChangedNamespaces {
                state.changed.clear();
            }
        }
        Ok(Status::SUCCESS.into())
    }

    fn set_feature(&self, state: &mut ControllerState, entry: &Entry) -> Result<Outcome, Status> {
        let [dword10, value, ..] = entry.dwords;
        let ControllerState { features, queues, .. } = state;
        match Feature::to_set(dword10)? {
            Feature::Kept(place) => features.keep(place, value),
            // The one power state.
            Feature::PowerManagement if value & 0x1f == 0 => {}
            Feature::PowerManagement => return Err(Status::INVALID_FIELD),
            Feature::WriteCache => return Ok(self.set_write_cache(value & 1 != 0)),
            Feature::Queues if value as u16 == 0xffff || value >> 16 == 0xffff => {
                return Err(Status::INVALID_FIELD);
            }
            // Queues are numbered before the first one is created.
            Feature::Queues if !queues.is_empty() => return Err(Status::SEQUENCE_ERROR),
            Feature::Queues => return Ok(result(self.queue_counts())),
            Feature::KeepAlive if value == 0 => {}
            Feature::KeepAlive => return Err(Status::INVALID_FIELD),
            Feature::Vector | Feature::HostBehavior => return Err(Status::NOT_CHANGEABLE),
            Feature::AsyncEvents => features.set_async_events(value),
        }
        Ok(Status::SUCCESS.into())
    }

    /// From now on, each write is durable before it is answered, or not any more. What is in the cache goes first.
    fn set_write_cache(&self, is_on: bool) -> Outcome {
        self.shared.write_cache.store(is_on, Ordering::Relaxed);
        if is_on {
            return Status::SUCCESS.into();
        }
        // Writes that have begun with the cache are in it when they have ended.
        let (settled, me) = (self.settle(), self.me.clone());
        Outcome::Later(Box::pin(async move {
            let is_settled = settled.await.is_ok();
            let flushed = me.upgrade().filter(|_| is_settled).map(|me| me.flush());
            let Some(flushed) = flushed else { return Status::INTERNAL_ERROR.into() };
            match flushed.await {
                Ok(Ok(())) => Status::SUCCESS.into(),
                Ok(Err(_)) | Err(_) => Status::INTERNAL_ERROR.into(),
            }
        }))
    }

    fn feature(&self, state: &ControllerState, entry: &Entry) -> Result<Outcome, Status> {
        let [dword10, value, ..] = entry.dwords;
        let (feature, select) = match Feature::to_get(dword10)? {
            Ok(wanted) => wanted,
            Err(capabilities) => return Ok(result(capabilities)),
        };
        let default = Features::default();
        let (features, write_cache) = match select {
            Select::Current => (&state.features, self.shared.write_cache.load(Ordering::Relaxed)),
            Select::Default => (&default, self.config.write_cache),
        };
        Ok(result(match feature {
            Feature::Kept(place) => features.kept(place),
            Feature::PowerManagement => 0,
            Feature::WriteCache => write_cache.into(),
            Feature::Queues => self.queue_counts(),
            Feature::Vector if value as u16 > self.config.num_queues => {
                return Err(Status::INVALID_FIELD);
            }
            // Interrupts of the vector are not coalesced.
            Feature::Vector => u32::from(value as u16) | 1 << 16,
            Feature::AsyncEvents => features.async_events(),
            Feature::KeepAlive => 0,
            Feature::HostBehavior => {
                entry.admin_data()?.write(&state.memory, &[0; HOST_BEHAVIOR_LEN])?;
                0
            }
        }))
    }

    /// Submission and completion queues that there can be, counted from 0.
    fn queue_counts(&self) -> u32 {
        let count = u32::from(self.config.num_queues) - 1;
        count | count << 16
    }
}

/// Number, entries and address of a queue to be made, with entries of so many bytes. `has_size`: CC says that size.
fn new_queue(entry: &Entry, bytes: u64, has_size: bool) -> Result<(u16, u32, u64), Status> {
    let [dword10, dword11, ..] = entry.dwords;
    let (qid, size) = (dword10 as u16, (dword10 >> 16) + 1);
    let (base, _) = entry.prp_entries();
    if !(2..=MAX_ENTRIES).contains(&size) {
        return Err(Status::INVALID_QUEUE_SIZE);
    }
    // Queues are contiguous (CAP.CQR).
    let is_contiguous = dword11 & 1 != 0;
    if !is_contiguous || !has_size || base.checked_add(u64::from(size) * bytes).is_none() {
        return Err(Status::INVALID_FIELD);
    }
    if !base.is_multiple_of(PAGE) {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    Ok((qid, size, base))
}
