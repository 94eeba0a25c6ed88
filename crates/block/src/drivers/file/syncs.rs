//! Flushes of the page cache that are under way at the same time, on all loops.
//!
//! Linux tells one flush of an open file that pages could not be written (fsync(2), "ERRORS"), and
//! those beside it nothing, though it may be their pages. So a flush that went well says nothing
//! yet: it is done when those that began before its end have ended too, and none of them has failed.

use std::sync::{Arc, Mutex};

use event_loop::sync::lock;

use crate::drivers::range_lock::Mailbox;

/// Those of a node.
#[derive(Debug, Default)]
pub(super) struct Syncs(Mutex<SyncState>);

#[derive(Debug, Default)]
struct SyncState {
    next: u64,
    /// Numbers of flushes without a recorded result, lowest first.
    running: Vec<u64>,
    waiting: Vec<Waiting>,
}

/// Who waits for all with lower numbers than `before`.
#[derive(Debug)]
struct Waiting {
    before: u64,
    mailbox: Arc<Mailbox>,
    token: u32,
}

/// A flush in flight. Drop it once its result is recorded, so that concurrent flushes can read the
/// result.
#[derive(Debug)]
pub(super) struct Running {
    syncs: Arc<Syncs>,
    number: u64,
}

impl Syncs {
    /// One begins.
    pub(super) fn begin(self: &Arc<Self>) -> Running {
        let mut state = lock(&self.0);
        let number = state.next;
        state.next += 1;
        state.running.push(number);
        Running { syncs: self.clone(), number }
    }

    /// Whether all with lower numbers have ended. If not, `token` appears in the mailbox when they have.
    pub(super) fn have_ended(&self, before: u64, mailbox: &Arc<Mailbox>, token: u32) -> bool {
        let mut state = lock(&self.0);
        let ended = state.have_ended(before);
        if !ended {
            state.waiting.push(Waiting { before, mailbox: mailbox.clone(), token });
        }
        ended
    }
}

impl Running {
    /// It has ended well. All that began before have lower numbers than this.
    pub(super) fn end(self) -> u64 {
        let syncs = self.syncs.clone();
        drop(self);
        lock(&syncs.0).next
    }
}

impl SyncState {
    fn have_ended(&self, before: u64) -> bool {
        self.running.first().is_none_or(|first| *first >= before)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut state = lock(&self.syncs.0);
        state.running.retain(|number| *number != self.number);
        let mut waiting = std::mem::take(&mut state.waiting);
        waiting.retain(|Waiting { before, mailbox, token }| {
            let ended = state.have_ended(*before);
            if ended {
                mailbox.put(*token);
            }
            !ended
        });
        state.waiting = waiting;
    }
}
