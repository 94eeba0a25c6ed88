//! Eventfds signalled by completions of operations that do nothing.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::abi::Iocb;
use super::context::Context;
use crate::ring::Completion;

/// As many completions as are looked at before the next signal. None is left over: each signal makes one.
const REAPED: usize = 8;

/// A context whose completions add to an eventfd, as the kernel does it: without ever waiting, and leaving a
/// counter that is full as it is.
pub(crate) struct Signals {
    /// `None`: gone.
    context: Option<Context>,
    completions: RefCell<Vec<Completion>>,
    empty: &'static OwnedFd,
}

impl Signals {
    /// One for each eventfd.
    ///
    /// # Errors
    ///
    /// As of io_setup(2) and memfd_create(2).
    pub(crate) fn new() -> io::Result<Signals> {
        let completions = RefCell::new(Vec::with_capacity(REAPED));
        Ok(Signals { empty: empty_file()?, context: Some(Context::new(1)?), completions })
    }

    /// Adds one to the counter of `eventfd`. `false`: that could not be.
    pub(crate) fn send(&self, eventfd: &OwnedFd) -> bool {
        let Some(context) = &self.context else { return false };
        let mut completions = self.completions.borrow_mut();
        completions.clear();
        // There is room for one more then.
        if context.reap(&mut completions).is_err() {
            return false;
        }
        let mut iocb = Iocb::nothing(self.empty.as_raw_fd(), eventfd.as_raw_fd());
        // SAFETY: the operation names no memory, and is done when the call returns, which a read of nothing
        // from a file in memory is; both descriptors are open across the call.
        unsafe { context.submit(&mut [&raw mut iocb]) }.is_ok_and(|taken| taken == 1)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // Nothing is in flight. One that stays costs some memory.
        self.context.take().map(Context::destroy);
    }
}

/// A file that can be read without waiting for anything, and has nothing in it.
fn empty_file() -> io::Result<&'static OwnedFd> {
    static EMPTY: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(file) = EMPTY.get() {
        return Ok(file);
    }
    let file = memfd_create("empty", MFdFlags::MFD_CLOEXEC)?;
    Ok(EMPTY.get_or_init(|| file))
}
