//! Submission and completion queues in guest memory (section 4.1), for the admin queue and for I/O queues.

use std::sync::atomic::{Ordering, fence};

use guest_memory::{AccessError, MemoryView};
use queue::pause::pause;

use super::bits::{COMPLETION, DoorbellOf, PAGE, SUBMISSION};
use super::command::Entry;
use super::status::Answer;
use crate::saved::{Invalid, Reader, Words};

/// Why a queue cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueError {
    /// Its entries, or its doorbell's shadow, are not memory.
    NotMemory,
    /// A doorbell has a value that is beyond the queue's end.
    Doorbell,
}

impl From<AccessError> for QueueError {
    fn from(_: AccessError) -> Self {
        QueueError::NotMemory
    }
}

/// The pages of Doorbell Buffer Config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShadowPages {
    /// The driver writes doorbells here.
    pub(crate) doorbells: u64,
    /// The controller writes here when a doorbell's register is to be written as well.
    pub(crate) events: u64,
}

impl ShadowPages {
    /// Pages at these addresses. `None`: misaligned, or beyond all addresses.
    pub(crate) fn new(doorbells: u64, events: u64) -> Option<Self> {
        let is_page = |at: u64| at.is_multiple_of(PAGE) && at.checked_add(PAGE).is_some();
        (is_page(doorbells) && is_page(events)).then_some(ShadowPages { doorbells, events })
    }
}

/// Where a doorbell's shadow and event index are.
#[derive(Debug, Clone, Copy)]
struct Shadow {
    doorbell: u64,
    event: u64,
}

impl Shadow {
    fn of(doorbell: DoorbellOf, pages: ShadowPages) -> Self {
        let at = doorbell.offset();
        Shadow { doorbell: pages.doorbells + at, event: pages.events + at }
    }

    /// Sets the value whose passing the driver tells by the register.
    fn set_event(&self, memory: &MemoryView, index: u32) -> Result<(), QueueError> {
        Ok(memory.store_release(self.event, index)?)
    }
}

/// The controller's side of a submission queue.
#[derive(Debug, Clone)]
pub(crate) struct SubmissionQueue {
    base: u64,
    size: u32,
    head: u32,
    tail: u32,
    shadow: Option<Shadow>,
    /// The event index that the driver sees.
    event: u32,
}

impl SubmissionQueue {
    /// A queue of `size` entries at `base`.
    pub(crate) fn new(base: u64, size: u32) -> Self {
        SubmissionQueue { base, size, head: 0, tail: 0, shadow: None, event: 0 }
    }

    /// Writes its state.
    pub(super) fn save(&self, words: &mut Words) {
        words.put(self.base);
        for word in [self.size, self.head, self.tail, self.event] {
            words.put(word);
        }
    }

    /// Reads what [`save`](Self::save) wrote.
    ///
    /// # Errors
    ///
    /// The queue is not at a page, does not exist in memory of any size, or has more than `most` entries.
    pub(super) fn restored(words: &mut Reader<'_>, most: u32) -> Result<Self, Invalid> {
        let (base, size): (u64, u32) = (words.take()?, words.take()?);
        let (head, tail, event): (u32, u32, u32) = (words.take()?, words.take()?, words.take()?);
        let fits = (2..=most).contains(&size)
            && base.is_multiple_of(PAGE)
            && base.checked_add(u64::from(size) * SUBMISSION).is_some()
            && [head, tail, event].iter().all(|at| *at < size);
        if !fits {
            return Err(Invalid("a queue's size, position or address is out of range"));
        }
        Ok(SubmissionQueue { base, size, head, tail, shadow: None, event })
    }

    /// Sets where the driver writes the doorbell already.
    pub(super) fn shadow_is(&mut self, at: Option<(DoorbellOf, ShadowPages)>) {
        self.shadow = at.map(|(bell, pages)| Shadow::of(bell, pages));
    }

    /// SQHD.
    pub(crate) fn head(&self) -> u16 {
        self.head as u16
    }

    /// Whether there are entries that were not popped, as far as is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Takes a value of the doorbell's register. With a shadow, the register only wakes.
    ///
    /// # Errors
    ///
    /// [`QueueError::Doorbell`].
    pub(crate) fn set_tail(&mut self, tail: u32) -> Result<(), QueueError> {
        if self.shadow.is_some() {
            return Ok(());
        }
        self.move_tail(tail)
    }

