//! The I/O queues that a worker has, and what is preallocated for their commands.

use std::rc::Rc;

use event_loop::oneshot;
use guest_memory::MemoryView;

use super::bits::DoorbellOf;
use super::queue::{CompletionQueue, QueueError, ShadowPages, SubmissionQueue};
use super::requests::{Piece, Slots};
use super::shared::Shared;
use super::worker::Worker;

/// A submission queue and its commands.
pub(super) struct Submission {
    pub(super) queue: SubmissionQueue,
    pub(super) cqid: u16,
    pub(super) in_flight: u32,
    /// The driver broke the rules: no more is taken.
    pub(super) is_broken: bool,
    /// Commands were answered in this batch.
    pub(super) has_answers: bool,
    /// Places of entries that the driver has aborted, and that were not taken yet.
    pub(super) aborted: Vec<u32>,
    /// The queue is being deleted: takes no more commands, and answers here when it is idle.
    pub(super) deleting: Option<oneshot::Sender<()>>,
}

impl Submission {
    /// A queue without commands.
    pub(super) fn new(queue: SubmissionQueue, cqid: u16, is_broken: bool) -> Self {
        Submission {
            queue,
            cqid,
            in_flight: 0,
            is_broken,
            has_answers: false,
            aborted: Vec::new(),
            deleting: None,
        }
    }

    /// Whether the entry at this place was aborted. Its place may be of another entry afterwards.
    #[inline]
    pub(super) fn was_aborted(&mut self, place: u32) -> bool {
        !self.aborted.is_empty() && {
            let before = self.aborted.len();
            self.aborted.retain(|aborted| *aborted != place);
            self.aborted.len() != before
        }
    }

    pub(super) fn is_taking(&self) -> bool {
        !self.is_broken && self.deleting.is_none()
    }
}

/// A completion queue.
pub(super) struct Completion {
    pub(super) queue: CompletionQueue,
    pub(super) vector: Option<u16>,
    /// Entries were posted in this batch.
    pub(super) has_posts: bool,
    /// A command waits for the driver to take entries.
    pub(super) is_full: bool,
}

/// A place for the queue of each number, from 1 on.
pub(super) struct Places<T>(Vec<Option<T>>);

impl<T> Places<T> {
    pub(super) fn new(queues: usize) -> Self {
        Places(std::iter::repeat_with(|| None).take(queues).collect())
    }

    #[inline]
    pub(super) fn get(&mut self, qid: u16) -> Option<&mut T> {
        self.0.get_mut(usize::from(qid).checked_sub(1)?)?.as_mut()
    }

    pub(super) fn set(&mut self, qid: u16, value: Option<T>) {
        let place = usize::from(qid).checked_sub(1).and_then(|at| self.0.get_mut(at));
        if let Some(place) = place {
            *place = value;
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.fill_with(|| None);
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut T)> {
        let numbered = (1..).zip(&mut self.0);
        numbered.filter_map(|(qid, place)| Some((qid, place.as_mut()?)))
    }
}

/// The queues, and preallocated memory for their commands.
pub(super) struct WorkerState {
    pub(super) memory: Rc<MemoryView>,
    pub(super) memory_version: u64,
    pub(super) submissions: Places<Submission>,
    pub(super) completions: Places<Completion>,
    pub(super) pages: Option<ShadowPages>,
    /// Counts resets. Commands of earlier lives get no completion.
    pub(super) life: u64,
    pub(super) slots: Slots,
    /// A command waits for a slot.
    pub(super) wants_slot: bool,
    /// Commands of which more is to be read.
    pub(super) unfinished: Vec<Piece>,
    /// Waits for the end of all commands before this number.
    pub(super) waiting: Vec<(u64, oneshot::Sender<()>)>,
    /// The queue that a turn begins with.
    pub(super) first: u16,
}

impl WorkerState {
    /// Goes on in the memory that the controller has now.
    #[inline]
    pub(super) fn refresh_memory(&mut self, shared: &Shared) {
        let version = shared.memory.version();
        if version != self.memory_version {
            self.memory = MemoryView::new(shared.memory.get());
            self.memory_version = version;
        }
    }

