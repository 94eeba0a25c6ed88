//! File descriptors with callbacks: armed, fired, removed (removal contract).

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::polling::policy::SourceState;
use crate::ring::{RingOp, is_transient};
use crate::slots::{SlotId, Slots, UserData};

/// A file descriptor and, optionally, a check for events without a system call.
///
/// ```
/// use std::cell::Cell;
/// use std::os::fd::OwnedFd;
/// use std::rc::Rc;
/// use std::sync::Arc;
///
/// use event_loop::{EventLoop, Handler, LoopConfig, Progress, Trigger};
///
/// struct Kicks(Cell<u32>);
///
/// impl Handler for Kicks {
///     fn ready(&self, _events: u32) -> Progress {
///         self.0.set(self.0.get() + 1);
///         Progress::Done
///     }
/// }
///
/// let event_loop = EventLoop::new(LoopConfig::default())?;
/// let kick: Arc<OwnedFd> = Arc::new(nix::sys::eventfd::EventFd::new()?.into());
/// let kicks = Rc::new(Kicks(Cell::new(0)));
/// // Edge-triggered, an eventfd need not be read: each write is an event.
/// let events = libc::POLLIN as u32;
/// let id = event_loop.add_handler(kick.clone(), events, Trigger::Edge, kicks.clone());
/// for n in 1..=3 {
///     nix::unistd::write(&*kick, &1_u64.to_ne_bytes())?;
///     while kicks.0.get() < n {
///         event_loop.run_once(true)?;
///     }
/// }
/// event_loop.remove_handler(id);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// All calls are made on the loop's thread with no borrow of the loop held. A handler may add and remove
/// handlers, itself included.
pub trait Handler {
    /// Handles an event.
    ///
    /// `events`: the `POLL*` bits with which the descriptor fired; 0 if a poll found the event.
    fn ready(&self, events: u32) -> Progress;

    /// Returns whether the loop may call [`poll`](Self::poll) instead of waiting.
    fn can_poll(&self) -> bool {
        false
    }

    /// Checks for an event without a system call.
    ///
    /// If `true`, the loop calls [`ready`](Self::ready).
    fn poll(&self) -> bool {
        false
    }

    /// Begins polling: the other side need not signal any more.
    fn poll_begin(&self) {}

    /// Ends polling before the loop sleeps: the other side must signal again.
    ///
    /// The loop then calls [`poll`](Self::poll) once more, since an event may have raced.
    fn poll_end(&self) {}
}

/// Whether a handler has work left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// None: call again when an event arrives.
    Done,
    /// The handler stopped early for the loop's other sources (fairness contract): call again in the next
    /// iteration, with or without an event.
    More,
}

/// When a descriptor fires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// Each time it becomes ready. An eventfd becomes ready with each write, and need not be read. Armed
    /// once.
    Edge,
    /// As long as it is ready. Armed again after each callback, with the call that waits.
    Level,
}

/// Identifies a handler. Unique for the life of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandlerId {
    slot: SlotId,
    /// The loop's [`Handlers::id`].
    of: u32,
}

/// Distinguishes the loops of a process.
static NEXT_ID: AtomicU32 = AtomicU32::new(0);

/// A handler with its state.
pub(crate) struct Entry {
    pub(crate) handler: Rc<dyn Handler>,
    fd: Arc<OwnedFd>,
    events: u32,
    trigger: Trigger,
    armed: Cell<bool>,
    /// Events that are not dispatched yet.
    pub(crate) fired: Cell<u32>,
    /// The handler is in the ready list.
    pub(crate) listed: Cell<bool>,
    pub(crate) source: Source,
}

impl Entry {
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Identifies the handler in trace events: an address.
    pub(crate) fn trace_node(&self) -> u64 {
        std::ptr::from_ref(self).addr() as u64
    }
}

/// State of adaptive polling per source.
#[derive(Default)]
pub(crate) struct Source {
    pub(crate) state: Cell<SourceState>,
    /// The source had an event in this iteration.
    pub(crate) had_event: Cell<bool>,
    /// Time of its last event, loop time.
    pub(crate) last_event_ns: Cell<u64>,
    /// The source is in the polling set.
    pub(crate) in_set: Cell<bool>,
}

