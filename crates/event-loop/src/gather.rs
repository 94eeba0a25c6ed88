//! Lists of segments with several owners.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::rc::Rc;

use crate::buf::{IoBufs, MemoryOwner};

/// Makes lists from parts of other lists with different owners.
///
/// For example, a socket operation that sends a header followed by a guest's data, or receives them.
///
/// One `Gather` serves one list after the other. It allocates nothing if each list is
/// [released](Self::release) before the next one begins.
///
/// ```
/// use event_loop::{AlignedBuf, Gather, IoBufs};
///
/// let mut header = AlignedBuf::io_bufs(4, 4).expect("memory");
/// let mut data = AlignedBuf::io_bufs(4096, 4096).expect("memory");
/// header.copy_in(0, b"head");
/// data.copy_in(1024, b"data");
/// let (mut gather, mut list) = (Gather::with_capacity(2), IoBufs::with_capacity(2));
/// gather.begin(&mut list);
/// gather.append(&mut list, &header, 0, 4, usize::MAX);
/// gather.append(&mut list, &data, 1024, 4, usize::MAX);
/// drop((header, data));
/// let mut both = [0; 8];
/// list.copy_out(0, &mut both);
/// assert_eq!(&both, b"headdata");
/// ```
pub struct Gather {
    owners: Rc<Owners>,
}

/// The owners of a list's memory. The list has this for its owner.
#[derive(Default)]
struct Owners(RefCell<Vec<Rc<dyn MemoryOwner>>>);

impl MemoryOwner for Owners {
    fn is_lost(&self) -> bool {
        self.0.borrow().iter().any(|owner| owner.is_lost())
    }
}

impl Gather {
    /// Returns a `Gather` with room for `owners` owners.
    pub fn with_capacity(owners: usize) -> Self {
        Gather { owners: Rc::new(Owners(RefCell::new(Vec::with_capacity(owners)))) }
    }

    /// Empties `list` and prepares it for appended parts. Keeps its capacity.
    pub fn begin(&mut self, list: &mut IoBufs) {
        self.release(list);
        if Rc::strong_count(&self.owners) > 1 {
            // The previous list is still in use.
            self.owners = Rc::default();
        }
        list.set_owner(self.owners.clone());
    }

    /// Appends a part of `whole` to the list. Returns the number of bytes.
    ///
    /// The list is the one most recently [begun](Self::begin). The part is the bytes from `offset` on, at
    /// most `len`, in at most `max_segments` segments. Both lists then share the memory.
    pub fn append(
        &mut self,
        list: &mut IoBufs,
        whole: &IoBufs,
        offset: usize,
        len: usize,
        max_segments: usize,
    ) -> usize {
        let ours = Rc::as_ptr(&self.owners).cast::<()>();
        if list.owner().is_none_or(|owner| Rc::as_ptr(owner).cast::<()>() != ours) {
            debug_assert!(false, "a list that was not begun here");
            return 0;
        }
        if let Some(owner) = whole.owner() {
            let mut owners = self.owners.0.borrow_mut();
            if owners.last().is_none_or(|last| !Rc::ptr_eq(last, owner)) {
                owners.push(owner.clone());
            }
        }
        let (before, mut segments) = (list.len(), 0);
        whole.for_each(offset, len, |base, len| {
            if segments < max_segments {
                // SAFETY: the segment belongs to `whole`, whose owner is one of the list's owners from now on.
                // Owners are dropped only once no list has them.
                unsafe { list.push(base, len) };
                segments += 1;
            }
        });
        list.len() - before
    }

    /// Empties `list` and drops its owners. Keeps its capacity.
    pub fn release(&mut self, list: &mut IoBufs) {
        list.clear();
        if Rc::strong_count(&self.owners) == 1 {
            // Outside of the borrow, as the drop of an owner may run any code.
            let mut owners = self.owners.0.take();
            owners.clear();
            self.owners.0.replace(owners);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::AlignedBuf;

    #[test]
    fn memory_lives_as_long_as_a_list_has_it() {
        let memory: Vec<IoBufs> = (0..3).map(|_| AlignedBuf::io_bufs(64, 64).unwrap()).collect();
        let alive: Vec<_> =
            memory.iter().map(|bufs| Rc::downgrade(bufs.owner().unwrap())).collect();
        let are_alive = || alive.iter().filter(|owner| owner.strong_count() > 0).count();
        let (mut gather, mut list) = (Gather::with_capacity(1), IoBufs::new());
        gather.begin(&mut list);
        for bufs in &memory {
            assert_eq!(gather.append(&mut list, bufs, 32, 16, 8), 16);
        }
        drop(memory);
        assert_eq!(are_alive(), 3);
        // A second list shares the owners, so the end of the first frees nothing.
        let mut part = IoBufs::new();
        part.set_part(&list, 0, 16, 1);
        let mut next = IoBufs::new();
        gather.begin(&mut next);
        list.clear();
        assert_eq!(are_alive(), 3);
        drop(part);
        assert_eq!(are_alive(), 0);
    }

    #[test]
    fn a_part_is_cut_to_so_many_segments() {
        let (a, b) = (AlignedBuf::io_bufs(64, 64).unwrap(), AlignedBuf::io_bufs(64, 64).unwrap());
        let (mut gather, mut both) = (Gather::with_capacity(2), IoBufs::new());
        gather.begin(&mut both);
        gather.append(&mut both, &a, 0, 8, 8);
        gather.append(&mut both, &b, 0, 8, 8);
        let (mut other, mut list) = (Gather::with_capacity(2), IoBufs::new());
        other.begin(&mut list);
        assert_eq!(other.append(&mut list, &both, 4, 12, 1), 4);
        assert_eq!(list.iovecs().len(), 1);
        other.release(&mut list);
        assert!(list.is_empty() && list.owner().is_none());
    }
}
