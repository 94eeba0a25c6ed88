//! What the daemon's task has to do, and what may not interrupt it.

use std::cell::Cell;
use std::rc::Rc;

use super::serving::Message;
use super::signal::Mailbox;

/// The work of the daemon's task: one change after the other.
pub(super) struct Agenda {
    pub(super) mailbox: Mailbox<Message>,
    /// A change is under way that a stop signal must not interrupt: see `unless_stopped`.
    moving: Rc<Cell<bool>>,
    /// Each command that waits has a clone.
    waiting: Rc<()>,
}

impl Agenda {
    pub(super) fn new(mailbox: Mailbox<Message>) -> Self {
        Agenda { mailbox, moving: Rc::default(), waiting: Rc::default() }
    }

    /// Begins a change that a stop signal waits for.
    pub(super) fn moving(&self) -> Moving {
        Moving { moving: self.moving.clone(), is_inner: self.moving.replace(true) }
    }

    /// Tells, at any time, whether a [`Moving`] exists.
    pub(super) fn is_moving(&self) -> Rc<Cell<bool>> {
        self.moving.clone()
    }

    /// A command waits from now on, until the value is dropped.
    pub(super) fn wait(&self) -> Waiting {
        Waiting { _command: self.waiting.clone() }
    }

    /// Whether a command waits.
    pub(super) fn is_waiting(&self) -> bool {
        Rc::strong_count(&self.waiting) > 1
    }
}

/// Guard: while it exists, a command counts as waiting.
pub(super) struct Waiting {
    _command: Rc<()>,
}

/// Guard: while it exists, a stop signal waits for the change that is under way. Guards may be nested.
pub(super) struct Moving {
    moving: Rc<Cell<bool>>,
    /// Whether it is inside another one.
    is_inner: bool,
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.moving.set(self.is_inner);
    }
}