/// A loop's handlers.
pub(crate) struct Handlers {
    id: u32,
    slots: Slots<Rc<Entry>>,
    /// Descriptors of removed handlers with a poll that has not ended. A queued poll that the kernel has not
    /// seen must not find another file under that number.
    leaving: Vec<(SlotId, Arc<OwnedFd>)>,
    /// Handlers to be armed with the next system call.
    to_arm: Vec<SlotId>,
    /// Handlers that fired, in order.
    pub(crate) ready: Vec<SlotId>,
    /// The polling set.
    pub(crate) polling: Vec<SlotId>,
}

impl Default for Handlers {
    fn default() -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (slots, leaving, to_arm, ready, polling) = Default::default();
        Handlers { id, slots, leaving, to_arm, ready, polling }
    }
}

impl Handlers {
    pub(crate) fn add(
        &mut self,
        fd: Arc<OwnedFd>,
        events: u32,
        trigger: Trigger,
        handler: Rc<dyn Handler>,
    ) -> HandlerId {
        let entry = Rc::new(Entry {
            handler,
            fd,
            events,
            trigger,
            armed: Cell::new(false),
            fired: Cell::new(0),
            listed: Cell::new(false),
            source: Source::default(),
        });
        let (id, _) = self.slots.insert(entry);
        self.to_arm.push(id);
        HandlerId { slot: id, of: self.id }
    }

    /// The slot of a handler. `None`: the handler is another loop's.
    pub(crate) fn slot_of(&self, id: HandlerId) -> Option<SlotId> {
        (id.of == self.id).then_some(id.slot)
    }

    pub(crate) fn get(&self, id: SlotId) -> Option<&Rc<Entry>> {
        self.slots.get(id)
    }

    /// Removes a handler. Pending events have an older generation and are ignored. Returns the handler,
    /// since its callback may be running, and whether a poll must be stopped.
    pub(crate) fn remove(&mut self, id: SlotId) -> Option<(Rc<Entry>, bool)> {
        let entry = self.slots.remove(id)?;
        self.polling.retain(|other| *other != id);
        let armed = entry.armed.get();
        if armed {
            self.leaving.push((id, entry.fd.clone()));
        }
        Some((entry, armed))
    }

    /// Whether the descriptor of a removed handler is kept for a poll that has not ended.
    pub(crate) fn is_leaving(&self, id: SlotId) -> bool {
        self.leaving.iter().any(|(left, _)| *left == id)
    }

    /// Takes the next poll to be armed.
    pub(crate) fn take_arming(&mut self) -> Option<(RingOp, UserData)> {
        while let Some(id) = self.to_arm.pop() {
            if let Some(entry) = self.get(id)
                && !entry.armed.replace(true)
            {
                let op = RingOp::PollAdd {
                    fd: entry.fd.as_raw_fd(),
                    events: entry.events,
                    multishot: entry.trigger == Trigger::Edge,
                };
                return Some((op, UserData::Poll(id)));
            }
        }
        None
    }

    /// Whether a poll is to be armed.
    pub(crate) fn must_arm(&self) -> bool {
        !self.to_arm.is_empty()
    }

    /// Handles the completion of a poll: `result` is a mask or a negated errno, `more` events follow.
    pub(crate) fn fired(&mut self, id: SlotId, result: i32, more: bool) {
        let Some(entry) = self.get(id) else {
            if !more {
                self.leaving.retain(|(left, _)| *left != id);
            }
            return;
        };
        if !more {
            entry.armed.set(false);
            // A transient error such as ENOMEM: arm the poll again, so that the handler misses no event.
            if result >= 0 || is_transient(-result) {
                self.to_arm.push(id);
            }
        }
        let Some(entry) = self.get(id) else { return };
        if result < 0 && is_transient(-result) {
            return;
        }
        // A descriptor that cannot be polled shows as an error.
        let events = u32::try_from(result).unwrap_or(libc::POLLERR as u32);
        entry.fired.set(entry.fired.get() | events);
        if !entry.listed.replace(true) {
            self.ready.push(id);
        }
    }

    /// Appends a handler to the ready list without an event of its descriptor.
    pub(crate) fn list_ready(&mut self, id: SlotId) {
        if let Some(entry) = self.get(id)
            && !entry.listed.replace(true)
        {
            self.ready.push(id);
        }
    }

    /// Ids of all handlers, for shutting down.
    pub(crate) fn ids(&self) -> Vec<HandlerId> {
        let of = self.id;
        self.slots.ids().into_iter().map(|slot| HandlerId { slot, of }).collect()
    }
}
