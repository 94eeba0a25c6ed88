//! A guest on an image that stores some of the data compressed.

use std::cell::Cell;
use std::rc::Rc;

use block::node::Channel;
use block::request::Request;

/// A channel that has two of three writes stored compressed.
pub(crate) struct Compressing {
    pub(crate) below: Rc<dyn Channel>,
    pub(crate) requests: Cell<usize>,
}

impl Channel for Compressing {
    fn submit(&self, request: Request) {
        self.requests.set(self.requests.get() + 1);
        self.below.submit(match self.requests.get() % 3 {
            0 => request,
            _ => request.compressed(),
        });
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight()
    }
}
