//! Calling operations back.

use crate::event_loop::EventLoop;
use crate::op::{Engine, LoopFile};
use crate::ring::RingOp;
use crate::slots::{InFlight, UserData};

impl EventLoop {
    /// Tries to call back what the ring has in flight on a file. What still waits, as reads of a socket
    /// do, completes with `-ECANCELED` and has moved nothing; what is being done completes as if nothing
    /// had been, or with `-EINTR`. What a pool thread or Linux AIO does goes on.
    ///
    /// For the control plane: it looks at every operation that is in flight.
    pub fn cancel(&self, file: &LoopFile) {
        let is_of_file = |op: &InFlight| op.engine == Engine::Uring && op.file.is_same(file);
        let ids = self.0.slots.borrow().ids_of(is_of_file);
        for id in ids {
            self.push(RingOp::Cancel { user_data: UserData::Op(id).pack() }, UserData::Ignored);
        }
    }
}
