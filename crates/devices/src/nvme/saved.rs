//! The state of a paused controller, on its way to another process.
//!
//! [`Restored`] is what the words say, after validation: another process wrote them.

use super::admin::{Admin, Queues};
use super::bits::{
    CSTS_CFS, CSTS_RDY, CSTS_SHST_COMPLETE, Configuration, DoorbellOf, MAX_ADMIN_ENTRIES,
    MAX_ENTRIES,
};
use super::events::Events;
use super::features::Features;
use super::queue::{CompletionQueue, ShadowPages, SubmissionQueue};
use crate::saved::{Invalid, Reader, Words};

/// Changes with the meaning of the words. Other numbers are refused.
const FORMAT: u64 = 2;

/// An I/O submission queue.
#[derive(Debug, Clone)]
pub(crate) struct SavedSubmission {
    pub(crate) qid: u16,
    pub(crate) cqid: u16,
    pub(crate) is_broken: bool,
    /// Places of entries that were aborted.
    pub(crate) aborted: Vec<u32>,
    pub(crate) queue: SubmissionQueue,
}

/// An I/O completion queue.
#[derive(Debug, Clone)]
pub(crate) struct SavedCompletion {
    pub(crate) qid: u16,
    pub(crate) vector: Option<u16>,
    pub(crate) queue: CompletionQueue,
}

/// I/O queues, without a command in flight: those of a worker, or of all.
#[derive(Debug, Clone, Default)]
pub(crate) struct SavedQueues {
    pub(crate) submissions: Vec<SavedSubmission>,
    pub(crate) completions: Vec<SavedCompletion>,
    pub(crate) pages: Option<ShadowPages>,
}

impl SavedQueues {
    /// The queues of all workers.
    pub(super) fn joined(parts: impl IntoIterator<Item = SavedQueues>) -> Self {
        let mut all = SavedQueues::default();
        for SavedQueues { submissions, completions, pages } in parts {
            all.submissions.extend(submissions);
            all.completions.extend(completions);
            // All workers have the same pages.
            all.pages = pages;
        }
        all
    }

    /// The queues of each of so many workers. `owner`: which one has a completion queue and its submission queues.
    pub(super) fn divided(self, workers: usize, owner: impl Fn(u16) -> usize) -> Vec<Self> {
        let SavedQueues { submissions, completions, pages } = self;
        let part = || SavedQueues { pages, ..SavedQueues::default() };
        let mut parts: Vec<_> = std::iter::repeat_with(part).take(workers).collect();
        for completion in completions {
            if let Some(part) = parts.get_mut(owner(completion.qid)) {
                part.completions.push(completion);
            }
        }
        for submission in submissions {
            if let Some(part) = parts.get_mut(owner(submission.cqid)) {
                part.submissions.push(submission);
            }
        }
        parts
    }
}

/// The valid state of a controller that another process has paused.
#[derive(Debug)]
pub struct Restored {
    pub(super) cc: Configuration,
    pub(super) csts: u32,
    pub(super) aqa: u32,
    pub(super) asq: u64,
    pub(super) acq: u64,
    pub(super) masked: u32,
    pub(super) write_cache: bool,
    pub(super) admin: Option<Admin>,
    pub(super) features: Features,
    pub(super) events: Events,
    pub(super) changed: Vec<u32>,
    pub(super) queues: Queues,
    pub(super) io: SavedQueues,
}

/// The bytes of a controller and its I/O queues.
pub(super) fn bytes(put: impl FnOnce(&mut Words), io: &SavedQueues) -> Vec<u8> {
    let mut words = Words::new(FORMAT);
    put(&mut words);
    let pages = io.pages.map(|pages| [pages.doorbells, pages.events]);
    words.list(pages.into_iter().flatten().collect::<Vec<_>>().into_iter(), Words::put);
    words.list(io.completions.iter(), |words, saved| {
        words.put(saved.qid);
        // 0: none.
        words.put(saved.vector.map_or(0, |vector| u64::from(vector) + 1));
        saved.queue.save(words);
    });
    words.list(io.submissions.iter(), |words, saved| {
        words.put(saved.qid);
        words.put(saved.cqid);
        words.put(saved.is_broken);
        saved.queue.save(words);
        words.list(saved.aborted.iter(), |words, place| words.put(*place));
    });
    words.into_bytes()
}

/// The number of an I/O queue.
fn qid(words: &mut Reader<'_>, num_queues: u16) -> Result<u16, Invalid> {
    let qid = words.take()?;
    match (1..=num_queues).contains(&qid) {
        true => Ok(qid),
        false => Err(Invalid("a queue's number is out of range")),
    }
}

