//! Linux AIO, `aio=native`: an engine for files opened with `O_DIRECT`, with batched submission and
//! completions that an eventfd announces.
//!
//! Operations queued in an iteration are submitted before it waits, in order, with one io_submit(2) per
//! batch. Completions are read from the ring that the kernel maps into the process, without a system call,
//! so the loop can poll it. The eventfd is watched like any other source and never read: each completion is
//! an event, whatever the counter.

#![allow(unsafe_code)]

mod abi;
mod context;
mod signal;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use nix::sys::eventfd::{EfdFlags, EventFd};

use self::abi::Iocb;
use self::context::Context;
pub(crate) use self::signal::Signals;
use crate::event_loop::{EventLoop, Inner, REAP_BATCH};
use crate::handlers::{Handler, Progress, Trigger};
use crate::iteration::Reaped;
use crate::op::{Engine, IoOp, LoopFile};
use crate::ring::Completion;
use crate::ring::setup::SetupError;
use crate::slots::{SlotId, UserData};

/// Maximum operations in the kernel. Counts towards `fs.aio-max-nr`, the limit of all contexts of the
/// machine, 65536 by default.
const CAPACITY: u32 = 1024;

/// A loop's context and its operations.
pub(crate) struct LinuxAio {
    context: Context,
    notify: Arc<OwnedFd>,
    queue: RefCell<Queue>,
    /// Maximum operations per io_submit(2).
    max_batch: usize,
    /// Operations submitted and not reaped.
    in_kernel: Cell<u32>,
}

struct Queue {
    waiting: VecDeque<Iocb>,
    /// The list for io_submit(2), kept for its capacity.
    batch: Vec<*mut Iocb>,
}

/// The result of a submission.
enum Submitted {
    /// Nothing to submit now. Operations still queued wait for a completion.
    Done,
    /// The oldest operation was refused with this errno and removed from the queue.
    Refused(u64, i32),
}

impl LinuxAio {
    fn new(capacity: u32, max_batch: u32) -> Result<Self, SetupError> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let notify = EventFd::from_flags(flags)
            .map_err(|errno| SetupError { call: "eventfd", error: errno.into() })?;
        let context =
            Context::new(capacity).map_err(|error| SetupError { call: "io_setup", error })?;
        let max_batch = max_batch.clamp(1, CAPACITY) as usize;
        let queue = Queue {
            waiting: VecDeque::with_capacity(CAPACITY as usize),
            batch: Vec::with_capacity(max_batch),
        };
        Ok(LinuxAio {
            context,
            notify: Arc::new(notify.into()),
            queue: RefCell::new(queue),
            max_batch,
            in_kernel: Cell::new(0),
        })
    }

    /// Waits for the kernel's operations. Returns `false` if that failed and their memory is still in use.
    pub(crate) fn end(self) -> bool {
        self.context.destroy()
    }

    /// Operations queued or with the kernel.
    fn in_flight(&self) -> u64 {
        self.queue.borrow().waiting.len() as u64 + u64::from(self.in_kernel.get())
    }

    /// Submits as many operations as fit. Calls `called` per system call.
    fn submit(&self, called: impl Fn()) -> Submitted {
        let Queue { waiting, batch } = &mut *self.queue.borrow_mut();
        loop {
            let room = CAPACITY.saturating_sub(self.in_kernel.get()) as usize;
            batch.clear();
            let most = room.min(self.max_batch);
            batch.extend(waiting.iter_mut().take(most).map(std::ptr::from_mut));
            if batch.is_empty() {
                return Submitted::Done;
            }
            called();
            // SAFETY: the pointers lead into `waiting`, which does not change during the call. Slots
            // (`slots.rs`) own the descriptors and memory until the completion.
            match unsafe { self.context.submit(batch) } {
                Ok(taken) => {
                    waiting.drain(..taken);
                    self.in_kernel.set(self.in_kernel.get() + taken as u32);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Try again after a completion. If none is outstanding, the operation fails with this error.
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && self.in_kernel.get() > 0 =>
                {
                    return Submitted::Done;
                }
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EIO);
                    match waiting.pop_front() {
                        Some(iocb) => return Submitted::Refused(iocb.data, errno),
                        None => return Submitted::Done,
                    }
                }
            }
        }
    }

    /// Takes completions; with `wait`, at least one if any operation is in flight.
    fn reap(&self, into: &mut Vec<Completion>, wait: bool) -> io::Result<()> {
        let before = into.len();
        let result = if wait && self.in_kernel.get() > 0 && !self.context.has_completions() {
            self.context.wait(into)
        } else {
            self.context.reap(into)
        };
        let reaped = (into.len() - before) as u32;
        self.in_kernel.set(self.in_kernel.get().saturating_sub(reaped));
        result
    }
}

