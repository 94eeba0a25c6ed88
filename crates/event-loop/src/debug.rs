//! `Debug` of types whose fields tell a reader nothing.

use std::fmt::{Debug, Formatter, Result};

use crate::{BottomHalf, EventLoop, Gather, Meter, Readiness, Turn, mailbox, oneshot};

/// Prints a type's name.
macro_rules! opaque {
    ($($name:literal: [$($generics:tt)*] $of:ty,)*) => {$(
        impl $($generics)* Debug for $of {
            fn fmt(&self, f: &mut Formatter<'_>) -> Result {
                f.debug_struct($name).finish_non_exhaustive()
            }
        }
    )*};
}

opaque! {
    "BottomHalf": [] BottomHalf,
    "Gather": [] Gather,
    "Meter": [] Meter,
    "Turn": [] Turn<'_>,
    "Sender": [<T>] oneshot::Sender<T>,
    "Receiver": [<T>] oneshot::Receiver<T>,
    "Sender": [<T>] mailbox::Sender<T>,
    "Receiver": [<T>] mailbox::Receiver<T>,
}

#[cfg(any(test, feature = "sim"))]
opaque! {
    "Sim": [] crate::ring::sim::Sim,
    "Storage": [] crate::ring::sim::Storage,
    "Unflushed": [] crate::ring::sim::Unflushed,
}

#[cfg(feature = "glib")]
opaque! {
    "LoopSource": [] crate::foreign::glib::LoopSource,
}

impl Debug for EventLoop {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_tuple("EventLoop").field(&self.0.shared.name).finish()
    }
}

impl Debug for Readiness {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_tuple("Readiness").field(&std::os::fd::AsFd::as_fd(self)).finish()
    }
}