    pub(super) fn take_registers(&mut self, worker: &Worker) {
        let doorbells = &worker.doorbells;
        for (qid, submission) in self.submissions.iter_mut() {
            if let Some(tail) = doorbells.take(DoorbellOf::Submission(qid))
                && let Err(error) = submission.queue.set_tail(tail)
            {
                worker.tell(error);
            }
        }
        for (qid, completion) in self.completions.iter_mut() {
            if let Some(head) = doorbells.take(DoorbellOf::Completion(qid))
                && let Err(error) = completion.queue.set_head(head)
            {
                worker.tell(error);
            }
        }
    }

    /// Has a command answered as aborted when its turn comes. `false`: it was taken, or is not there.
    pub(super) fn abort(&mut self, worker: &Worker, qid: u16, cid: u16) -> bool {
        self.take_registers(worker);
        self.refresh_memory(&worker.shared);
        let Some(submission) = self.submissions.get(qid).filter(|queue| queue.is_taking()) else {
            return false;
        };
        let looked = submission.queue.refresh(&self.memory);
        let found = looked.and_then(|()| submission.queue.place_of(cid, &self.memory));
        match found {
            Ok(Some(place)) => {
                if !submission.aborted.contains(&place) {
                    submission.aborted.push(place);
                }
                worker.look_again();
                true
            }
            Ok(None) => {
                worker.look_again();
                false
            }
            Err(error) => {
                self.break_queue(worker, qid, error);
                false
            }
        }
    }

    /// Finds out whether a queue has commands.
    #[inline]
    pub(super) fn look(
        &mut self,
        worker: &Worker,
        qid: u16,
        is_polled: bool,
    ) -> Result<bool, QueueError> {
        let Some(submission) = self.submissions.get(qid).filter(|queue| queue.is_taking()) else {
            return Ok(false);
        };
        let looked = submission.queue.refresh(&self.memory);
        let looked = match is_polled {
            true => looked.and_then(|()| submission.queue.disarm(&self.memory)),
            false => looked,
        };
        if let Err(error) = looked {
            self.break_queue(worker, qid, error);
            return Err(error);
        }
        Ok(!submission.queue.is_empty())
    }

    /// Takes nothing from a queue any more.
    #[cold]
    pub(super) fn break_queue(&mut self, worker: &Worker, qid: u16, error: QueueError) {
        if let Some(submission) = self.submissions.get(qid) {
            submission.is_broken = true;
            // Nobody waits for its entries any more; others that do look again.
            if let Some(completion) = self.completions.get(submission.cqid) {
                completion.is_full = false;
            }
        }
        worker.tell(error);
    }

    /// Whether a shadow has a new value that matters.
    #[inline]
    pub(super) fn is_rung(&mut self) -> bool {
        let WorkerState { memory, submissions, completions, .. } = self;
        let mut submissions = submissions.iter_mut().map(|(_, submission)| submission);
        let mut completions = completions.iter_mut().map(|(_, completion)| completion);
        submissions.any(|it| it.is_taking() && it.queue.is_rung(memory))
            || completions.any(|it| it.is_full && it.queue.is_rung(memory))
    }

    /// Has the driver write registers for new commands. Returns whether there are some already.
    pub(super) fn arm(&mut self, worker: &Worker) -> bool {
        let WorkerState { memory, submissions, completions, .. } = self;
        let mut is_rung = false;
        for (_, submission) in submissions.iter_mut().filter(|(_, it)| it.is_taking()) {
            match submission.queue.arm(memory) {
                Ok(rung) => is_rung |= rung,
                Err(error) => {
                    submission.is_broken = true;
                    worker.tell(error);
                }
            }
        }
        for (_, completion) in completions.iter_mut().filter(|(_, it)| it.is_full) {
            match completion.queue.arm(memory) {
                Ok(rung) => is_rung |= rung,
                Err(error) => {
                    completion.is_full = false;
                    worker.tell(error);
                }
            }
        }
        is_rung
    }
}
