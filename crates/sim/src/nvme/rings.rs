//! The driver's side of a queue pair in guest memory (NVM Express 1.4, sections 4.1 and 5.7).

use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use guest_memory::MemoryView;

use super::memory::{EVENTS, SHADOWS};

/// Bytes of the entries.
pub(super) const SUBMISSION: usize = 64;
const COMPLETION: u64 = 16;
/// Where the doorbell registers begin, in BAR 0.
const DOORBELLS: u64 = 0x1000;

/// A completion.
#[derive(Debug, Clone, Copy)]
pub(super) struct Completion {
    pub(super) result: u32,
    pub(super) sqid: u16,
    pub(super) sqhd: u16,
    pub(super) cid: u16,
    /// Status code and type.
    pub(super) status: u16,
}

/// A submission queue and its completion queue, both with this number and these entries.
pub(super) struct Rings {
    view: Rc<MemoryView>,
    qid: u16,
    size: u16,
    submissions: u64,
    completions: u64,
    /// The place of the next entry, and the last tail that the doorbell had.
    tail: u16,
    told: u16,
    head: u16,
    phase: bool,
    /// Doorbells are written to memory.
    pub(super) is_shadowed: bool,
}

impl Rings {
    pub(super) fn new(view: &Rc<MemoryView>, qid: u16, size: u16, at: [u64; 2]) -> Self {
        let [submissions, completions] = at;
        let rings = Rings {
            view: view.clone(),
            qid,
            size,
            submissions,
            completions,
            tail: 0,
            told: 0,
            head: 0,
            phase: true,
            is_shadowed: false,
        };
        let zeroes = vec![0; usize::from(size) * COMPLETION as usize];
        view.write_bytes(completions, &zeroes).expect("memory");
        for page in [SHADOWS, EVENTS] {
            view.write_bytes(page + 8 * u64::from(qid), &[0; 8]).expect("memory");
        }
        rings
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Addresses of the two queues.
    pub(super) fn places(&self) -> [u64; 2] {
        [self.submissions, self.completions]
    }

    /// The registers of the tail's and the head's doorbell.
    pub(super) fn registers(&self) -> [u64; 2] {
        let at = DOORBELLS + 8 * u64::from(self.qid);
        [at, at + 4]
    }

    /// Writes an entry that the device is not told of yet.
    pub(super) fn submit(&mut self, entry: &[u8; SUBMISSION]) {
        let at = self.submissions + u64::from(self.tail) * SUBMISSION as u64;
        self.view.write_bytes(at, entry).expect("memory");
        self.tail = (self.tail + 1) % self.size;
    }

    /// Returns the new value of the tail's doorbell. With shadows, it is in memory when this returns, and the event index
    /// is to be [checked](Self::needs_register).
    pub(super) fn tell_tail(&mut self) -> Told {
        let told = Told { doorbell: 0, old: self.told, new: self.tail };
        self.told = self.tail;
        self.shadow(&told);
        told
    }

    /// The same of the head, which was `old`.
    pub(super) fn tell_head(&mut self, old: u16) -> Told {
        let told = Told { doorbell: 4, old, new: self.head };
        self.shadow(&told);
        told
    }

    fn shadow(&self, told: &Told) {
        if self.is_shadowed {
            let at = SHADOWS + 8 * u64::from(self.qid) + told.doorbell;
            self.view.store_release(at, told.new.into()).expect("memory");
        }
    }

    /// Whether the register is to be written: the value passes the event index (as virtio 1.3, 2.7.10).
    pub(super) fn needs_register(&self, told: &Told) -> bool {
        if !self.is_shadowed {
            return true;
        }
        fence(Ordering::SeqCst);
        let at = EVENTS + 8 * u64::from(self.qid) + told.doorbell;
        let event = self.view.load_acquire(at).expect("memory") as u16;
        told.new.wrapping_sub(event).wrapping_sub(1) < told.new.wrapping_sub(told.old)
    }

    /// The head of the completion queue.
    pub(super) fn head(&self) -> u16 {
        self.head
    }

    fn next(&self) -> Option<u32> {
        let at = self.completions + u64::from(self.head) * COMPLETION + 12;
        let last = self.view.load_acquire(at).expect("memory");
        ((last >> 16 & 1 == 1) == self.phase).then_some(last)
    }

    /// Whether there is a completion.
    pub(super) fn has_completion(&self) -> bool {
        self.next().is_some()
    }

    /// Takes the next completion.
    pub(super) fn reap(&mut self) -> Option<Completion> {
        let last = self.next()?;
        let at = self.completions + u64::from(self.head) * COMPLETION;
        let word = |offset| self.view.read_u32(at + offset).expect("memory");
        let (result, of) = (word(0), word(8));
        self.head += 1;
        if self.head == self.size {
            (self.head, self.phase) = (0, !self.phase);
        }
        Some(Completion {
            result,
            sqid: (of >> 16) as u16,
            sqhd: of as u16,
            cid: last as u16,
            status: (last >> 17) as u16 & 0x7ff,
        })
    }
}

/// A new value of a doorbell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Told {
    /// 0: the tail's; 4: the head's.
    pub(super) doorbell: u64,
    old: u16,
    pub(super) new: u16,
}
