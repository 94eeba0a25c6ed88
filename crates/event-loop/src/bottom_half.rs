//! Bottom halves: callbacks scheduled onto a loop from any thread.

use std::rc::Rc;
use std::sync::Arc;

use crate::event_loop::EventLoop;
use crate::flag::Flag;
use crate::handle::{LoopHandle, Message};

/// A callback of a loop that any thread may schedule.
///
/// Scheduling it again before it has begun to run has no effect; after that, it runs once more.
#[derive(Clone)]
pub struct BottomHalf {
    id: u64,
    /// Raised from when it is scheduled to when it begins to run.
    flag: Arc<Flag>,
    handle: LoopHandle,
}

impl BottomHalf {
    /// Makes the loop run the callback soon.
    ///
    /// From the loop's own thread, the run is in the next iteration. The run sees all writes made before this
    /// call.
    pub fn schedule(&self) {
        if self.flag.raise() {
            // A loop that is gone runs nothing.
            let _ = self.handle.send(Message::BottomHalf(self.id, self.flag.clone()));
        }
    }
}

impl EventLoop {
    /// Creates a bottom half that runs `call`.
    ///
    /// The loop keeps `call` until [`delete_bottom_half`](Self::delete_bottom_half), or until it stops.
    pub fn bottom_half(&self, call: impl Fn() + 'static) -> BottomHalf {
        let id = self.0.next_bottom_half.get();
        self.0.next_bottom_half.set(id + 1);
        self.0.bottom_halves.borrow_mut().insert(id, Rc::new(call));
        BottomHalf { id, flag: Arc::new(Flag::new(false)), handle: self.handle() }
    }

    /// Drops a bottom half's callback. It does not run again, even if it is scheduled.
    pub fn delete_bottom_half(&self, bottom_half: &BottomHalf) {
        let call = self.0.bottom_halves.borrow_mut().remove(&bottom_half.id);
        drop(call);
    }

    pub(crate) fn run_bottom_half(&self, id: u64, flag: &Flag) {
        // Before it runs, so that scheduling it meanwhile counts.
        flag.lower();
        let call = self.0.bottom_halves.borrow().get(&id).cloned();
        if let Some(call) = call {
            call();
        }
    }
}
