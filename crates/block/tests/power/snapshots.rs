//! Internal snapshots of the image that a guest uses.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use block::node::{BlockNode, SnapshotChange, SnapshotError};
use event_loop::{EventLoop, oneshot};
use fastrand::Rng;

/// The contents of the snapshots that an image has to have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshots {
    now: Vec<Vec<u8>>,
    /// Those that it may have instead: a change is under way, or has failed.
    after: Option<Vec<Vec<u8>>>,
}

impl Snapshots {
    pub(crate) fn new(found: &[Vec<u8>]) -> Snapshots {
        Snapshots { now: found.to_vec(), after: None }
    }

    /// Checks those of an image that was left.
    pub(crate) fn check(&self, found: &[Vec<u8>]) -> Result<(), String> {
        if self.now == found || self.after.as_deref() == Some(found) {
            return Ok(());
        }
        let wrong = self.now.iter().zip(found).position(|(one, other)| one != other);
        let (now, found) = (self.now.len(), found.len());
        let after = self.after.as_ref().map(Vec::len);
        Err(format!("{found} snapshots, not {now} or {after:?}; the first wrong one: {wrong:?}"))
    }

    /// Begins to make a snapshot of a disk with these contents, or to delete one. `None`: no other change can begin.
    pub(crate) fn begin(
        &mut self,
        node: &Arc<dyn BlockNode>,
        event_loop: &EventLoop,
        contents: &[u8],
        random: &mut Rng,
    ) -> Option<Changing> {
        if self.after.is_some() {
            return None;
        }
        let mut after = self.now.clone();
        let change = match after.len() {
            len @ 1.. if random.usize(..4) < len => {
                let at = random.usize(..len);
                after.remove(at);
                SnapshotChange::Delete(node.snapshots()?[at].id.clone())
            }
            _ => {
                after.push(contents.to_vec());
                SnapshotChange::Make(format!("s{}", random.u16(..)))
            }
        };
        self.after = Some(after);
        let (done, result) = oneshot::channel();
        let changed = node.clone().change_snapshots(change, event_loop);
        event_loop.spawn(async move { done.send(changed.await) });
        Some(Changing(result))
    }
}

/// A change that is under way.
pub(crate) struct Changing(oneshot::Receiver<Result<(), SnapshotError>>);

impl Changing {
    /// Whether it has succeeded. `None`: it is under way.
    pub(crate) fn is_over(&mut self, snapshots: &mut Snapshots) -> Option<bool> {
        match Pin::new(&mut self.0).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => None,
            Poll::Ready(Ok(Ok(()))) => {
                snapshots.now = snapshots.after.take().unwrap_or_default();
                Some(true)
            }
            // After a failed write to the header, the image may have either.
            Poll::Ready(_) => Some(false),
        }
    }
}
