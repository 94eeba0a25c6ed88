//! Signals eventfds by completions of empty reads.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::abi::Iocb;
use super::context::Context;
use crate::ring::Completion;

/// Completions taken before each signal. As each signal causes one completion, none pile up.
const REAPED: usize = 8;

/// A context whose completions signal eventfds. The kernel's increment never blocks and leaves a full
/// counter unchanged.
pub(crate) struct Signals {
    /// `None` only while dropped.
    context: Option<Context>,
    completions: RefCell<Vec<Completion>>,
    empty: &'static OwnedFd,
}

impl Signals {
    /// Creates a context.
    ///
    /// # Errors
    ///
    /// Those of io_setup(2) and memfd_create(2).
    pub(crate) fn new() -> io::Result<Signals> {
        let completions = RefCell::new(Vec::with_capacity(REAPED));
        Ok(Signals { empty: empty_file()?, context: Some(Context::new(1)?), completions })
    }

    /// Adds one to the counter of `eventfd`. Returns `false` on failure.
    pub(crate) fn send(&self, eventfd: &OwnedFd) -> bool {
        let Some(context) = &self.context else { return false };
        let mut completions = self.completions.borrow_mut();
        completions.clear();
        // Makes room for the next completion.
        if context.reap(&mut completions).is_err() {
            return false;
        }
        let mut iocb = Iocb::nothing(self.empty.as_raw_fd(), eventfd.as_raw_fd());
        // SAFETY: the operation names no memory, and completes within the call, as a read of no bytes from a
        // file in memory does. Both descriptors are open across the call.
        unsafe { context.submit(&mut [&raw mut iocb]) }.is_ok_and(|taken| taken == 1)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // Nothing is in flight. If destroying fails, some memory leaks.
        self.context.take().map(Context::destroy);
    }
}

/// An empty file that can be read without blocking.
fn empty_file() -> io::Result<&'static OwnedFd> {
    static EMPTY: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(file) = EMPTY.get() {
        return Ok(file);
    }
    let file = memfd_create("empty", MFdFlags::MFD_CLOEXEC)?;
    Ok(EMPTY.get_or_init(|| file))
}
