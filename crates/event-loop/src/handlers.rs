//! File descriptors with callbacks: armed, fired, removed (contract E9).

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use crate::polling::policy::SourceState;
use crate::ring::{RingOp, is_transient};
use crate::slots::{GENERATION_MASK, SlotId, UserData};

/// A source of events: a file descriptor and, optionally, a way to look for events without one.
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
/// All calls come from the loop's thread with no borrow of the loop held; a handler may add and
/// remove handlers, itself included.
pub trait Handler {
    /// The descriptor fired (`events`: `POLL*` bits), or a poll found something (`events` is 0).
    fn ready(&self, events: u32) -> Progress;

    /// Whether the loop may ask [`poll`](Self::poll) instead of waiting for the descriptor.
    fn can_poll(&self) -> bool {
        false
    }

    /// Looks for an event without a system call. `true` makes the loop call
    /// [`ready`](Self::ready).
    fn poll(&self) -> bool {
        false
    }

    /// The loop will ask [`poll`](Self::poll) from now on: the other side need not signal.
    fn poll_begin(&self) {}

    /// The loop is about to sleep: the other side must signal. The loop asks
    /// [`poll`](Self::poll) once more afterwards, since an event may have raced.
    fn poll_end(&self) {}
}

/// What a handler left undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Nothing: call again when there is an event.
    Done,
    /// It stopped for the sake of the others (contract E11): call again in the next iteration,
    /// event or not.
    More,
}

/// When a descriptor fires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// Each time it becomes ready anew, as an eventfd does with each write: it need not be read.
    /// One system call arms it for ever.
    Edge,
    /// For as long as it is ready. Armed anew after each callback, with the call that waits.
    Level,
}

/// Names a handler of a loop. Stays unique when its place is used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandlerId(pub(crate) SlotId);

/// A handler with its state.
pub(crate) struct Entry {
    pub(crate) handler: Rc<dyn Handler>,
    fd: Arc<OwnedFd>,
    events: u32,
    trigger: Trigger,
    armed: Cell<bool>,
    /// Events that came and were not dispatched yet.
    pub(crate) fired: Cell<u32>,
    /// Whether it stands in the ready list.
    pub(crate) listed: Cell<bool>,
    pub(crate) source: Source,
}

impl Entry {
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// What tells it from others in a trace: an address.
    pub(crate) fn trace_node(&self) -> u64 {
        std::ptr::from_ref(self).addr() as u64
    }
}

/// What adaptive polling keeps per source.
#[derive(Default)]
pub(crate) struct Source {
    pub(crate) state: Cell<SourceState>,
    /// Had an event in this iteration.
    pub(crate) had_event: Cell<bool>,
    /// When it last had one, loop time.
    pub(crate) last_event_ns: Cell<u64>,
    /// Is in the polling set.
    pub(crate) in_set: Cell<bool>,
}

/// A loop's handlers.
#[derive(Default)]
pub(crate) struct Handlers {
    slots: Vec<(u32, Option<Rc<Entry>>)>,
    free: Vec<u32>,
    /// Descriptors of removed handlers whose polls have not ended: one that is queued, and not yet
    /// with the kernel, must not find another file by that number.
    leaving: Vec<(SlotId, Arc<OwnedFd>)>,
    /// To be armed, or armed anew, with the next system call.
    to_arm: Vec<SlotId>,
    /// Fired, in order.
    pub(crate) ready: Vec<SlotId>,
    /// Being polled before the loop sleeps.
    pub(crate) polling: Vec<SlotId>,
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
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let (generation, slot) = &mut self.slots[index as usize];
        *slot = Some(entry);
        let id = SlotId { index, generation: *generation };
        self.to_arm.push(id);
        HandlerId(id)
    }

    pub(crate) fn get(&self, id: SlotId) -> Option<&Rc<Entry>> {
        match self.slots.get(id.index as usize)? {
            (generation, Some(entry)) if *generation == id.generation => Some(entry),
            _ => None,
        }
    }

    /// Takes a handler out. Events still on their way find a newer generation and are ignored.
    /// Returns it, for its callback may be what is running, and whether a poll must be stopped.
    pub(crate) fn remove(&mut self, id: HandlerId) -> Option<(Rc<Entry>, bool)> {
        self.get(id.0)?;
        let (generation, slot) = &mut self.slots[id.0.index as usize];
        let entry = slot.take()?;
        *generation = generation.wrapping_add(1) & GENERATION_MASK;
        self.free.push(id.0.index);
        self.polling.retain(|other| *other != id.0);
        let armed = entry.armed.get();
        if armed {
            self.leaving.push((id.0, entry.fd.clone()));
        }
        Some((entry, armed))
    }

    /// The polls to be armed now.
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

    /// Whether something waits to be armed.
    pub(crate) fn must_arm(&self) -> bool {
        !self.to_arm.is_empty()
    }

    /// A poll completed with `result`, a mask or a negated errno; `more` events will follow.
    pub(crate) fn fired(&mut self, id: SlotId, result: i32, more: bool) {
        let Some(entry) = self.get(id) else {
            if !more {
                self.leaving.retain(|(left, _)| *left != id);
            }
            return;
        };
        if !more {
            entry.armed.set(false);
            // Out of memory for a moment, say: a handler must not go deaf for that.
            if result >= 0 || is_transient(-result) {
                self.to_arm.push(id);
            }
        }
        let Some(entry) = self.get(id) else { return };
        if result < 0 && is_transient(-result) {
            return;
        }
        // A poll that cannot be had shows as an error on the descriptor.
        let events = u32::try_from(result).unwrap_or(libc::POLLERR as u32);
        entry.fired.set(entry.fired.get() | events);
        if !entry.listed.replace(true) {
            self.ready.push(id);
        }
    }

    /// Lists a handler as ready without its descriptor: a poll found something, or it has more.
    pub(crate) fn list_ready(&mut self, id: SlotId) {
        if let Some(entry) = self.get(id)
            && !entry.listed.replace(true)
        {
            self.ready.push(id);
        }
    }

    /// All handlers, for shutting down.
    pub(crate) fn ids(&self) -> Vec<HandlerId> {
        self.slots
            .iter()
            .zip(0..)
            .filter(|((_, entry), _)| entry.is_some())
            .map(|((generation, _), index)| HandlerId(SlotId { index, generation: *generation }))
            .collect()
    }
}
