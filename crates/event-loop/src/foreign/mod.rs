//! Adapters that run a loop inside a foreign loop (foreign-loop contract), each behind a feature of its name.
//!
//! Both only translate [`prepare`](EventLoop::prepare), [`check`](EventLoop::check) and
//! [`dispatch`](EventLoop::dispatch) to the foreign loop. They are examples for other loops. Busy polling is
//! off inside a foreign loop. Deadlines have the resolution of the foreign loop's timers, and are never
//! early. Everything else works as in [`run`](EventLoop::run).

#[cfg(feature = "glib")]
pub mod glib;
#[cfg(feature = "tokio")]
pub mod tokio;

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use crate::event_loop::EventLoop;

/// Returns the descriptor for the foreign loop to watch. It stays open as long as the loop.
fn descriptor(event_loop: &EventLoop) -> io::Result<RawFd> {
    let fd = event_loop.pollable_fd().ok_or_else(|| {
        let name = event_loop.handle();
        let why = format!(
            "event loop {}: {} shows its completions on no descriptor; \
             a loop to be run inside a foreign one is created without, as RingFlags::BEST",
            name.name(),
            event_loop.ring(),
        );
        io::Error::new(io::ErrorKind::Unsupported, why)
    })?;
    Ok(fd.as_raw_fd())
}
