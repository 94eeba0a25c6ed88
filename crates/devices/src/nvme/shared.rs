//! What the controller and its workers share: doorbells, memory, the write cache, what went wrong.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::Signal;
use event_loop::sync::lock;
use guest_memory::GuestMemory;
use nix::sys::eventfd::{EfdFlags, EventFd};
use queue::pause::pause;

use super::bits::DoorbellOf;
use super::logs::ErrorLog;
use super::namespace::Namespace;
use stats::QueueStats;

/// Sends a controller's interrupts from one thread.
pub trait Messages {
    /// Sends the message with the number `vector`, from 0.
    fn send(&self, vector: u16);
}

pub(crate) struct Shared {
    pub(crate) memory: SharedMemory,
    /// The page of doorbells, if they are mapped.
    pub(crate) page: Option<SharedMemory>,
    /// Whether writes may stay in a cache until they are flushed.
    pub(crate) write_cache: AtomicBool,
    pub(crate) namespaces: Vec<Namespace>,
    /// Commands that have failed.
    pub(crate) errors: Mutex<ErrorLog>,
    /// By I/O queue.
    pub(crate) stats: Vec<Arc<QueueStats>>,
}

impl Shared {
    /// Identifies the controller in trace events: an address.
    pub(crate) fn trace_id(&self) -> u64 {
        std::ptr::from_ref(self).addr() as u64
    }

    /// The namespace of this number.
    #[inline]
    pub(crate) fn namespace(&self, nsid: u32) -> Option<&Namespace> {
        self.namespaces.get((nsid as usize).checked_sub(1)?)
    }
}

/// No value was written since the last was taken.
const NONE: u32 = u32::MAX;

/// The worker runs, or polls: it looks again before it sleeps.
const AWAKE: u8 = 0;
/// The worker may sleep: it has to be signalled.
const ASLEEP: u8 = 1;
/// There are values to be taken.
const RUNG: u8 = 2;

/// The doorbell registers of the I/O queues, from the control loop to one worker.
pub(crate) struct Doorbells {
    tails: Box<[AtomicU32]>,
    heads: Box<[AtomicU32]>,
    state: AtomicU8,
    fd: Arc<OwnedFd>,
    /// Used by the control loop alone, under a lock that nobody else takes.
    signal: Mutex<Signal>,
}

impl Doorbells {
    /// Those of so many I/O queues.
    ///
    /// # Errors
    ///
    /// There is no eventfd.
    pub(crate) fn new(queues: u16) -> std::io::Result<Self> {
        let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        let fd: Arc<OwnedFd> = Arc::new(fd.into());
        let none = || (0..queues).map(|_| AtomicU32::new(NONE)).collect();
        Ok(Doorbells {
            tails: none(),
            heads: none(),
            state: AtomicU8::new(AWAKE),
            signal: Mutex::new(Signal::new(fd.clone())),
            fd,
        })
    }

    /// By which the worker is woken.
    pub(crate) fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    fn register(&self, of: DoorbellOf) -> Option<&AtomicU32> {
        let (registers, qid) = match of {
            DoorbellOf::Submission(qid) => (&self.tails, qid),
            DoorbellOf::Completion(qid) => (&self.heads, qid),
        };
        registers.get(usize::from(qid).checked_sub(1)?)
    }

    /// The driver has written a register.
    pub(crate) fn ring(&self, of: DoorbellOf, value: u32) {
        let Some(register) = self.register(of) else { return };
        // No queue has so many entries: it is as wrong as any other value beyond the end.
        register.store(value.min(NONE - 1), Ordering::Release);
        pause();
        if self.state.swap(RUNG, Ordering::AcqRel) == ASLEEP {
            lock(&self.signal).send();
        }
    }

    /// A queue is new: what was written to its register before is no matter.
    pub(crate) fn clear(&self, of: DoorbellOf) {
        if let Some(register) = self.register(of) {
            register.store(NONE, Ordering::Relaxed);
        }
    }

    /// Takes the value of a register; `None`: it was not written.
    #[inline]
    pub(crate) fn take(&self, of: DoorbellOf) -> Option<u32> {
        let register = self.register(of)?;
        if register.load(Ordering::Relaxed) == NONE {
            return None;
        }
        Some(register.swap(NONE, Ordering::Acquire)).filter(|value| *value != NONE)
    }

    /// Whether registers were written. To be called before they are taken: those that are written afterwards show
    /// again.
    #[inline]
    pub(crate) fn were_rung(&self) -> bool {
        self.is_rung() && self.state.swap(AWAKE, Ordering::AcqRel) == RUNG
    }

    /// Whether registers were written that nobody has taken.
    #[inline]
    pub(crate) fn is_rung(&self) -> bool {
        self.state.load(Ordering::Relaxed) == RUNG
    }

    /// Has the next write signal. `false`: one has come before.
    pub(crate) fn fall_asleep(&self) -> bool {
        let asleep =
            self.state.compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Acquire);
        asleep != Err(RUNG)
    }

    /// Has writes not signal: the worker polls.
    pub(crate) fn stay_awake(&self) {
        let _ = self.state.compare_exchange(ASLEEP, AWAKE, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// The guest's memory, which changes rarely: whoever uses it looks at the version first.
pub(crate) struct SharedMemory {
    version: AtomicU64,
    memory: Mutex<Arc<GuestMemory>>,
}

impl SharedMemory {
    pub(crate) fn new() -> Self {
        SharedMemory { version: AtomicU64::new(0), memory: Mutex::default() }
    }

    pub(crate) fn with(memory: Arc<GuestMemory>) -> Self {
        SharedMemory { version: AtomicU64::new(0), memory: Mutex::new(memory) }
    }

    pub(crate) fn set(&self, memory: Arc<GuestMemory>) {
        let before = std::mem::replace(&mut *lock(&self.memory), memory);
        self.version.fetch_add(1, Ordering::Release);
        drop(before);
    }

    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    pub(crate) fn get(&self) -> Arc<GuestMemory> {
        lock(&self.memory).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signals(doorbells: &Doorbells) -> u64 {
        let mut count = [0; 8];
        match nix::unistd::read(doorbells.fd(), &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }

    #[test]
    fn only_a_sleeping_worker_is_signalled() {
        let doorbells = Doorbells::new(2).unwrap();
        let tail = DoorbellOf::Submission(2);
        doorbells.ring(tail, 1);
        doorbells.ring(tail, 2);
        assert_eq!(signals(&doorbells), 0);
        assert!(!doorbells.fall_asleep(), "it has something to do");
        assert!(doorbells.were_rung());
        assert_eq!(doorbells.take(tail), Some(2));
        assert_eq!(doorbells.take(tail), None);
        assert!(doorbells.fall_asleep() && doorbells.fall_asleep());
        doorbells.ring(DoorbellOf::Completion(1), u32::MAX);
        doorbells.ring(tail, 3);
        assert_eq!(signals(&doorbells), 1);
        assert!(doorbells.were_rung() && !doorbells.were_rung());
        assert_eq!(doorbells.take(DoorbellOf::Completion(1)), Some(u32::MAX - 1));
        doorbells.fall_asleep();
        doorbells.stay_awake();
        doorbells.ring(tail, 1);
        assert_eq!(signals(&doorbells), 0, "it polls");
        doorbells.ring(DoorbellOf::Submission(0), 1);
        doorbells.ring(DoorbellOf::Submission(3), 1);
        assert_eq!(doorbells.take(DoorbellOf::Submission(3)), None);
    }
}
