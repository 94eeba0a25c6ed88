//! What threads share: the primitives, from std or from loom when it model-checks, and how a lock is
//! taken.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU32, Ordering, fence},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU32, Ordering, fence},
};

/// Takes a lock. ringmill's crates take locks only by this function.
///
/// So tests can count them (feature `counting`).
///
/// A poisoned lock is taken, too: what ringmill's locks guard is valid at any step.
#[allow(clippy::disallowed_methods, reason = "the one place")]
pub fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    #[cfg(feature = "counting")]
    crate::counting::lock_taken();
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// [`lock`], of what is model-checked.
#[cfg(not(loom))]
pub(crate) use self::lock as lock_checked;

/// [`lock`], of what is model-checked.
#[cfg(loom)]
#[allow(clippy::disallowed_methods, reason = "loom's own")]
pub(crate) fn lock_checked<T>(mutex: &Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