    fn move_tail(&mut self, tail: u32) -> Result<(), QueueError> {
        if tail >= self.size {
            return Err(QueueError::Doorbell);
        }
        self.tail = tail;
        Ok(())
    }

    /// Has the driver write the doorbell to memory from now on. `is_new`: what is there is of an earlier queue.
    pub(crate) fn set_shadow(
        &mut self,
        doorbell: DoorbellOf,
        pages: ShadowPages,
        is_new: bool,
        memory: &MemoryView,
    ) -> Result<(), QueueError> {
        let shadow = Shadow::of(doorbell, pages);
        match memory.load_acquire(shadow.doorbell)? {
            // Linux writes the shadow from the queue's creation on, before it tells where the shadow is.
            tail if !is_new && tail != 0 => self.move_tail(tail)?,
            // Other drivers write it with the next command.
            _ => memory.store_release(shadow.doorbell, self.tail)?,
        }
        shadow.set_event(memory, self.tail)?;
        (self.event, self.shadow) = (self.tail, Some(shadow));
        Ok(())
    }

    /// Whether the shadow has another value than is known. One load.
    #[inline]
    pub(crate) fn is_rung(&self, memory: &MemoryView) -> bool {
        self.shadow.is_some_and(|shadow| {
            // What cannot be read is found when it is taken.
            memory.load_acquire(shadow.doorbell) != Ok(self.tail)
        })
    }

    /// Takes the shadow's value, if there is a shadow.
    #[inline]
    pub(crate) fn refresh(&mut self, memory: &MemoryView) -> Result<(), QueueError> {
        match self.shadow {
            Some(shadow) => self.move_tail(memory.load_acquire(shadow.doorbell)?),
            None => Ok(()),
        }
    }

    /// Has the driver write the register with its next command. Returns whether it has submitted one meanwhile.
    pub(crate) fn arm(&mut self, memory: &MemoryView) -> Result<bool, QueueError> {
        let Some(shadow) = self.shadow else { return Ok(false) };
        if self.event != self.tail {
            pause();
            shadow.set_event(memory, self.tail)?;
            self.event = self.tail;
        }
        pause();
        // The driver writes the shadow and then reads the event index: one of the two sees the other.
        fence(Ordering::SeqCst);
        Ok(self.is_rung(memory))
    }

    /// Has the driver not write the register for at least half a round of the queue.
    pub(crate) fn disarm(&mut self, memory: &MemoryView) -> Result<(), QueueError> {
        let Some(shadow) = self.shadow else { return Ok(()) };
        let ahead = (self.event + self.size - self.tail) % self.size;
        if ahead < self.size / 2 {
            self.event = (self.tail + self.size - 1) % self.size;
            shadow.set_event(memory, self.event)?;
        }
        Ok(())
    }

    /// The place of the next entry.
    pub(crate) fn place(&self) -> u32 {
        self.head
    }

    /// Whether an entry at this place was not popped.
    pub(crate) fn is_waiting(&self, place: u32) -> bool {
        let from_head = |at: u32| (at + self.size - self.head) % self.size;
        place < self.size && from_head(place) < from_head(self.tail)
    }

    /// The place of the entry with this CID, among those that were not popped.
    #[cold]
    pub(crate) fn place_of(
        &self,
        cid: u16,
        memory: &MemoryView,
    ) -> Result<Option<u32>, QueueError> {
        let mut at = self.head;
        while at != self.tail {
            let head = memory.read_u32(self.base + u64::from(at) * SUBMISSION)?;
            if head >> 16 == u32::from(cid) {
                return Ok(Some(at));
            }
            at = (at + 1) % self.size;
        }
        Ok(None)
    }

    /// Pops the next entry.
    #[inline]
    pub(crate) fn pop(&mut self, memory: &MemoryView) -> Result<Option<Entry>, QueueError> {
        if self.is_empty() {
            return Ok(None);
        }
        let at = self.base + u64::from(self.head) * SUBMISSION;
        let bytes = memory.read_array(at)?;
        self.head = (self.head + 1) % self.size;
        Ok(Some(Entry::parse(&bytes)))
    }
}

