//! Requests of one event loop to one image.
//!
//! A request's memory belongs to its slot until the library has answered. The answer comes on a thread of the library,
//! which adds the slot to a list without a lock. The first of a batch wakes the loop.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

use event_loop::{BottomHalf, IoBufs, Pool};
use nix::errno::Errno;

use crate::image::Image;
use crate::library::Handle;

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
const THICK: c_int = 1;

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneOp {
    /// Fills the memory from `offset` on.
    Read {
        /// The first byte.
        offset: u64,
    },
    /// Writes the memory from `offset` on.
    Write {
        /// The first byte.
        offset: u64,
    },
    /// Gives the range's space back. Parts of objects may keep their contents.
    Discard {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Makes the range read as zeroes.
    WriteZeroes {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Whether the range keeps its space.
        keeps_space: bool,
    },
    /// Has everything that was answered on stable storage.
    Flush,
}

/// A request that is done.
#[derive(Debug)]
pub struct Done {
    /// The requester's number for it.
    pub tag: u32,
    /// Bytes that were read; 0 for other requests.
    pub result: Result<usize, Errno>,
    /// The memory.
    pub bufs: IoBufs,
}

/// Requests of one event loop to one image.
pub struct Lane {
    image: Arc<Image>,
    answers: Arc<Answers>,
    slots: RefCell<Pool<LaneSlot>>,
}

struct LaneSlot {
    ticket: Arc<Ticket>,
    tag: u32,
    bufs: IoBufs,
}

/// What the library has of a request: one reference, while the request is under way.
struct Ticket {
    answers: Arc<Answers>,
    index: u32,
    result: AtomicI64,
    next: AtomicPtr<Ticket>,
}

/// Tickets of answered requests, the last one first. The list owns one reference to each.
struct Answers {
    head: AtomicPtr<Ticket>,
    loop_side: BottomHalf,
    get_return_value: unsafe extern "C" fn(Handle) -> isize,
    release: unsafe extern "C" fn(Handle),
}

impl Lane {
    /// Opens a lane.
    ///
    /// `loop_side` is scheduled when answers are there for [`take`](Self::take).
    #[must_use]
    pub fn new(image: Arc<Image>, loop_side: BottomHalf) -> Lane {
        let rbd = &image.library().rbd;
        let answers = Answers {
            head: AtomicPtr::new(ptr::null_mut()),
            loop_side,
            get_return_value: rbd.rbd_aio_get_return_value,
            release: rbd.rbd_aio_release,
        };
        Lane { image, answers: Arc::new(answers), slots: RefCell::default() }
    }

    /// Returns how many requests are under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.borrow().in_use()
    }

    /// Starts a request. `tag`: the requester's number for it.
    ///
    /// The library keeps the memory until the request is done.
    ///
    /// # Errors
    ///
    /// The library refuses the request, and the memory comes back.
    pub fn submit(&self, tag: u32, op: LaneOp, bufs: IoBufs) -> Result<(), (Errno, IoBufs)> {
        let Ok(segments) = c_int::try_from(bufs.iovecs().len()) else {
            return Err((Errno::EINVAL, bufs));
        };
        let rbd = &self.image.library().rbd;
        let image = self.image.handle();
        let mut slots = self.slots.borrow_mut();
        let (index, slot) = slots.take_or_add(|index| LaneSlot::new(index, &self.answers));
        slot.tag = tag;
        slot.bufs = bufs;
        let iov = slot.bufs.iovecs().as_ptr();
        let ticket = Arc::into_raw(slot.ticket.clone()).cast_mut();
        let mut completion = ptr::null_mut();
        // SAFETY: the image is open, and `self.image` keeps it open. The slot keeps the list of segments and the
        // memory until `take` has the ticket back, or forever if the lane is dropped before. The ticket is a reference
        // of its own. `on_answer` is called once, if the call succeeds.
        let started = unsafe {
            let made =
                (rbd.rbd_aio_create_completion)(ticket.cast(), on_answer, &raw mut completion);
            match op {
                _ if made < 0 => made,
                LaneOp::Read { offset } => {
                    (rbd.rbd_aio_readv)(image, iov, segments, offset, completion)
                }
                LaneOp::Write { offset } => {
                    (rbd.rbd_aio_writev)(image, iov, segments, offset, completion)
                }
                LaneOp::Discard { offset, len } => {
                    (rbd.rbd_aio_discard)(image, offset, len, completion)
                }
                LaneOp::WriteZeroes { offset, len, keeps_space } => {
                    let flags = if keeps_space { THICK } else { 0 };
                    (rbd.rbd_aio_write_zeroes)(image, offset, len as usize, completion, flags, 0)
                }
                LaneOp::Flush => (rbd.rbd_aio_flush)(image, completion),
            }
        };
        if started >= 0 {
            return Ok(());
        }
        // SAFETY: the library has not taken the request: neither completion nor ticket are used by it any more.
        unsafe {
            if !completion.is_null() {
                (rbd.rbd_aio_release)(completion);
            }
            drop(Arc::from_raw(ticket.cast_const()));
        }
        let bufs = mem::take(&mut slot.bufs);
        slots.give(index);
        Err((Errno::from_raw(started.wrapping_neg()), bufs))
    }

    /// Gives requests that are done to `each`, in the order of their answers.
    ///
    /// `each` may submit.
    pub fn take(&self, mut each: impl FnMut(Done)) {
        let mut ticket = self.answers.take_all();
        while let Some(current) = ticket {
            let next = current.next.swap(ptr::null_mut(), Ordering::Relaxed);
            // SAFETY: the list owned a reference to each of its tickets, which is taken over here, once.
            ticket = (!next.is_null()).then(|| unsafe { Arc::from_raw(next.cast_const()) });
            let result = current.result.load(Ordering::Relaxed);
            let given_back = {
                let mut slots = self.slots.borrow_mut();
                slots.give(current.index);
                slots.get_mut(current.index).map(|slot| (slot.tag, mem::take(&mut slot.bufs)))
            };
            drop(current);
            let result = match usize::try_from(result) {
                Ok(bytes) => Ok(bytes),
                Err(_) => Err(Errno::from_raw(result.wrapping_neg() as i32)),
            };
            if let Some((tag, bufs)) = given_back {
                each(Done { tag, result, bufs });
            }
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.take(drop);
        if self.in_flight() > 0 {
            // The library continues to use this memory.
            mem::forget(self.slots.take());
            mem::forget(self.image.clone());
        }
    }
}

impl LaneSlot {
    fn new(index: u32, answers: &Arc<Answers>) -> LaneSlot {
        let ticket = Ticket {
            answers: answers.clone(),
            index,
            result: AtomicI64::new(0),
            next: AtomicPtr::new(ptr::null_mut()),
        };
        LaneSlot { ticket: Arc::new(ticket), tag: 0, bufs: IoBufs::new() }
    }
}

impl Answers {
    /// Adds the ticket of an answered request. `true`: it is the first one since the list was taken.
    fn add(&self, ticket: *mut Ticket) -> bool {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: the caller gives its reference to the list, and no other thread has the ticket.
            unsafe { (*ticket).next.store(head, Ordering::Relaxed) };
            // Orders the result before what the loop reads.
            match self.head.compare_exchange_weak(
                head,
                ticket,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return head.is_null(),
                Err(other) => head = other,
            }
        }
    }

    /// Takes the list. Returns its ticket that was added first, from which `next` leads to the last one.
    fn take_all(&self) -> Option<Arc<Ticket>> {
        let mut newest = self.head.swap(ptr::null_mut(), Ordering::Acquire);
        let mut oldest = ptr::null_mut();
        while !newest.is_null() {
            // SAFETY: the list, which this thread has taken, owns a reference to each of its tickets.
            let next = unsafe { (*newest).next.swap(oldest, Ordering::Relaxed) };
            oldest = newest;
            newest = next;
        }
        // SAFETY: as above; the reference is taken over here.
        (!oldest.is_null()).then(|| unsafe { Arc::from_raw(oldest.cast_const()) })
    }
}