/// The eventfd's handler.
struct Completions(Weak<Inner>);

impl Handler for Completions {
    fn ready(&self, events: u32) -> Progress {
        let Some(inner) = self.0.upgrade() else { return Progress::Done };
        if events & libc::POLLERR as u32 != 0 {
            // epoll_ctl(2) has a limit of watches. Without one, completions would go unnoticed.
            inner.deaf.set(Some(libc::ENOSPC));
        }
        EventLoop(inner).dispatch_aio()
    }

    fn can_poll(&self) -> bool {
        self.0
            .upgrade()
            .is_some_and(|inner| inner.aio.get().is_some_and(|aio| aio.context.has_ring()))
    }

    fn poll(&self) -> bool {
        self.0
            .upgrade()
            .is_some_and(|inner| inner.aio.get().is_some_and(|aio| aio.context.has_completions()))
    }
}

impl EventLoop {
    /// Sets up [`Engine::Native`] before its first use, so that an error shows early.
    ///
    /// A second call has no effect.
    ///
    /// # Errors
    ///
    /// Those of io_setup(2) and eventfd(2): `ENOSYS` from a kernel without Linux AIO, `EAGAIN` when
    /// all contexts of the machine together would exceed `/proc/sys/fs/aio-max-nr`.
    pub fn set_up_linux_aio(&self) -> Result<(), SetupError> {
        if self.0.aio.get().is_none() {
            let aio = LinuxAio::new(CAPACITY, self.0.max_batch)?;
            let handler = Rc::new(Completions(Rc::downgrade(&self.0)));
            let events = libc::POLLIN as u32;
            self.add_handler(aio.notify.clone(), events, Trigger::Edge, handler);
            // Cannot fail: no code above could have set it.
            let _ = self.0.aio.set(aio);
        }
        Ok(())
    }

    /// The engine that carries out `op` on `file` when Linux AIO was requested. Fails if Linux AIO is
    /// unavailable.
    pub(crate) fn native_engine(&self, file: &LoopFile, op: &IoOp) -> Result<Engine, i32> {
        if !abi::takes(op) {
            return Ok(Engine::Threads);
        }
        self.set_up_linux_aio()
            .map_err(|error| error.error.raw_os_error().unwrap_or(libc::ENOSYS))?;
        let is_fsync = matches!(op, IoOp::Fsync { .. });
        Ok(if is_fsync && file.0.no_aio_fsync.get() { Engine::Threads } else { Engine::Native })
    }

    /// Queues the operation in slot `id`.
    pub(crate) fn submit_native(&self, id: SlotId) {
        let slots = self.0.slots.borrow();
        let (Some(aio), Some(in_flight)) = (self.0.aio.get(), slots.get(id)) else { return };
        let user_data = UserData::Op(id).pack();
        match Iocb::new(in_flight, user_data, aio.notify.as_raw_fd()) {
            Some(iocb) => aio.queue.borrow_mut().waiting.push_back(iocb),
            None => self.refuse(user_data, libc::EINVAL),
        }
    }

    /// Submits queued operations.
    pub(crate) fn submit_aio(&self) {
        let Some(aio) = self.0.aio.get() else { return };
        while let Submitted::Refused(user_data, errno) =
            aio.submit(|| self.stats().aio_submits.add(1))
        {
            let sync = match UserData::unpack(user_data) {
                UserData::Op(id) if errno == libc::EINVAL => {
                    let slots = self.0.slots.borrow();
                    let is_fsync = |op: &IoOp| matches!(op, IoOp::Fsync { .. });
                    let op = slots.get(id).filter(|op| is_fsync(&op.op));
                    op.map(|op| op.file.0.no_aio_fsync.set(true)).map(|()| id)
                }
                _ => None,
            };
            match sync {
                Some(id) => self.submit_to_pool(id),
                None => self.refuse(user_data, errno),
            }
        }
    }

    /// Number of operations queued for or with Linux AIO.
    pub(crate) fn with_aio(&self) -> u64 {
        self.0.aio.get().map_or(0, LinuxAio::in_flight)
    }

    /// Dispatches completions, at most a batch (fairness contract).
    fn dispatch_aio(&self) -> Progress {
        match self.reap_aio(false) {
            Ok(reaped) if reaped >= REAP_BATCH => Progress::More,
            Ok(_) => Progress::Done,
            Err(error) => {
                // A seccomp filter may permit io_submit(2) but not io_getevents(2): operations stay in flight.
                self.0.deaf.set(Some(error.raw_os_error().unwrap_or(libc::EIO)));
                Progress::Done
            }
        }
    }

