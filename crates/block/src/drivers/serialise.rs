//! Which writes wait for which, where the image's blocks are larger than the guest's.
//!
//! A write of part of a block reads the block, changes it and writes it back. What another request
//! writes to that block meanwhile would be lost, so a read-modify-write and anything else that writes
//! to its blocks take turns, also when they come from different loops.

use std::ops::Range;
use std::rc;
use std::sync::{Arc, Mutex, Weak};

use event_loop::{BottomHalf, EventLoop, sync::lock};

/// Requests are multiples of this, bytes, whatever a guest's driver does; only an NBD client may
/// send others.
const SECTOR: usize = 512;

/// Which requests of a node that write have to ask.
#[derive(Debug)]
pub(crate) struct Serialise {
    /// Those that write whole blocks too: where blocks are larger than sectors. Where they are not,
    /// no guest causes a read-modify-write, and whole blocks go without asking; a client of another
    /// kind that writes less than a sector while it overwrites that sector by another request must
    /// not care which of the two wins.
    pub(crate) all: bool,
    state: Mutex<State>,
}

/// On cache lines of its own, with the lock around it: beside it in the node lies what every request of
/// every thread reads.
#[derive(Debug, Default)]
#[repr(align(128))]
struct State {
    next: u64,
    /// Those granted, and behind them, in order, those waiting.
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

/// A range that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

/// Where a channel learns, on its own thread, that its requests may go on.
pub(crate) struct Mailbox {
    tokens: Mutex<Vec<u32>>,
    bell: BottomHalf,
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mailbox")
    }
}

impl Mailbox {
    /// Of channel `me` on this loop, which `granted` tells of each token, as long as it is there.
    pub(crate) fn new<T: 'static>(
        event_loop: &EventLoop,
        me: rc::Weak<T>,
        granted: impl Fn(&T, u32) + 'static,
    ) -> Arc<Self> {
        Arc::new_cyclic(|mailbox: &Weak<Mailbox>| {
            let mailbox = mailbox.clone();
            let bell = event_loop.bottom_half(move || {
                let (Some(me), Some(mailbox)) = (me.upgrade(), mailbox.upgrade()) else { return };
                mailbox.take().into_iter().for_each(|token| granted(&me, token));
            });
            Mailbox { tokens: Mutex::default(), bell }
        })
    }

    /// The bottom half that the mailbox rings.
    pub(crate) fn bell(&self) -> &BottomHalf {
        &self.bell
    }

    /// Takes the tokens that were granted.
    fn take(&self) -> Vec<u32> {
        std::mem::take(&mut *lock(&self.tokens))
    }

    /// Gives the channel a token, on its thread.
    pub(crate) fn put(&self, token: u32) {
        lock(&self.tokens).push(token);
        self.bell.schedule();
    }
}

impl Serialise {
    /// For a node with that request alignment, bytes.
    pub(crate) fn new(align: usize) -> Self {
        Serialise { all: align > SECTOR, state: Mutex::default() }
    }

    /// Asks for a range of whole blocks. `true`: granted. Else `token` appears in the mailbox once
    /// everything in the way that came before has been given back.
    pub(crate) fn claim(
        &self,
        range: Range<u64>,
        modify: bool,
        mailbox: &Arc<Mailbox>,
        token: u32,
    ) -> (Ticket, bool) {
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

    /// Gives a range back, and grants what waited only for it.
    pub(crate) fn release(&self, ticket: Ticket) {
        let mut state = lock(&self.state);
        let Some(index) = state.claims.iter().position(|claim| claim.id == ticket) else { return };
        // In order of arrival, which makes it fair.
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