unsafe extern "C" fn on_answer(completion: Handle, ticket: *mut c_void) {
    let ticket = ticket.cast::<Ticket>();
    // SAFETY: the ticket is the reference that `submit` has made for this call. The completion is answered, and not
    // used any more.
    let answers = unsafe {
        let answers = (*ticket).answers.clone();
        let result = (answers.get_return_value)(completion);
        (answers.release)(completion);
        (*ticket).result.store(result as i64, Ordering::Relaxed);
        answers
    };
    if answers.add(ticket) {
        answers.loop_side.schedule();
    }
}

#[cfg(test)]
mod tests {
    use event_loop::{EventLoop, LoopConfig};

    use super::*;

    unsafe extern "C" fn result(completion: Handle) -> isize {
        completion as isize
    }

    unsafe extern "C" fn release(_: Handle) {}

    fn answers() -> (EventLoop, Arc<Answers>) {
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let answers = Answers {
            head: AtomicPtr::new(ptr::null_mut()),
            loop_side: event_loop.bottom_half(|| {}),
            get_return_value: result,
            release,
        };
        (event_loop, Arc::new(answers))
    }

    /// As the library answers a request with a number, on any thread.
    fn answer(ticket: &Arc<Ticket>, number: usize) {
        let ticket = Arc::into_raw(ticket.clone()).cast_mut().cast();
        // SAFETY: a reference of its own, as `submit` passes.
        unsafe { on_answer(number as Handle, ticket) };
    }

