//! The I/O queues at work on their I/O thread: polling, notifications, creation, deletion and resets. `requests` carries
//! out the commands.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use block::node::Channel;
use event_loop::{
    DeferredCall, EventLoop, Handler, HandlerId, Progress, Trigger, mailbox, oneshot,
};
use guest_memory::MemoryView;
use nix::errno::Errno;

use super::bits::DoorbellOf;
use super::deallocate::Deallocations;
use super::queue::{CompletionQueue, QueueError, ShadowPages, SubmissionQueue};
use super::queues::{Completion, Places, Submission, UNSEEN, WorkerState};
use super::requests::Slots;
use super::saved::{SavedCompletion, SavedQueues, SavedSubmission};
use super::shared::{Doorbells, Messages, Shared};
use block::flush::flush;
use stats::Batch;
use stats::InFlight;

/// What the controller has a worker do.
pub(crate) enum Order {
    CreateCompletion {
        qid: u16,
        base: u64,
        size: u32,
        /// `None`: the queue sends no interrupts.
        vector: Option<u16>,
        done: oneshot::Sender<()>,
    },
    CreateSubmission {
        qid: u16,
        base: u64,
        size: u32,
        cqid: u16,
        done: oneshot::Sender<()>,
    },
    /// Done when the queue's commands have ended.
    DeleteSubmission {
        qid: u16,
        done: oneshot::Sender<()>,
    },
    DeleteCompletion {
        qid: u16,
        done: oneshot::Sender<()>,
    },
    /// Has a command of this queue answered as aborted, if it was not taken yet. Says whether it was not.
    Abort {
        qid: u16,
        cid: u16,
        answer: oneshot::Sender<bool>,
    },
    /// The driver writes doorbells to memory.
    Shadow {
        pages: ShadowPages,
        done: oneshot::Sender<()>,
    },
    /// Forgets all queues. Done when their commands have ended. Their completions are not posted.
    Reset(oneshot::Sender<()>),
    /// Done when the commands that have begun have ended: nothing uses memory that the controller had before.
    Settle(oneshot::Sender<()>),
    Flush(oneshot::Sender<Result<(), Errno>>),
    /// Takes no more commands. Done when those that have begun are answered, with their interrupts sent.
    Pause(oneshot::Sender<()>),
    /// The queues, after a pause.
    Save(oneshot::Sender<SavedQueues>),
    /// Takes commands again.
    Resume,
    /// Goes on with the queues of another worker.
    Restore(SavedQueues),
    InFlight(oneshot::Sender<Vec<(u64, InFlight)>>),
    /// Reads the admin queue's doorbells in the page of doorbells, until a reset.
    WatchAdmin,
}

/// What a worker tells the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A doorbell got a value beyond its queue's end.
    BadDoorbell,
    /// The admin queue's doorbells have other values in the page of doorbells.
    AdminDoorbell,
    /// A queue is not memory.
    Fatal,
}

/// What an I/O thread needs to take its part of a controller's queues on.
pub struct Attachment {
    pub(super) shared: Arc<Shared>,
    pub(super) doorbells: Arc<Doorbells>,
    pub(super) orders: mailbox::Receiver<Order>,
    pub(super) notices: mailbox::Sender<Notice>,
    pub(super) gone: oneshot::Sender<()>,
}

impl Attachment {
    /// Has this loop carry out the commands of its part of the I/O queues.
    ///
    /// `channels` are those of the namespaces. `messages` sends interrupts. The loop continues until the
    /// controller [ends](super::Controller::end).
    pub fn attach(
        self,
        event_loop: &EventLoop,
        channels: Vec<Rc<dyn Channel>>,
        messages: Box<dyn Messages>,
    ) {
        let Attachment { shared, doorbells, mut orders, notices, gone } = self;
        let worker = Worker::start(event_loop, (shared, doorbells), channels, messages, notices);
        event_loop.spawn(async move {
            while let Some(order) = orders.receive().await {
                worker.obey(order);
            }
            let (done, ended) = oneshot::channel();
            worker.obey(Order::Reset(done));
            // The channels are dropped after their last answers.
            let _ = ended.await;
            worker.end();
            drop(worker);
            gone.send(());
        });
    }
}

