//! Interrupts of a device: the eventfds that a client wants signalled, and what is masked.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use devices::nvme::Messages;
use devices::pci::Description;
use event_loop::{Signal, sync::lock};
use nix::errno::Errno;

use super::hand_over;
use super::wire::irqs::{mask, set_eventfd, set_unmask_eventfd};
use super::wire::message::number;
use super::wire::{IrqAction, IrqData, IrqInfo, SetIrqs};
use crate::vhost_user::EventFd;
use crate::vhost_user::handover::Saved;

/// Kinds of interrupts (linux/vfio.h).
const INTX: u32 = 0;
const MSI: u32 = 1;
const MSIX: u32 = 2;
/// Number of kinds of interrupts.
///
/// Errors and requests of the host are among them, which this server does not have.
pub const IRQ_KINDS: u32 = 5;

/// A device's interrupts. Raised by any thread.
///
/// A client sets eventfds for the kind of interrupts that its guest has enabled: which that is, is not looked
/// up in the configuration space, since clients keep parts of it, such as the MSI-X table, to themselves.
pub struct Interrupts {
    has_pin: bool,
    state: Mutex<InterruptState>,
    /// Changes with each change of the eventfds of MSI-X, after it.
    msix_version: AtomicU64,
}

struct InterruptState {
    /// What the device wants the level interrupt to be.
    level: bool,
    /// A level interrupt is masked when it is signalled, until the client has taken note.
    masked: bool,
    intx: Option<Vector>,
    msi: Vec<Option<Vector>>,
    msix: Vec<Option<Vector>>,
}

/// What a message is sent by.
struct Vector {
    fd: EventFd,
    signal: Signal,
}

impl Vector {
    fn new(fd: EventFd) -> Self {
        Vector { signal: Signal::new(fd.fd().clone()), fd }
    }
}

fn none<T>(vectors: usize) -> Vec<Option<T>> {
    std::iter::repeat_with(|| None).take(vectors).collect()
}

impl Interrupts {
    /// Returns the interrupts of a device, without an eventfd.
    pub fn new(of: &Description) -> Self {
        let msix = of.msix.map_or(0, |msix| usize::from(msix.vectors));
        Interrupts {
            has_pin: of.pin.is_some(),
            state: Mutex::new(InterruptState {
                level: false,
                masked: false,
                intx: None,
                msi: none(usize::from(of.msi.is_some())),
                msix: none(msix),
            }),
            msix_version: AtomicU64::new(0),
        }
    }

    /// Changes the level of the device's level interrupt.
    pub fn set_level(&self, level: bool) {
        let mut state = lock(&self.state);
        state.level = level;
        state.signal_level();
    }

    /// Sends the message with the number `vector`, from 0.
    pub fn send(&self, vector: usize) {
        let state = lock(&self.state);
        for vectors in [&state.msi, &state.msix] {
            if let Some(Some(vector)) = vectors.get(vector) {
                vector.signal.send();
            }
        }
    }

    /// Returns a kind of interrupts. `None`: `index` is not one of those.
    pub fn info(&self, index: u32) -> Option<IrqInfo> {
        let count = match index {
            INTX => u32::from(self.has_pin),
            MSI => lock(&self.state).msi.len() as u32,
            MSIX => lock(&self.state).msix.len() as u32,
            3..IRQ_KINDS => 0,
            _ => return None,
        };
        Some(IrqInfo { index, count, is_level: index == INTX })
    }

    /// Carries out a client's message about interrupts (DEVICE_SET_IRQS).
    ///
    /// Returns an eventfd by which the client unmasks the level interrupt from now on, if the message sets one: the
    /// caller watches the eventfd and calls [`unmask`](Self::unmask).
    ///
    /// # Errors
    ///
    /// `EINVAL`: there are no such interrupts, that cannot be done to them, or a descriptor is no eventfd.
    pub fn set(&self, irqs: SetIrqs<'_>) -> Result<Option<Unmasker>, Errno> {
        let SetIrqs { index, range, action, data } = irqs;
        let info = self.info(index).ok_or(Errno::EINVAL)?;
        if range.end > info.count {
            return Err(Errno::EINVAL);
        }
        let any = !range.is_empty();
        let range = range.start as usize..range.end as usize;
        // Eventfds are looked at before anything is changed.
        let data = match data {
            IrqData::EventFds(fds) => {
                let fds = fds.into_iter().map(EventFd::new).collect::<Result<Vec<_>, _>>();
                let fds = fds.map_err(|_| Errno::EINVAL)?;
                if (index, action) == (INTX, IrqAction::Unmask) {
                    return Ok(any.then(|| Unmasker(fds.into_iter().next())));
                }
                Wanted::Signals(fds.into_iter().map(Vector::new).collect())
            }
            IrqData::None => Wanted::All,
            IrqData::Bool(bools) => Wanted::Some(bools),
        };
        let mut state = lock(&self.state);
        match (index, action, data) {
            (_, IrqAction::Trigger, Wanted::All) if !any => state.forget(index),
            (INTX, IrqAction::Trigger, Wanted::Signals(mut signals)) => {
                if any {
                    state.intx = signals.pop();
                    state.masked = false;
                    state.signal_level();
                }
            }
            (_, IrqAction::Trigger, Wanted::Signals(signals)) => {
                let mut signals = signals.into_iter();
                for vector in state.vectors(index).get_mut(range).unwrap_or_default() {
                    *vector = signals.next();
                }
            }
            (INTX, IrqAction::Trigger, wanted) => {
                if wanted.has(0)
                    && let Some(vector) = &state.intx
                {
                    vector.signal.send();
                }
            }
            (_, IrqAction::Trigger, wanted) => {
                let vectors = state.vectors(index).get(range).unwrap_or_default();
                for (number, vector) in vectors.iter().enumerate() {
                    if wanted.has(number)
                        && let Some(vector) = vector
                    {
                        vector.signal.send();
                    }
                }
            }
            (INTX, IrqAction::Mask, wanted @ (Wanted::All | Wanted::Some(_))) => {
                state.masked |= any && wanted.has(0);
            }
            (INTX, IrqAction::Unmask, wanted @ (Wanted::All | Wanted::Some(_))) => {
                if any && wanted.has(0) {
                    state.masked = false;
                    state.signal_level();
                }
            }
            // Messages are not masked here, and no eventfd masks.
            (_, IrqAction::Mask | IrqAction::Unmask, _) => return Err(Errno::EINVAL),
        }
        drop(state);
        self.msix_version.fetch_add(1, Ordering::Release);
        Ok(None)
    }