/// The controller's side of a completion queue.
#[derive(Debug, Clone)]
pub(crate) struct CompletionQueue {
    base: u64,
    size: u32,
    head: u32,
    tail: u32,
    phase: bool,
    /// Entries that commands under way will need.
    reserved: u32,
    shadow: Option<Shadow>,
}

impl CompletionQueue {
    /// A queue of `size` entries at `base`.
    pub(crate) fn new(base: u64, size: u32) -> Self {
        CompletionQueue { base, size, head: 0, tail: 0, phase: true, reserved: 0, shadow: None }
    }

    /// Writes its state. No entry is reserved.
    pub(super) fn save(&self, words: &mut Words) {
        words.put(self.base);
        for word in [self.size, self.head, self.tail] {
            words.put(word);
        }
        words.put(self.phase);
    }

    /// As of [`SubmissionQueue::restored`].
    pub(super) fn restored(words: &mut Reader<'_>, most: u32) -> Result<Self, Invalid> {
        let (base, size): (u64, u32) = (words.take()?, words.take()?);
        let (head, tail, phase): (u32, u32, bool) = (words.take()?, words.take()?, words.flag()?);
        let fits = (2..=most).contains(&size)
            && base.is_multiple_of(PAGE)
            && base.checked_add(u64::from(size) * COMPLETION).is_some()
            && [head, tail].iter().all(|at| *at < size);
        if !fits {
            return Err(Invalid("a queue's size, position or address is out of range"));
        }
        Ok(CompletionQueue { base, size, head, tail, phase, reserved: 0, shadow: None })
    }

    /// As of [`SubmissionQueue::shadow_is`].
    pub(super) fn shadow_is(&mut self, at: Option<(DoorbellOf, ShadowPages)>) {
        self.shadow = at.map(|(bell, pages)| Shadow::of(bell, pages));
    }

    /// Entries that the driver has not taken.
    fn filled(&self) -> u32 {
        (self.tail + self.size - self.head) % self.size
    }

    /// Takes a value of the doorbell's register. With a shadow, the register only wakes.
    ///
    /// # Errors
    ///
    /// [`QueueError::Doorbell`].
    pub(crate) fn set_head(&mut self, head: u32) -> Result<(), QueueError> {
        if self.shadow.is_some() {
            return Ok(());
        }
        self.move_head(head)
    }

    fn move_head(&mut self, head: u32) -> Result<(), QueueError> {
        if head >= self.size {
            return Err(QueueError::Doorbell);
        }
        // A driver takes no more entries than there are.
        let taken = (head + self.size - self.head) % self.size;
        if taken > self.filled() {
            return Err(QueueError::Doorbell);
        }
        self.head = head;
        Ok(())
    }

    /// As of [`SubmissionQueue::set_shadow`].
    pub(crate) fn set_shadow(
        &mut self,
        doorbell: DoorbellOf,
        pages: ShadowPages,
        is_new: bool,
        memory: &MemoryView,
    ) -> Result<(), QueueError> {
        let shadow = Shadow::of(doorbell, pages);
        match memory.load_acquire(shadow.doorbell)? {
            head if !is_new && head != 0 => self.move_head(head)?,
            _ => memory.store_release(shadow.doorbell, self.head)?,
        }
        self.shadow = Some(shadow);
        self.disarm(memory)
    }

    /// Reserves an entry for a command. `false`: there is none.
    #[inline]
    pub(crate) fn reserve(&mut self, memory: &MemoryView) -> Result<bool, QueueError> {
        if self.filled() + self.reserved + 1 >= self.size {
            let Some(shadow) = self.shadow else { return Ok(false) };
            self.move_head(memory.load_acquire(shadow.doorbell)?)?;
            self.disarm(memory)?;
            if self.filled() + self.reserved + 1 >= self.size {
                return Ok(false);
            }
        }
        self.reserved += 1;
        Ok(true)
    }

    /// A reservation is not needed.
    pub(crate) fn unreserve(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
    }

    /// Whether the shadow has another value than is known.
    pub(crate) fn is_rung(&self, memory: &MemoryView) -> bool {
        self.shadow.is_some_and(|shadow| memory.load_acquire(shadow.doorbell) != Ok(self.head))
    }