/// I/O queues of a controller on their loop.
pub(super) struct Worker {
    pub(super) event_loop: EventLoop,
    pub(super) shared: Arc<Shared>,
    pub(super) doorbells: Arc<Doorbells>,
    pub(super) channels: Vec<Rc<dyn Channel>>,
    messages: Box<dyn Messages>,
    notices: mailbox::Sender<Notice>,
    me: Weak<Worker>,
    pub(super) state: RefCell<WorkerState>,
    /// By I/O queue.
    pub(super) batches: Vec<Batch>,
    handler: Cell<Option<HandlerId>>,
    /// The loop polls: the driver need not write registers.
    polled: Cell<bool>,
    /// The driver is to be asked for register writes.
    wants_arming: Cell<bool>,
    queued: Cell<bool>,
    /// Takes no commands.
    pub(super) is_paused: Cell<bool>,
}

/// Segments and ranges that one turn takes on, at most, so that other sources run (fairness contract).
const PIECES_PER_TURN: usize = 4096;

impl Worker {
    fn start(
        event_loop: &EventLoop,
        (shared, doorbells): (Arc<Shared>, Arc<Doorbells>),
        channels: Vec<Rc<dyn Channel>>,
        messages: Box<dyn Messages>,
        notices: mailbox::Sender<Notice>,
    ) -> Rc<Self> {
        let queues = shared.stats.len();
        let (memory_version, memory) = (shared.memory.version(), shared.memory.get());
        let worker = Rc::new_cyclic(|me| Worker {
            event_loop: event_loop.clone(),
            channels,
            messages,
            notices,
            me: me.clone(),
            state: RefCell::new(WorkerState {
                memory: MemoryView::new(memory),
                memory_version,
                page: None,
                page_version: 0,
                admin_seen: None,
                submissions: Places::new(queues),
                completions: Places::new(queues),
                pages: None,
                life: 0,
                slots: Slots::new(queues),
                wants_slot: false,
                deallocations: Deallocations::new(event_loop.meter()),
                unfinished: Vec::new(),
                waiting: Vec::new(),
                first: 1,
            }),
            batches: std::iter::repeat_with(Batch::default).take(queues).collect(),
            shared,
            doorbells,
            handler: Cell::new(None),
            polled: Cell::new(false),
            wants_arming: Cell::new(false),
            queued: Cell::new(false),
            is_paused: Cell::new(false),
        });
        let events = nix::poll::PollFlags::POLLIN.bits().cast_unsigned().into();
        let fd = worker.doorbells.fd().clone();
        let id = event_loop.add_handler(fd, events, Trigger::Edge, worker.clone());
        worker.handler.set(Some(id));
        // A doorbell from before the handler was added sends no signal.
        worker.wants_arming.set(true);
        worker.finish_later();
        worker
    }

    fn end(&self) {
        if let Some(handler) = self.handler.take() {
            self.event_loop.remove_handler(handler);
        }
    }

    pub(super) fn me(&self) -> Option<Rc<Worker>> {
        self.me.upgrade()
    }

