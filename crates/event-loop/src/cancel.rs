//! Cancellation of operations.

use crate::event_loop::EventLoop;
use crate::op::{Engine, LoopFile};
use crate::ring::RingOp;
use crate::slots::{InFlight, SlotId, UserData};

impl EventLoop {
    /// Tries to cancel the ring's operations in flight on a file.
    ///
    /// An operation that still waits, such as a read of a socket, completes with `-ECANCELED` and has moved
    /// nothing. An operation in progress completes normally or with `-EINTR`. Operations of pool threads and
    /// Linux AIO are not cancelled.
    ///
    /// For the control plane: the cost is proportional to all operations in flight. That of
    /// [`Operation::cancel`](crate::Operation::cancel) is not.
    pub fn cancel(&self, file: &LoopFile) {
        let is_of_file = |op: &InFlight| op.engine == Engine::Uring && op.file.is_same(file);
        let ids = self.0.slots.borrow().ids_of(is_of_file);
        for id in ids {
            self.push_cancel(id);
        }
    }

    /// Tries to cancel the operation in a slot, if it is still there.
    pub(crate) fn cancel_slot(&self, id: SlotId) {
        let engine = self.0.slots.borrow().get(id).map(|op| op.engine);
        if engine == Some(Engine::Uring) {
            self.push_cancel(id);
        }
    }

    fn push_cancel(&self, id: SlotId) {
        self.push(RingOp::Cancel { user_data: UserData::Op(id).pack() }, UserData::Ignored);
    }
}
