//! Task management. Commands are in flight on several loops, and a function of the control queue concerns all of
//! them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use event_loop::oneshot;

use super::wire::Response;

/// Selects commands in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tasks {
    /// The logical unit; `None` for all.
    pub(crate) lun: Option<u16>,
    /// The command's identifier; `None` for all.
    pub(crate) id: Option<u64>,
}

impl Tasks {
    pub(crate) fn have(&self, lun: u16, id: u64) -> bool {
        self.lun.is_none_or(|wanted| wanted == lun) && self.id.is_none_or(|wanted| wanted == id)
    }
}

/// An order to a loop's part of the device.
pub(crate) enum Order {
    /// End these tasks. The answer is sent once the driver can see their ends.
    ///
    /// Block requests cannot be cancelled and may write guest memory until they complete. So the part waits for
    /// their completion and ignores the result.
    End {
        tasks: Tasks,
        /// The response to each task.
        response: Response,
        done: oneshot::Sender<()>,
    },
    /// Count these tasks.
    Count { tasks: Tasks, answer: oneshot::Sender<usize> },
    /// Events are pending.
    TellEvents,
}

/// Shared by queues that have to end tasks. Answers when the last queue drops it.
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

/// Tasks of a queue whose ends a function waits for.
pub(crate) struct Wait {
    pub(crate) tasks: Tasks,
    /// The response to each task.
    pub(crate) response: Response,
    /// Only tasks with a number below this one, including chains not taken yet.
    pub(crate) before: u64,
    /// Dropped with the wait, which may send the answer.
    pub(crate) _tally: Rc<Tally>,
}

/// Numbers commands in the order of arrival.
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