    /// Waits for completions and dispatches them, while the loop shuts down.
    pub(crate) fn wait_for_aio(&self) -> io::Result<()> {
        self.section(|| self.reap_aio(true)).map(drop)
    }

    fn reap_aio(&self, wait: bool) -> io::Result<usize> {
        let Some(aio) = self.0.aio.get() else { return Ok(0) };
        let mut reaped = Reaped::new(self);
        let result = aio.reap(&mut reaped.list, wait);
        let count = reaped.list.len();
        reaped.dispatch(|_| {});
        result.map(|()| count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::{AlignedBuf, IoBufs};
    use crate::event_loop::LoopConfig;
    use crate::op::IoTarget;

    #[derive(Default)]
    struct Results(RefCell<Vec<i32>>);

    impl IoTarget for Results {
        fn complete(&self, _token: u32, result: i32, _bufs: IoBufs) {
            self.0.borrow_mut().push(result);
        }
    }

    fn put_in(event_loop: &EventLoop, aio: LinuxAio) -> Rc<Completions> {
        let handler = Rc::new(Completions(Rc::downgrade(&event_loop.0)));
        let notify = aio.notify.clone();
        event_loop.add_handler(notify, libc::POLLIN as u32, Trigger::Edge, handler.clone());
        assert!(event_loop.0.aio.set(aio).is_ok());
        handler
    }

    /// Failing to fetch completions is an error of the loop. Memory that the kernel may still write to is
    /// not freed (memory contract).
    #[test]
    fn a_context_that_fails_is_an_error_and_keeps_the_memory() {
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let mut aio = LinuxAio::new(CAPACITY, 256).unwrap();
        aio.context.forget_ring();
        put_in(&event_loop, aio);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let file = event_loop.register_file(Arc::new(file.into()));
        let bufs = AlignedBuf::io_bufs(16, 16).unwrap();
        let owner = bufs.owner().unwrap().clone();
        let target: Rc<dyn IoTarget> = Rc::new(Results::default());
        event_loop.submit(&file, IoOp::Read { offset: 0 }, Engine::Native, bufs, &target, 0);
        event_loop.submit_aio();
        event_loop.0.aio.get().unwrap().context.destroy_underneath();
        let error = event_loop.run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "io_getevents's");
        drop(event_loop);
        assert_eq!(Rc::strong_count(&owner), 2);
    }

    /// As epoll does beyond a user's limit of watched descriptors.
    #[test]
    fn an_eventfd_that_cannot_be_watched_is_an_error() {
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let handler = put_in(&event_loop, LinuxAio::new(CAPACITY, 256).unwrap());
        handler.ready(libc::POLLERR as u32);
        let error = event_loop.run_once(false).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }

    /// Reads from the page cache complete within io_submit. Three variants: with the mapped ring; without
    /// it, as on a kernel with another layout; and with a context smaller than the loop believes, so that
    /// io_submit returns EAGAIN (with up to about a hundred CPUs, as the kernel rounds the size up).
    #[test]
    fn completions_are_taken_from_the_ring_or_else_by_a_call() {
        // More than one turn dispatches or one io_getevents fetches.
        const READS: u32 = 1000;
        let file = Arc::new(std::fs::File::open("/proc/self/exe").unwrap().into());
        for (has_ring, capacity) in [(true, CAPACITY), (false, CAPACITY), (true, 1), (false, 1)] {
            let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
            let mut aio = LinuxAio::new(capacity, 256).unwrap();
            assert!(aio.context.has_ring(), "this kernel's ring is the known one");
            if !has_ring {
                aio.context.forget_ring();
            }
            let handler = put_in(&event_loop, aio);
            assert_eq!((handler.can_poll(), handler.poll()), (has_ring, false));
            let file = event_loop.register_file(Arc::clone(&file));
            let results = Rc::new(Results(RefCell::default()));
            let target: Rc<dyn IoTarget> = results.clone();
            for token in 0..READS {
                let bufs = AlignedBuf::io_bufs(16, 16).unwrap();
                let read = IoOp::Read { offset: 0 };
                event_loop.submit(&file, read, Engine::Native, bufs, &target, token);
            }
            event_loop.submit_aio();
            assert_eq!(handler.poll(), has_ring, "seen without a system call");
            assert_eq!(event_loop.with_aio(), u64::from(READS));
            while results.0.borrow().len() < READS as usize {
                event_loop.run_once(true).unwrap();
            }
            assert!(results.0.borrow().iter().all(|result| *result == 16));
            assert_eq!((handler.poll(), event_loop.with_aio()), (false, 0));
        }
    }
}
