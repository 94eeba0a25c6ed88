//! Flushes that no user has sent: of the nodes of a device, when its export ends, and of commands.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use event_loop::IoBufs;
use nix::errno::Errno;

use crate::node::Channel;
use crate::request::{Op, Request, RequestOwner};
use crate::submit::submit;

/// Receives the result of a flush.
pub type FlushDone = Box<dyn FnOnce(Result<(), Errno>)>;

/// Flushes that are not all answered.
struct Flushes {
    /// The channels, drained meanwhile.
    channels: RefCell<Vec<Rc<dyn Channel>>>,
    left: Cell<usize>,
    result: Cell<Result<(), Errno>>,
    done: RefCell<Option<FlushDone>>,
}

impl Flushes {
    fn answered(&self, result: Result<(), Errno>) {
        self.result.set(self.result.get().and(result));
        self.left.set(self.left.get().saturating_sub(1));
        if self.left.get() == 0
            && let Some(done) = self.done.take()
        {
            self.channels.take().iter().for_each(|channel| channel.drain_end());
            done(self.result.get());
        }
    }
}

impl RequestOwner for Flushes {
    fn complete(&self, _tag: u32, result: Result<(), Errno>, _bufs: IoBufs) {
        self.answered(result);
    }
}

/// Flushes the nodes of these channels, then calls `done` with the first error.
///
/// No filter holds the flushes back: their requester is the end of an export, not its user. `done` may be called before this
/// returns.
pub fn flush<'a>(channels: impl Iterator<Item = &'a Rc<dyn Channel>>, done: FlushDone) {
    let flushes = Rc::new(Flushes {
        // One for this function, which may be answered while it still submits.
        left: Cell::new(1),
        result: Cell::new(Ok(())),
        channels: RefCell::default(),
        done: RefCell::new(Some(done)),
    });
    let to: Rc<dyn RequestOwner> = flushes.clone();
    for channel in channels {
        flushes.left.set(flushes.left.get() + 1);
        flushes.channels.borrow_mut().push(channel.clone());
        channel.drain_begin();
        channel.submit(Request::new(Op::Flush, 0, 0, IoBufs::new(), &to, 0));
    }
    flushes.answered(Ok(()));
}

/// Flushes a node for a command, on a channel of its own. No filter holds the flush back.
///
/// # Errors
///
/// Those of the node.
pub async fn flush_for_command(channel: &Rc<dyn Channel>) -> Result<(), Errno> {
    channel.drain_begin();
    submit(channel, Op::Flush, 0, 0, IoBufs::new()).await.0
}