    /// The messages that bring new interrupts to the same state, of a device that wants none.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(super) fn save(&self) -> io::Result<Vec<Saved>> {
        let state = lock(&self.state);
        let set = |index: u32, at: u32, fd: &EventFd| {
            let payload = set_eventfd(index, at);
            hand_over::message(number::DEVICE_SET_IRQS, payload, Some(fd.fd()))
        };
        let mut messages = Vec::new();
        if let Some(vector) = &state.intx {
            messages.push(set(INTX, 0, &vector.fd)?);
            if state.masked {
                messages.push(hand_over::message(number::DEVICE_SET_IRQS, mask(INTX, 0), None)?);
            }
        }
        for (index, vectors) in [(MSI, &state.msi), (MSIX, &state.msix)] {
            for (at, vector) in (0..).zip(vectors) {
                if let Some(vector) = vector {
                    messages.push(set(index, at, &vector.fd)?);
                }
            }
        }
        Ok(messages)
    }

    /// Unmasks the level interrupt, of which the client has taken note.
    ///
    /// An interrupt that is still raised is signalled again.
    pub fn unmask(&self) {
        let mut state = lock(&self.state);
        state.masked = false;
        state.signal_level();
    }

    /// Forgets a client's eventfds.
    pub fn clear(&self) {
        let mut state = lock(&self.state);
        for index in [INTX, MSI, MSIX] {
            state.forget(index);
        }
        drop(state);
        self.msix_version.fetch_add(1, Ordering::Release);
    }
}

/// Sends MSI-X messages from one thread.
///
/// Takes no lock as long as the client sets no other eventfds.
pub struct Messenger {
    interrupts: Arc<Interrupts>,
    /// [`Interrupts::msix_version`] of these. `None`: none was seen.
    version: Cell<Option<u64>>,
    signals: RefCell<Vec<Option<Signal>>>,
}

impl Messenger {
    /// Returns a messenger for a device's interrupts.
    pub fn new(interrupts: Arc<Interrupts>) -> Self {
        Messenger { interrupts, version: Cell::new(None), signals: RefCell::default() }
    }

    #[cold]
    fn refresh(&self, version: u64) {
        let signal = |vector: &Option<Vector>| {
            vector.as_ref().map(|vector| Signal::new(vector.fd.fd().clone()))
        };
        let signals = lock(&self.interrupts.state).msix.iter().map(signal).collect();
        self.signals.replace(signals);
        self.version.set(Some(version));
    }
}

impl Messages for Messenger {
    fn send(&self, vector: u16) {
        let version = self.interrupts.msix_version.load(Ordering::Acquire);
        if self.version.get() != Some(version) {
            self.refresh(version);
        }
        if let Some(Some(signal)) = self.signals.borrow().get(usize::from(vector)) {
            signal.send();
        }
    }
}

/// The eventfd by which a client unmasks the level interrupt.
///
/// KVM writes it when the guest has ended the interrupt. `None`: there is no such eventfd any more.
#[derive(Debug)]
pub struct Unmasker(pub Option<EventFd>);

/// The message that sets the eventfd by which the client unmasks the level interrupt.
///
/// # Errors
///
/// As of fcntl(2).
pub(super) fn unmasker(fd: &EventFd) -> io::Result<Saved> {
    let payload = set_unmask_eventfd(INTX, 0);
    hand_over::message(number::DEVICE_SET_IRQS, payload, Some(fd.fd()))
}

/// Which interrupts of a range something is done to.
enum Wanted<'a> {
    All,
    Some(&'a [u8]),
    /// Those with one of these each; none have any if there are none.
    Signals(Vec<Vector>),
}

impl Wanted<'_> {
    fn has(&self, number: usize) -> bool {
        match self {
            Wanted::All => true,
            Wanted::Some(bools) => bools.get(number).is_some_and(|wanted| *wanted != 0),
            Wanted::Signals(_) => false,
        }
    }
}

impl InterruptState {
    /// Signals the level interrupt, if it is due.
    fn signal_level(&mut self) {
        if self.level
            && !self.masked
            && let Some(vector) = &self.intx
        {
            vector.signal.send();
            self.masked = true;
        }
    }

    /// The vectors of a kind of messages.
    fn vectors(&mut self, index: u32) -> &mut [Option<Vector>] {
        match index {
            MSI => &mut self.msi,
            MSIX => &mut self.msix,
            _ => &mut [],
        }
    }

    fn forget(&mut self, index: u32) {
        if index == INTX {
            (self.intx, self.masked) = (None, false);
        }
        self.vectors(index).fill_with(|| None);
    }
}