    fn obey(&self, order: Order) {
        match order {
            Order::CreateCompletion { qid, base, size, vector, done } => {
                self.create_completion(qid, CompletionQueue::new(base, size), vector);
                done.send(());
            }
            Order::CreateSubmission { qid, base, size, cqid, done } => {
                self.create_submission(qid, SubmissionQueue::new(base, size), cqid);
                done.send(());
            }
            Order::DeleteSubmission { qid, done } => {
                if let Some(submission) = self.state.borrow_mut().submissions.get(qid) {
                    submission.deleting = Some(done);
                }
                self.finish_later();
            }
            Order::DeleteCompletion { qid, done } => {
                self.state.borrow_mut().completions.set(qid, None);
                done.send(());
            }
            Order::Abort { qid, cid, answer } => {
                let is_aborted = self.state.borrow_mut().abort(self, qid, cid);
                answer.send(is_aborted);
            }
            Order::Shadow { pages, done } => {
                self.set_shadow(pages);
                // The driver may have written the shadows, and no register, meanwhile.
                self.look_again();
                done.send(());
            }
            Order::Reset(done) => {
                {
                    let mut state = self.state.borrow_mut();
                    state.life += 1;
                    state.submissions.clear();
                    state.completions.clear();
                    state.pages = None;
                    state.admin_seen = None;
                }
                self.settle(done);
            }
            Order::Settle(done) => self.settle(done),
            Order::Flush(answer) => {
                flush(self.channels.iter(), Box::new(|result| answer.send(result)))
            }
            Order::Pause(done) => {
                self.is_paused.set(true);
                let next = self.state.borrow().slots.next_number();
                self.drain(next, done);
            }
            Order::Save(answer) => answer.send(self.save()),
            Order::Resume => {
                self.is_paused.set(false);
                self.look_again();
            }
            Order::Restore(queues) => {
                self.restore(queues);
                self.look_again();
            }
            Order::WatchAdmin => {
                {
                    let mut state = self.state.borrow_mut();
                    state.refresh_memory(&self.shared);
                    state.admin_seen = Some([UNSEEN; 2]);
                }
                self.look_again();
            }
            Order::InFlight(answer) => answer.send(self.state.borrow().slots.in_flight()),
        }
    }

    fn create_completion(&self, qid: u16, mut queue: CompletionQueue, vector: Option<u16>) {
        let bell = DoorbellOf::Completion(qid);
        self.doorbells.clear(bell);
        let mut state = self.state.borrow_mut();
        state.refresh_memory(&self.shared);
        if let Some(pages) = state.pages
            && let Err(error) = queue.set_shadow(bell, pages, true, &state.memory)
        {
            self.tell(error);
        }
        if let Some(page) = &state.page {
            page.clear(bell);
        }
        state.completions.set(qid, Some(Completion::new(queue, vector)));
    }

    fn create_submission(&self, qid: u16, mut queue: SubmissionQueue, cqid: u16) {
        let bell = DoorbellOf::Submission(qid);
        self.doorbells.clear(bell);
        let mut state = self.state.borrow_mut();
        state.refresh_memory(&self.shared);
        let mut is_broken = false;
        if let Some(pages) = state.pages
            && let Err(error) = queue.set_shadow(bell, pages, true, &state.memory)
        {
            self.tell(error);
            is_broken = true;
        }
        let submission = Submission::new(queue, cqid, is_broken);
        state.submissions.set(qid, Some(submission));
        if let Some(page) = &state.page {
            page.clear(bell);
            self.look_again();
        }
    }

    fn set_shadow(&self, pages: ShadowPages) {
        let mut state = self.state.borrow_mut();
        state.refresh_memory(&self.shared);
        let WorkerState { memory, submissions, completions, pages: own, .. } = &mut *state;
        *own = Some(pages);
        for (qid, submission) in submissions.iter_mut() {
            let bell = DoorbellOf::Submission(qid);
            if let Err(error) = submission.queue.set_shadow(bell, pages, false, memory) {
                submission.is_broken = true;
                self.tell(error);
            }
        }
        for (qid, completion) in completions.iter_mut() {
            let bell = DoorbellOf::Completion(qid);
            if let Err(error) = completion.queue.set_shadow(bell, pages, false, memory) {
                self.tell(error);
            }
        }
    }

    /// Answers when all commands that have begun have ended, held back or not.
    fn settle(&self, done: oneshot::Sender<()>) {
        let (next, waits) = {
            let mut state = self.state.borrow_mut();
            // This releases the old memory.
            state.refresh_memory(&self.shared);
            (state.slots.next_number(), state.slots.oldest().is_some())
        };
        match waits {
            true => self.drain(next, done),
            false => done.send(()),
        }
    }