impl Restored {
    /// Parses the state of a controller with this number of I/O queues and of namespaces.
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub(super) fn parse(bytes: &[u8], num_queues: u16, namespaces: usize) -> Result<Self, Invalid> {
        let mut words = Reader::new(bytes, FORMAT)?;
        let value: u32 = words.take()?;
        let cc = Configuration::new(value);
        let csts: u32 = words.take()?;
        if cc.0 != value || csts & !(CSTS_RDY | CSTS_CFS | CSTS_SHST_COMPLETE) != 0 {
            return Err(Invalid("reserved bits of a register are set"));
        }
        let (aqa, asq, acq) = (words.take()?, words.take()?, words.take()?);
        let (masked, write_cache) = (words.take()?, words.flag()?);
        let admin = match words.flag()? {
            true => Some(Admin::restored(
                SubmissionQueue::restored(&mut words, MAX_ADMIN_ENTRIES)?,
                CompletionQueue::restored(&mut words, MAX_ADMIN_ENTRIES)?,
            )),
            false => None,
        };
        if admin.is_some() != (csts & CSTS_RDY != 0) {
            return Err(Invalid("it is ready without an admin queue, or not ready with one"));
        }
        // The driver could not reset such a controller.
        if admin.is_some() && !cc.is_enabled() {
            return Err(Invalid("it is ready without being enabled"));
        }
        let features = Features::restored(&mut words)?;
        let events = Events::restored(&mut words)?;
        // They would be those of the driver's next life.
        if admin.is_none() && (features != Features::default() || events.has_requests()) {
            return Err(Invalid("it has features or requests for events without an admin queue"));
        }
        let changed: Vec<u32> = words.list(namespaces, Reader::take)?;
        if changed.iter().any(|nsid| !(1..=namespaces).contains(&(*nsid as usize))) {
            return Err(Invalid("a namespace does not exist"));
        }
        let (queues, io) = io_queues(&mut words, num_queues)?;
        words.end()?;
        if admin.is_none() && !(io.submissions.is_empty() && io.completions.is_empty()) {
            return Err(Invalid("it has I/O queues without an admin queue"));
        }
        Ok(Restored {
            cc,
            csts,
            aqa,
            asq,
            acq,
            masked,
            write_cache,
            admin,
            features,
            events,
            changed,
            queues,
            io,
        })
    }
}

fn io_queues(words: &mut Reader<'_>, num_queues: u16) -> Result<(Queues, SavedQueues), Invalid> {
    let mut queues = Queues::new(num_queues);
    let pages = match words.list(2, Reader::take)?[..] {
        [] => None,
        [doorbells, events] => ShadowPages::new(doorbells, events)
            .map(Some)
            .ok_or(Invalid("pages of shadow doorbells are misaligned, or beyond all addresses"))?,
        _ => return Err(Invalid("only one page of shadow doorbells is there")),
    };
    let most = usize::from(num_queues);
    let completions = words.list(most, |words| {
        let (qid, vector) = (qid(words, num_queues)?, words.take::<u16>()?.checked_sub(1));
        if vector.is_some_and(|vector| vector > num_queues) {
            return Err(Invalid("an interrupt vector does not exist"));
        }
        let mut queue = CompletionQueue::restored(words, MAX_ENTRIES)?;
        queue.shadow_is(pages.map(|pages| (DoorbellOf::Completion(qid), pages)));
        Ok(SavedCompletion { qid, vector, queue })
    })?;
    for saved in &completions {
        queues.add_completion(saved.qid).map_err(|_| Invalid("a queue is there twice"))?;
    }
    let submissions = words.list(most, |words| {
        let (qid, cqid) = (qid(words, num_queues)?, words.take()?);
        let is_broken = words.flag()?;
        let mut queue = SubmissionQueue::restored(words, MAX_ENTRIES)?;
        queue.shadow_is(pages.map(|pages| (DoorbellOf::Submission(qid), pages)));
        let aborted: Vec<u32> = words.list(MAX_ENTRIES as usize, Reader::take)?;
        if !aborted.iter().all(|place| queue.is_waiting(*place)) {
            return Err(Invalid("a command was aborted that does not wait"));
        }
        Ok(SavedSubmission { qid, cqid, is_broken, aborted, queue })
    })?;
    for saved in &submissions {
        queues
            .add_submission(saved.qid, saved.cqid)
            .map_err(|_| Invalid("a queue is there twice, or has no completion queue"))?;
    }
    Ok((queues, SavedQueues { submissions, completions, pages }))
}
