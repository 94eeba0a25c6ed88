//! Memory for what surrounds the guest's data in a cluster that is copied.

use std::cell::RefCell;
use std::rc::Rc;

use event_loop::{AlignedBuf, IoBufs};

use super::access::part;

/// What any device takes, bytes.
const ALIGN: usize = 4096;
/// Bytes of a buffer that is kept: a cluster of the default size.
const LEN: usize = 64 << 10;
/// Most buffers that are kept.
const MOST: usize = 4;

/// Buffers of a channel. New memory has to be zeroed, so buffers are kept and used again.
#[derive(Default)]
pub(super) struct Scratch(RefCell<Vec<IoBufs>>);

impl Scratch {
    /// Returns `len` bytes, which may have any contents. `None`: out of memory.
    ///
    /// A kept buffer is free again when neither a list of segments nor a request in flight refers to its memory.
    pub(super) fn take(&self, len: usize) -> Option<IoBufs> {
        let is_free =
            |bufs: &&IoBufs| bufs.owner().is_some_and(|owner| Rc::strong_count(owner) == 1);
        let mut kept = self.0.borrow_mut();
        let bufs = match kept.iter().find(is_free) {
            _ if len > LEN => return AlignedBuf::io_bufs(len, ALIGN),
            Some(bufs) => bufs,
            None if kept.len() == MOST => return AlignedBuf::io_bufs(len, ALIGN),
            None => {
                kept.push(AlignedBuf::io_bufs(LEN, ALIGN)?);
                kept.last()?
            }
        };
        Some(part(bufs, 0, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_once_nothing_refers_to_it() {
        let scratch = Scratch::default();
        let at = |bufs: &IoBufs| bufs.iovecs()[0].iov_base as usize;
        let first = scratch.take(4096).unwrap();
        let second = scratch.take(8192).unwrap();
        let (whole, in_flight) = (at(&first), part(&first, 512, 512));
        drop(first);
        // A part in flight is not free, nor is what is held.
        assert!(![whole, at(&second)].contains(&at(&scratch.take(512).unwrap())));
        drop(in_flight);
        let again = scratch.take(1024).unwrap();
        assert_eq!((at(&again), again.len()), (whole, 1024));
        assert!(scratch.take(0).unwrap().is_empty());
    }

    #[test]
    fn few_buffers_are_kept() {
        let scratch = Scratch::default();
        let taken = [(); MOST + 1].map(|()| scratch.take(LEN).unwrap());
        assert_eq!(scratch.0.borrow().len(), MOST);
        drop(taken);
        assert_eq!(scratch.take(LEN + 1).unwrap().len(), LEN + 1);
        assert_eq!(scratch.0.borrow().len(), MOST);
    }
}
