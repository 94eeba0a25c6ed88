//! The claims of requests on parts of a disk: the one lock table of an image.
//!
//! Requests that use the mapping of their clusters share them. A request that changes the mapping has them
//! alone. In order of arrival: a request waits only for earlier requests that it conflicts
//! with.

use std::collections::VecDeque;
use std::ops::Range;
use std::task::{Context, Poll, Waker};

use event_loop::Slab;

/// A claimed part of the disk.
#[derive(Debug)]
#[must_use = "has to be given back"]
pub(super) enum Taken {
    /// Shared: a place in the list.
    Shared(u32),
    /// Exclusive: the number of the request.
    Alone(u64),
}

/// The granted and the waiting claims.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    shared: Slab<Range<u64>>,
    alone: Vec<(u64, Range<u64>)>,
    waiting: VecDeque<Waiting>,
    next: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    range: Range<u64>,
    is_alone: bool,
    /// Set when the claim was granted and the waker was called.
    taken: Option<Taken>,
    waker: Waker,
}

fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Ranges {
    /// Claims a range, unless another request has claimed it or waits for it. The range is not empty.
    #[inline]
    pub(super) fn try_take(&mut self, range: &Range<u64>, is_alone: bool) -> Option<Taken> {
        let waits = self.waiting.iter().any(|waiting| {
            waiting.taken.is_none() && (is_alone || waiting.is_alone) && meet(&waiting.range, range)
        });
        (!waits && self.is_free(range, is_alone)).then(|| self.take(range.clone(), is_alone))
    }

    fn is_free(&self, range: &Range<u64>, is_alone: bool) -> bool {
        let is_alone_free = self.alone.iter().all(|(_, taken)| !meet(taken, range));
        is_alone_free && (!is_alone || self.shared.values().all(|taken| !meet(taken, range)))
    }

    fn take(&mut self, range: Range<u64>, is_alone: bool) -> Taken {
        if is_alone {
            self.next += 1;
            self.alone.push((self.next, range));
            return Taken::Alone(self.next);
        }
        Taken::Shared(self.shared.insert(range))
    }

    /// Claims a range when it is its turn. `number`: `None` at first, kept for the next call.
    pub(super) fn poll_take(
        &mut self,
        range: &Range<u64>,
        is_alone: bool,
        number: &mut Option<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<Taken> {
        let Some(mine) = *number else {
            if let Some(taken) = self.try_take(range, is_alone) {
                return Poll::Ready(taken);
            }
            self.next += 1;
            *number = Some(self.next);
            self.waiting.push_back(Waiting {
                number: self.next,
                range: range.clone(),
                is_alone,
                taken: None,
                waker: cx.waker().clone(),
            });
            return Poll::Pending;
        };
        let Some(at) = self.waiting.iter().position(|waiting| waiting.number == mine) else {
            return Poll::Pending;
        };
        if let Some(taken) = self.waiting[at].taken.take() {
            self.waiting.remove(at);
            *number = None;
            return Poll::Ready(taken);
        }
        self.waiting[at].waker.clone_from(cx.waker());
        Poll::Pending
    }

    /// Removes a waiting claim. Returns the wakers of claims that are granted by that.
    pub(super) fn stop_waiting(&mut self, number: u64) -> Vec<Waker> {
        let at = self.waiting.iter().position(|waiting| waiting.number == number);
        match at.and_then(|at| self.waiting.remove(at)) {
            Some(Waiting { taken: Some(taken), .. }) => self.give_back(taken),
            Some(_) => self.serve(),
            None => Vec::new(),
        }
    }

    /// Releases a range. Returns the wakers of claims that are granted by that.
    #[inline]
    pub(super) fn give_back(&mut self, taken: Taken) -> Vec<Waker> {
        match taken {
            Taken::Shared(at) => drop(self.shared.remove(at)),
            Taken::Alone(number) => self.alone.retain(|(other, _)| *other != number),
        }
        match self.waiting.is_empty() {
            true => Vec::new(),
            false => self.serve(),
        }
    }

    #[cold]
    fn serve(&mut self) -> Vec<Waker> {
        let mut wakers = Vec::new();
        for at in 0..self.waiting.len() {
            let Waiting { range, is_alone, taken: None, .. } = &self.waiting[at] else { continue };
            let (range, is_alone) = (range.clone(), *is_alone);
            let earlier = self.waiting.iter().take(at).any(|earlier| {
                earlier.taken.is_none()
                    && (is_alone || earlier.is_alone)
                    && meet(&earlier.range, &range)
            });
            if !earlier && self.is_free(&range, is_alone) {
                let taken = self.take(range, is_alone);
                let waiting = &mut self.waiting[at];
                waiting.taken = Some(taken);
                wakers.push(waiting.waker.clone());
            }
        }
        wakers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context<T>(call: impl FnOnce(&mut Context<'_>) -> T) -> T {
        call(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn shared_claims_coexist_and_an_exclusive_one_waits_for_them() {
        let mut ranges = Ranges::default();
        let one = ranges.try_take(&(0..4), false).unwrap();
        let two = ranges.try_take(&(2..6), false).unwrap();
        assert!(ranges.try_take(&(5..6), true).is_none());
        let far = ranges.try_take(&(6..8), true).unwrap();
        let mut number = None;
        assert!(context(|cx| ranges.poll_take(&(3..5), true, &mut number, cx)).is_pending());
        // A later claim does not overtake, unless its range is disjoint.
        assert!(ranges.try_take(&(4..5), false).is_none());
        let elsewhere = ranges.try_take(&(0..3), false).unwrap();
        assert!(ranges.give_back(one).is_empty());
        assert_eq!(ranges.give_back(two).len(), 1);
        let taken = context(|cx| ranges.poll_take(&(3..5), true, &mut number, cx));
        let Poll::Ready(taken) = taken else { panic!("it is its turn") };
        assert!(ranges.try_take(&(4..5), false).is_none());
        for taken in [far, elsewhere, taken] {
            assert!(ranges.give_back(taken).is_empty());
        }
        assert!(ranges.try_take(&(0..9), true).is_some());
    }

    #[test]
    fn removing_a_waiting_claim_grants_the_next_one() {
        let mut ranges = Ranges::default();
        let shared = ranges.try_take(&(0..4), false).unwrap();
        let (mut alone, mut next) = (None, None);
        assert!(context(|cx| ranges.poll_take(&(0..4), true, &mut alone, cx)).is_pending());
        assert!(context(|cx| ranges.poll_take(&(0..4), false, &mut next, cx)).is_pending());
        assert_eq!(ranges.stop_waiting(alone.unwrap()).len(), 1);
        // Its claim was granted already when it stopped.
        assert!(ranges.stop_waiting(next.unwrap()).is_empty());
        assert!(ranges.give_back(shared).is_empty());
        assert!(ranges.try_take(&(0..4), true).is_some());
    }
}