    /// Has the driver write the register when it takes the next entry. Returns whether it has taken some meanwhile.
    pub(crate) fn arm(&mut self, memory: &MemoryView) -> Result<bool, QueueError> {
        let Some(shadow) = self.shadow else { return Ok(false) };
        pause();
        shadow.set_event(memory, self.head)?;
        pause();
        fence(Ordering::SeqCst);
        Ok(self.is_rung(memory))
    }

    /// Has the driver not write the register: it passes this index after a whole round, before which the queue is
    /// full and the head is read.
    fn disarm(&mut self, memory: &MemoryView) -> Result<(), QueueError> {
        match self.shadow {
            Some(shadow) => shadow.set_event(memory, (self.head + self.size - 1) % self.size),
            None => Ok(()),
        }
    }

    /// Posts an entry that was reserved.
    #[inline]
    pub(crate) fn post(
        &mut self,
        memory: &MemoryView,
        answer: Answer,
        from: (u16, u16),
        cid: u16,
    ) -> Result<(), QueueError> {
        let (sqid, head) = from;
        self.unreserve();
        let at = self.base + u64::from(self.tail) * COMPLETION;
        let word = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        let mut bytes = [0; 12];
        let words = [answer.result, 0, word(head, sqid)];
        for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = u32::to_le_bytes(word);
        }
        memory.write_bytes(at, &bytes)?;
        pause();
        // The phase tag publishes the entry.
        memory.store_release(at + 12, word(cid, answer.status.with_phase(self.phase)))?;
        self.tail += 1;
        if self.tail == self.size {
            (self.tail, self.phase) = (0, !self.phase);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use guest_memory::test_util::memfd_memory;

    use super::super::status::Status;
    use super::*;

    const PAGES: ShadowPages = ShadowPages { doorbells: 0x8000, events: 0x9000 };

    fn memory() -> Rc<MemoryView> {
        MemoryView::new(memfd_memory(&[(0, 1 << 20)]).unwrap())
    }

    /// Whether a driver writes the register (section 5.7, as virtio 1.3, 2.7.10).
    fn need_event(event: u32, new: u32, old: u32) -> bool {
        (new.wrapping_sub(event).wrapping_sub(1) as u16) < new.wrapping_sub(old) as u16
    }

    #[test]
    fn a_doorbell_beyond_the_end_is_refused() {
        let mut queue = SubmissionQueue::new(0, 4);
        assert_eq!(queue.set_tail(4), Err(QueueError::Doorbell));
        assert_eq!(queue.set_tail(3), Ok(()));
        let mut queue = CompletionQueue::new(0x1000, 4);
        assert_eq!(queue.set_head(1), Err(QueueError::Doorbell), "nothing was posted");
        assert_eq!(queue.set_head(u32::MAX), Err(QueueError::Doorbell));
    }

    #[test]
    fn entries_are_popped_in_a_ring() {
        let memory = memory();
        let mut queue = SubmissionQueue::new(0x1000, 3);
        for round in 0..10 {
            queue.set_tail((round + 1) % 3).unwrap();
            let at = 0x1000 + 64 * u64::from(round % 3);
            memory.write_bytes(at, &[round as u8]).unwrap();
            let entry = queue.pop(&memory).unwrap().unwrap();
            assert_eq!(u32::from(entry.opcode), round);
            assert_eq!(queue.pop(&memory), Ok(None));
        }
        let mut nowhere = SubmissionQueue::new(1 << 40, 3);
        nowhere.set_tail(1).unwrap();
        assert_eq!(nowhere.pop(&memory), Err(QueueError::NotMemory));
    }

    #[test]
    fn a_completion_queue_is_never_overrun() {
        let memory = memory();
        let mut queue = CompletionQueue::new(0x1000, 4);
        assert_eq!(
            [(); 4].map(|()| queue.reserve(&memory)),
            [Ok(true), Ok(true), Ok(true), Ok(false)]
        );
        for cid in 0..3 {
            queue.post(&memory, Status::SUCCESS.into(), (1, 2), cid).unwrap();
        }
        assert_eq!(queue.reserve(&memory), Ok(false), "the driver has taken none");
        assert_eq!(memory.read_u32(0x1000 + 8), Ok(0x0001_0002));
        assert_eq!(memory.read_u32(0x1000 + 16 + 12), Ok(0x0001_0001), "phase and CID");
        queue.set_head(2).unwrap();
        assert_eq!([(); 3].map(|()| queue.reserve(&memory)), [Ok(true), Ok(true), Ok(false)]);
        queue.post(&memory, Status::INVALID_OPCODE.into(), (1, 2), 9).unwrap();
        queue.post(&memory, Status::SUCCESS.into(), (1, 2), 9).unwrap();
        assert_eq!(memory.read_u32(0x1000 + 48 + 12), Ok(0x8003_0009));
        assert_eq!(memory.read_u32(0x1000 + 12), Ok(0x0000_0009), "the phase has changed");
    }

    /// Every submission is found: either the driver is told to write the register, or the shadow is seen.
    #[test]
    fn an_armed_queue_is_rung_and_a_disarmed_one_rarely() {
        let memory = memory();
        let bell = DoorbellOf::Submission(1);
        let mut queue = SubmissionQueue::new(0x1000, 16);
        queue.set_shadow(bell, PAGES, true, &memory).unwrap();
        let (shadow, event) = (PAGES.doorbells + bell.offset(), PAGES.events + bell.offset());
        let mut tail = 0;
        let mut submit = |memory: &MemoryView| {
            let old = tail;
            tail = (tail + 1) % 16;
            memory.store_release(shadow, tail).unwrap();
            need_event(memory.load_acquire(event).unwrap(), tail, old)
        };
        let drain = |queue: &mut SubmissionQueue| {
            queue.refresh(&memory).unwrap();
            std::iter::from_fn(|| queue.pop(&memory).unwrap()).count()
        };
        for _ in 0..40 {
            assert_eq!(queue.arm(&memory), Ok(false));
            assert!(submit(&memory), "an armed doorbell");
            assert!(!submit(&memory), "one register write wakes");
            assert!(queue.is_rung(&memory));
            assert_eq!(drain(&mut queue), 2);
        }
        queue.disarm(&memory).unwrap();
        for _ in 0..100 {
            assert!(!submit(&memory), "the loop polls");
            assert_eq!(drain(&mut queue), 1);
            queue.disarm(&memory).unwrap();
        }
        submit(&memory);
        assert_eq!(queue.arm(&memory), Ok(true), "what raced with it is seen");
        memory.store_release(shadow, 16).unwrap();
        assert_eq!(queue.refresh(&memory), Err(QueueError::Doorbell));
    }

    /// Linux does so after a reset.
    #[test]
    fn what_a_driver_wrote_before_it_told_where_is_not_lost() {
        let memory = memory();
        let bell = DoorbellOf::Submission(1);
        let mut queue = SubmissionQueue::new(0x1000, 16);
        queue.set_tail(1).unwrap();
        memory.store_release(PAGES.doorbells + bell.offset(), 3).unwrap();
        queue.set_shadow(bell, PAGES, false, &memory).unwrap();
        assert_eq!(std::iter::from_fn(|| queue.pop(&memory).unwrap()).count(), 3);
        let mut next = SubmissionQueue::new(0x1000, 16);
        next.set_shadow(bell, PAGES, true, &memory).unwrap();
        assert!(next.is_empty() && !next.is_rung(&memory), "a new queue begins anew");
    }

    #[test]
    fn a_full_completion_queue_reads_the_shadow() {
        let memory = memory();
        let bell = DoorbellOf::Completion(1);
        let mut queue = CompletionQueue::new(0x1000, 3);
        queue.set_shadow(bell, PAGES, true, &memory).unwrap();
        let (shadow, event) = (PAGES.doorbells + bell.offset(), PAGES.events + bell.offset());
        let mut head = 0;
        for cid in 0..50 {
            while queue.reserve(&memory) == Ok(true) {
                queue.post(&memory, Status::SUCCESS.into(), (1, 0), cid).unwrap();
            }
            assert_eq!(queue.arm(&memory), Ok(false));
            let old = head;
            head = (head + 1) % 3;
            memory.store_release(shadow, head).unwrap();
            assert!(need_event(memory.load_acquire(event).unwrap(), head, old));
            assert!(queue.is_rung(&memory));
        }
    }
}
