//! Computations of a pool: their users take turns.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// A user of a pool's threads, such as an image.
///
/// The computations of one lane begin in the order of submission. Lanes take turns.
#[derive(Clone, Default)]
pub struct Lane(Arc<()>);

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lane(_)")
    }
}

/// What a thread calls.
pub(crate) type Call = Box<dyn FnOnce() + Send>;

/// Computations that have not begun, by lane.
#[derive(Default)]
pub(crate) struct Lanes {
    /// None is empty. The first one is the next.
    lanes: VecDeque<(Lane, VecDeque<Call>)>,
    len: usize,
}

impl Lanes {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn push(&mut self, lane: Lane, call: Call) {
        self.len += 1;
        match self.lanes.iter_mut().find(|(other, _)| Arc::ptr_eq(&other.0, &lane.0)) {
            Some((_, calls)) => calls.push_back(call),
            None => self.lanes.push_back((lane, VecDeque::from([call]))),
        }
    }

    pub(crate) fn pop(&mut self) -> Option<(Lane, Call)> {
        let (lane, mut calls) = self.lanes.pop_front()?;
        let call = calls.pop_front()?;
        self.len -= 1;
        if !calls.is_empty() {
            self.lanes.push_back((lane.clone(), calls));
        }
        Some((lane, call))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::sync::lock;

    /// A burst of one image delays the computation of another by one computation.
    #[test]
    fn lanes_take_turns() {
        let order = Arc::new(Mutex::new(String::new()));
        let mut lanes = Lanes::default();
        let (burst, other, third) = (Lane::default(), Lane::default(), Lane::default());
        for (lane, name, count) in [(&burst, 'a', 6), (&other, 'b', 2), (&third, 'c', 1)] {
            for _ in 0..count {
                let order = order.clone();
                lanes.push(lane.clone(), Box::new(move || lock(&order).push(name)));
            }
        }
        assert_eq!(lanes.len(), 9);
        while let Some((_, call)) = lanes.pop() {
            call();
        }
        assert_eq!(*lock(&order), "abcabaaaa");
        assert_eq!(lanes.len(), 0);
        assert!(lanes.lanes.is_empty());
    }
}
