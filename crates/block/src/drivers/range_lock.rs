//! The order of writes to the same block, where blocks are larger than a guest's sectors.
//!
//! A write of a part of a block reads the block, changes it and writes it back. Without an order, a
//! write of another request to that block would be lost. So a read-modify-write and all other writes to
//! its blocks take turns, also between loops.

use std::ops::Range;
use std::rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use event_loop::{BottomHalf, EventLoop, sync::lock};

/// Requests of guests are multiples of this many bytes in all cases; only an NBD client may send
/// others.
const SECTOR: usize = 512;

/// The writes of a node that need a claim.
#[derive(Debug)]
pub(crate) struct RangeLock {
    /// Writes of whole blocks need a claim too. Set where blocks are larger than sectors. Otherwise only
    /// an NBD client can cause a read-modify-write, by a write of less than a sector: the first one sets
    /// this for good. A whole write to that sector that was in flight at that moment may be lost.
    all: AtomicBool,
    state: Mutex<ClaimState>,
}

/// On cache lines of its own with its lock, because its neighbour in the node is read by every request
/// on every thread.
#[derive(Debug, Default)]
#[repr(align(128))]
struct ClaimState {
    next: u64,
    /// The granted claims, and after them the waiting ones, in order.
    claims: Vec<Claim>,
}

#[derive(Debug)]
struct Claim {
    id: Ticket,
    range: Range<u64>,
    modify: bool,
    /// `None`: granted.
    waiter: Option<(Arc<Mailbox>, u32)>,
}

impl Claim {
    fn conflicts(&self, other: &Claim) -> bool {
        (self.modify || other.modify)
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }
}

/// The ticket of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

/// Tells a channel, on its own thread, which of its claims were granted.
pub(crate) struct Mailbox {
    tokens: Mutex<Vec<u32>>,
    bottom_half: BottomHalf,
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mailbox")
    }
}

impl Mailbox {
    /// Creates the mailbox of the channel `me`. `granted` is called with each token as long as the
    /// channel exists.
    pub(crate) fn new<T: 'static>(
        event_loop: &EventLoop,
        me: rc::Weak<T>,
        granted: impl Fn(&T, u32) + 'static,
    ) -> Arc<Self> {
        Arc::new_cyclic(|mailbox: &Weak<Mailbox>| {
            let mailbox = mailbox.clone();
            let bottom_half = event_loop.bottom_half(move || {
                let (Some(me), Some(mailbox)) = (me.upgrade(), mailbox.upgrade()) else { return };
                mailbox.take().into_iter().for_each(|token| granted(&me, token));
            });
            Mailbox { tokens: Mutex::default(), bottom_half }
        })
    }

    /// The bottom half that is scheduled for a new token.
    pub(crate) fn bottom_half(&self) -> &BottomHalf {
        &self.bottom_half
    }

    /// Takes the tokens that were granted.
    fn take(&self) -> Vec<u32> {
        std::mem::take(&mut *lock(&self.tokens))
    }

    /// Reports a token to the channel, on its thread.
    pub(crate) fn put(&self, token: u32) {
        lock(&self.tokens).push(token);
        self.bottom_half.schedule();
    }
}

impl RangeLock {
    /// For a node with that request alignment in bytes.
    pub(crate) fn new(align: usize) -> Self {
        RangeLock { all: AtomicBool::new(align > SECTOR), state: Mutex::default() }
    }

    /// Whether writes of whole blocks need a claim, too.
    #[inline]
    pub(crate) fn is_for_all(&self) -> bool {
        self.all.load(Ordering::Relaxed)
    }

    /// Claims a range of whole blocks. `true`: granted. Otherwise `token` appears in the mailbox once all
    /// earlier conflicting claims have been released.
    pub(crate) fn claim(
        &self,
        range: Range<u64>,
        modify: bool,
        mailbox: &Arc<Mailbox>,
        token: u32,
    ) -> (Ticket, bool) {
        if modify && !self.is_for_all() {
            self.all.store(true, Ordering::Relaxed);
        }
        let mut state = lock(&self.state);
        let id = Ticket(state.next);
        state.next += 1;
        let mut claim = Claim { id, range, modify, waiter: None };
        let granted = !state.claims.iter().any(|other| claim.conflicts(other));
        if !granted {
            claim.waiter = Some((mailbox.clone(), token));
        }
        state.claims.push(claim);
        (id, granted)
    }

    /// Releases a claim, and grants the claims that waited only for it.
    pub(crate) fn release(&self, ticket: Ticket) {
        let mut state = lock(&self.state);
        let Some(index) = state.claims.iter().position(|claim| claim.id == ticket) else { return };
        // In order of arrival, for fairness.
        let released = state.claims.remove(index);
        for i in index..state.claims.len() {
            let (before, rest) = state.claims.split_at_mut(i);
            let Some(claim) = rest.first_mut() else { return };
            if claim.waiter.is_some()
                && claim.conflicts(&released)
                && !before.iter().any(|other| claim.conflicts(other))
                && let Some((mailbox, token)) = claim.waiter.take()
            {
                mailbox.put(token);
            }
        }
    }
}
