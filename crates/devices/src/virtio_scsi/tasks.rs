//! Task management: commands are in flight on several loops, and a function of the control queue
//! concerns those of all of them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use event_loop::oneshot;

use super::wire::Response;

/// Some commands in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tasks {
    /// Of this logical unit; `None`: of all.
    pub(crate) lun: Option<u16>,
    /// With this identifier; `None`: whatever it is.
    pub(crate) id: Option<u64>,
}

impl Tasks {
    pub(crate) fn have(&self, lun: u16, id: u64) -> bool {
        self.lun.is_none_or(|wanted| wanted == lun) && self.id.is_none_or(|wanted| wanted == id)
    }
}

/// What a loop's part of the device is told to do.
pub(crate) enum Order {
    /// End these tasks. The answer comes when the driver can see their ends.
    ///
    /// A block request cannot be called back: memory of the guest's may be written until it is done.
    /// So the end is waited for, and what it was does not matter any more.
    End {
        tasks: Tasks,
        /// What the driver is told of each.
        response: Response,
        done: oneshot::Sender<()>,
    },
    /// Count these tasks.
    Count { tasks: Tasks, answer: oneshot::Sender<usize> },
    /// There are events to tell.
    TellEvents,
}

/// Queues that have to come to an end of some tasks. The last that does gives the answer, by letting
/// go.
pub(crate) struct Tally(RefCell<Option<oneshot::Sender<()>>>);

impl Tally {
    pub(crate) fn new(done: oneshot::Sender<()>) -> Rc<Self> {
        Rc::new(Tally(RefCell::new(Some(done))))
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done.send(());
        }
    }
}

/// Tasks of a queue whose ends somebody waits for.
pub(crate) struct Wait {
    pub(crate) tasks: Tasks,
    /// What the driver is told of each.
    pub(crate) response: Response,
    /// Of those that came, or are still to be taken from the queue, before this one.
    pub(crate) before: u64,
    /// Let go of with this.
    pub(crate) _tally: Rc<Tally>,
}

/// Numbers commands as they come.
#[derive(Debug, Default)]
pub(crate) struct Sequence(Cell<u64>);

impl Sequence {
    /// The number of the next command.
    pub(crate) fn peek(&self) -> u64 {
        self.0.get()
    }

    /// Takes a number.
    pub(crate) fn next(&self) -> u64 {
        self.0.replace(self.0.get() + 1)
    }
}
