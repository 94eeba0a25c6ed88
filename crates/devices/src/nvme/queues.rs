//! The I/O queues that a worker has, and what is preallocated for their commands.

use std::rc::Rc;

use event_loop::oneshot;
use guest_memory::MemoryView;

use super::bits::DoorbellOf;
use super::deallocate::Deallocations;
use super::doorbell_page::PageView;
use super::queue::{CompletionQueue, QueueError, ShadowPages, SubmissionQueue};
use super::requests::{Piece, Slots};
use super::shared::Shared;
use super::worker::Worker;

/// No value of a doorbell was taken from the page yet. No queue has so many entries.
pub(super) const UNSEEN: u32 = u32::MAX;

/// A submission queue and its commands.
pub(super) struct Submission {
    pub(super) queue: SubmissionQueue,
    pub(super) cqid: u16,
    pub(super) in_flight: u32,
    /// The last value of its doorbell in the page of doorbells, or [`UNSEEN`].
    pub(super) seen: u32,
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
            seen: UNSEEN,
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
    /// As of [`Submission::seen`].
    seen: u32,
    pub(super) vector: Option<u16>,
    /// Entries were posted in this batch.
    pub(super) has_posts: bool,
    /// A command waits for the driver to take entries.
    pub(super) is_full: bool,
}

impl Completion {
    /// A queue without posts.
    pub(super) fn new(queue: CompletionQueue, vector: Option<u16>) -> Self {
        Completion { queue, seen: UNSEEN, vector, has_posts: false, is_full: false }
    }
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

/// The admin queue's doorbells.
pub(super) const ADMIN_BELLS: [DoorbellOf; 2] =
    [DoorbellOf::Submission(0), DoorbellOf::Completion(0)];

/// The queues, and preallocated memory for their commands.
pub(super) struct WorkerState {
    pub(super) memory: Rc<MemoryView>,
    pub(super) memory_version: u64,
    /// The page of doorbells, if they are mapped.
    pub(super) page: Option<PageView>,
    pub(super) page_version: u64,
    /// The last values of the admin queue's doorbells, if this worker watches them.
    pub(super) admin_seen: Option<[u32; 2]>,
    pub(super) submissions: Places<Submission>,
    pub(super) completions: Places<Completion>,
    pub(super) pages: Option<ShadowPages>,
    /// Counts resets. Commands of earlier lives get no completion.
    pub(super) life: u64,
    pub(super) slots: Slots,
    /// A command waits for a slot.
    pub(super) wants_slot: bool,
    /// Commands with ranges that are to be discarded.
    pub(super) deallocations: Deallocations,
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
        if let Some(page) = &shared.page {
            let version = page.version();
            if version != self.page_version || self.page.is_none() {
                self.page = Some(PageView::new(page.get()));
                self.page_version = version;
            }
        }
    }

    /// Takes new values from the page of doorbells.
    pub(super) fn take_page(&mut self, worker: &Worker) {
        let WorkerState { page, submissions, completions, .. } = self;
        let Some(page) = page else { return };
        for (qid, submission) in submissions.iter_mut() {
            let tail = page.value(DoorbellOf::Submission(qid));
            if std::mem::replace(&mut submission.seen, tail) != tail
                && let Err(error) = submission.queue.set_tail(tail)
            {
                worker.tell(error);
            }
        }
        for (qid, completion) in completions.iter_mut() {
            let head = page.value(DoorbellOf::Completion(qid));
            if std::mem::replace(&mut completion.seen, head) != head
                && let Err(error) = completion.queue.set_head(head)
            {
                worker.tell(error);
            }
        }
    }

    /// Whether the page of doorbells is to be read without end.
    pub(super) fn watches_page(&mut self) -> bool {
        self.page.is_some()
            && (self.admin_seen.is_some() || self.submissions.iter_mut().next().is_some())
    }

    /// Whether the admin queue has new values in the page of doorbells.
    pub(super) fn is_admin_rung(&mut self) -> bool {
        let (Some(page), Some(seen)) = (&self.page, &mut self.admin_seen) else { return false };
        let values = ADMIN_BELLS.map(|bell| page.value(bell));
        std::mem::replace(seen, values) != values
    }

    /// Whether a turn would do something, as far as the page of doorbells and the queues tell.
    pub(super) fn has_commands(&mut self) -> bool {
        self.is_rung()
            || self.submissions.iter_mut().any(|(_, it)| it.is_taking() && !it.queue.is_empty())
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
        let WorkerState { memory, page, submissions, completions, .. } = self;
        let is_new = |bell, seen| page.as_ref().is_some_and(|page| page.value(bell) != seen);
        submissions.iter_mut().any(|(qid, it)| {
            it.is_taking()
                && (it.queue.is_rung(memory) || is_new(DoorbellOf::Submission(qid), it.seen))
        }) || completions.iter_mut().any(|(qid, it)| {
            it.is_full && (it.queue.is_rung(memory) || is_new(DoorbellOf::Completion(qid), it.seen))
        })
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
