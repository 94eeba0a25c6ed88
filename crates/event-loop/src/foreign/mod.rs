//! A loop inside a loop of somebody else's (contract E2): adapters, each behind a feature of its name.
//!
//! Both are nothing but [`prepare`](EventLoop::prepare), [`check`](EventLoop::check) and
//! [`dispatch`](EventLoop::dispatch) in the foreign loop's terms, and an example for those of other
//! loops. Busy polling is off inside a foreign loop; everything else works as in
//! [`run`](EventLoop::run). Deadlines are kept as finely as the foreign loop's own timers are, and never
//! early.

#[cfg(feature = "glib")]
pub mod glib;
#[cfg(feature = "tokio")]
pub mod tokio;

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use crate::event_loop::EventLoop;

/// What the foreign loop watches. It stays open for as long as the loop.
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