    /// Answers at the end of the batch in which the last command before this number has ended.
    fn drain(&self, next: u64, done: oneshot::Sender<()>) {
        self.state.borrow_mut().waiting.push((next, done));
        self.event_loop.section(|| self.channels.iter().for_each(|channel| channel.drain_begin()));
        self.finish_later();
    }

    fn save(&self) -> SavedQueues {
        let mut state = self.state.borrow_mut();
        // The registers are not handed over: with a paused controller, nothing writes them afterwards.
        state.take_registers(self);
        state.take_page(self);
        let WorkerState { submissions, completions, pages, .. } = &mut *state;
        let submission = |(qid, submission): (u16, &mut Submission)| {
            let Submission { queue, cqid, is_broken, aborted, .. } = submission;
            // A driver that moves a tail back takes entries out of the queue.
            let aborted =
                aborted.iter().copied().filter(|place| queue.is_waiting(*place)).collect();
            let (queue, cqid, is_broken) = (queue.clone(), *cqid, *is_broken);
            SavedSubmission { qid, cqid, is_broken, aborted, queue }
        };
        let completion = |(qid, completion): (u16, &mut Completion)| SavedCompletion {
            qid,
            vector: completion.vector,
            queue: completion.queue.clone(),
        };
        SavedQueues {
            submissions: submissions.iter_mut().map(submission).collect(),
            completions: completions.iter_mut().map(completion).collect(),
            pages: *pages,
        }
    }

    fn restore(&self, queues: SavedQueues) {
        let SavedQueues { submissions, completions, pages } = queues;
        let mut state = self.state.borrow_mut();
        state.refresh_memory(&self.shared);
        state.pages = pages;
        for SavedCompletion { qid, vector, queue } in completions {
            state.completions.set(qid, Some(Completion::new(queue, vector)));
        }
        for SavedSubmission { qid, cqid, is_broken, aborted, queue } in submissions {
            let submission = Submission { aborted, ..Submission::new(queue, cqid, is_broken) };
            state.submissions.set(qid, Some(submission));
        }
        // The driver may have written some already, and a turn without queues has taken note of that.
        state.take_registers(self);
    }

    /// Answers those that waited for commands that have ended.
    fn answer_settled(&self) {
        let mut ended = Vec::new();
        {
            let mut state = self.state.borrow_mut();
            if state.waiting.is_empty() {
                return;
            }
            let oldest = state.slots.oldest().unwrap_or(u64::MAX);
            while let Some(at) = state.waiting.iter().position(|(before, _)| *before <= oldest) {
                ended.push(state.waiting.swap_remove(at).1);
            }
        }
        for done in ended {
            self.channels.iter().for_each(|channel| channel.drain_end());
            done.send(());
        }
    }

    /// Tells the controller what the driver has done wrong.
    #[cold]
    pub(super) fn tell(&self, error: QueueError) {
        let notice = match error {
            QueueError::Doorbell => Notice::BadDoorbell,
            QueueError::NotMemory => Notice::Fatal,
        };
        self.notify(notice);
    }

    pub(super) fn notify(&self, notice: Notice) {
        // A controller that is gone needs to know nothing.
        let _ = self.notices.send(notice);
    }