    fn taken(answers: &Answers) -> Vec<(u32, i64)> {
        let mut ticket = answers.take_all();
        let mut taken = Vec::new();
        while let Some(current) = ticket {
            taken.push((current.index, current.result.load(Ordering::Relaxed)));
            let next = current.next.swap(ptr::null_mut(), Ordering::Relaxed);
            // SAFETY: as in `take`.
            ticket = (!next.is_null()).then(|| unsafe { Arc::from_raw(next.cast_const()) });
        }
        taken
    }

    #[test]
    fn answers_are_taken_in_their_order_and_tickets_are_used_again() {
        let (_event_loop, answers) = answers();
        let mut slots = Pool::default();
        for round in 0..3 {
            let mut take = || slots.take_or_add(|index| LaneSlot::new(index, &answers)).0;
            let indexes: Vec<_> = (0..4).map(|_| take()).collect();
            for index in &indexes {
                answer(&slots.get(*index).unwrap().ticket, 10 * round + *index as usize);
            }
            let expected =
                indexes.iter().map(|index| (*index, 10 * round as i64 + i64::from(*index)));
            assert_eq!(taken(&answers), expected.collect::<Vec<_>>());
            assert_eq!(taken(&answers), []);
            indexes.iter().for_each(|index| slots.give(*index));
            assert_eq!(slots.iter().len(), 4);
            // The list holds no reference any more.
            assert!(slots.iter().all(|slot| Arc::strong_count(&slot.ticket) == 1));
        }
    }

    #[test]
    fn answers_of_several_threads_are_all_taken() {
        const EACH: usize = if cfg!(miri) { 8 } else { 1000 };
        let (_event_loop, answers) = answers();
        let new = |index| LaneSlot::new(index, &answers).ticket;
        let tickets: Vec<_> = (0..3 * EACH as u32).map(new).collect();
        let threads: Vec<_> = tickets
            .chunks(EACH)
            .map(|chunk| chunk.to_vec())
            .map(|chunk| std::thread::spawn(move || chunk.iter().for_each(|one| answer(one, 7))))
            .collect();
        let mut all = Vec::new();
        while all.len() < 3 * EACH {
            all.extend(taken(&answers));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        all.sort_unstable();
        assert!(all.iter().zip(0..).all(|((index, result), n)| (*index, *result) == (n, 7)));
    }
}