    /// Takes commands until the queues are empty, or the turn's limit is reached (fairness contract).
    pub(super) fn take_turn(&self) {
        let Some(me) = self.me().filter(|me| !me.is_paused.get()) else { return };
        let queues = self.shared.stats.len() as u16;
        let (first, is_polled) = {
            let mut state = self.state.borrow_mut();
            if self.doorbells.were_rung() {
                state.take_registers(self);
            }
            state.take_page(self);
            state.first = state.first % queues + 1;
            (state.first, self.polled.get())
        };
        let mut pieces = 0;
        'queues: for qid in (first..=queues).chain(1..first) {
            let Ok(has_more) = self.state.borrow_mut().look(self, qid, is_polled) else { continue };
            if !has_more {
                continue;
            }
            let mut taken = 0;
            loop {
                // Not borrowed while it is begun, which may answer it.
                let step = self.state.borrow_mut().next(self, qid);
                let Some(step) = step else { break };
                taken += 1;
                pieces += self.begin(&me, step);
                if pieces >= PIECES_PER_TURN {
                    self.took(qid, taken);
                    break 'queues;
                }
            }
            self.took(qid, taken);
        }
        if pieces >= PIECES_PER_TURN {
            self.look_again();
        } else {
            self.wants_arming.set(true);
        }
        self.finish_later();
    }

    fn took(&self, qid: u16, commands: u64) {
        if let Some(stats) = self.shared.stats.get(usize::from(qid) - 1) {
            stats.taken.add(commands);
        }
    }

    pub(super) fn look_again(&self) {
        if let Some(handler) = self.handler.get() {
            self.event_loop.call_again(handler);
        }
    }

    /// Has what ends a batch done once, at the end of the section (deferral contract).
    pub(super) fn finish_later(&self) {
        if !self.queued.get()
            && let Some(me) = self.me()
        {
            self.event_loop.defer(&(me as Rc<dyn DeferredCall>));
        }
    }

    /// Requests signals for new commands. Returns whether there are some already.
    fn arm(&self) -> bool {
        if self.is_paused.get() {
            return false;
        }
        let is_rung = !self.doorbells.fall_asleep();
        self.state.borrow_mut().arm(self) | is_rung
    }
}

impl DeferredCall for Worker {
    /// Ends a batch: interrupts, counters, deletions and waits.
    fn run(&self) {
        let (mut wants_slot, mut vectors) = (false, [0; 2]);
        {
            let mut state = self.state.borrow_mut();
            let WorkerState { submissions, completions, slots, wants_slot: waits, .. } =
                &mut *state;
            if *waits && slots.has_room() {
                (wants_slot, *waits) = (true, false);
            }
            for (_, completion) in completions.iter_mut() {
                if std::mem::take(&mut completion.has_posts)
                    && let Some(vector) = completion.vector
                    && let Some(word) = vectors.get_mut(usize::from(vector) / 64)
                {
                    *word |= 1u64 << (vector % 64);
                }
            }
            let mut deleted = 0;
            for (qid, submission) in submissions.iter_mut() {
                if std::mem::take(&mut submission.has_answers) {
                    let completion = completions.get(submission.cqid);
                    let is_told = completion.is_some_and(|queue| queue.vector.is_some());
                    let at = usize::from(qid) - 1;
                    if let (Some(batch), Some(stats)) =
                        (self.batches.get(at), self.shared.stats.get(at))
                    {
                        batch.publish(stats, is_told);
                    }
                }
                if submission.in_flight == 0 && submission.deleting.is_some() {
                    deleted = qid;
                }
            }
            // One at a time, as the controller deletes them.
            if let Some(submission) = submissions.get(deleted)
                && let Some(done) = submission.deleting.take()
            {
                submissions.set(deleted, None);
                done.send(());
            }
        }
        self.go_on();
        for (word, base) in vectors.iter_mut().zip([0, 64]) {
            while *word != 0 {
                self.messages.send(base + word.trailing_zeros() as u16);
                *word &= *word - 1;
            }
        }
        self.answer_settled();
        let has_more = self.wants_arming.replace(false) && !self.polled.get() && self.arm();
        if wants_slot || has_more {
            self.look_again();
        }
    }

    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}

impl Handler for Worker {
    fn ready(&self, _events: u32) -> Progress {
        if let Some(me) = self.me() {
            self.deallocate_more(&me, true);
        }
        match self.shared.page {
            None => self.take_turn(),
            Some(_) => self.take_turn_of_page(),
        }
        Progress::Done
    }

    fn can_poll(&self) -> bool {
        true
    }

    fn poll(&self) -> bool {
        !self.is_paused.get() && (self.doorbells.is_rung() || self.state.borrow_mut().is_rung())
    }

    fn poll_begin(&self) {
        self.polled.set(true);
        self.doorbells.stay_awake();
    }

    fn poll_end(&self) {
        self.polled.set(false);
        // The loop asks `poll` next, so what raced is found.
        let _ = self.arm();
    }
}
