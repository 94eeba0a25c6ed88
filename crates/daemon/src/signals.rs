//! SIGINT, SIGTERM and SIGHUP, as descriptors on the control loop.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use event_loop::{EventLoop, Readiness};
use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// The signals that stop the daemon.
pub(crate) struct StopSignals {
    fd: SignalFd,
    ready: Readiness,
    event_loop: EventLoop,
    /// `--stop-timeout`, nanoseconds. `None`: no limit.
    timeout_ns: Option<u64>,
    /// When the end was asked for, nanoseconds.
    asked_ns: Option<u64>,
}

/// Signals within this time of the first one are the same request: timeout(1) signals both its child and its process
/// group, a terminal and a service manager send SIGHUP as well.
const SAME_REQUEST_NS: u64 = 1_000_000_000;

/// Blocks the stop signals in the calling thread and its future threads.
///
/// Called before any other thread exists.
///
/// # Errors
///
/// That of pthread_sigmask(3).
pub fn block() -> Result<SigSet, Errno> {
    handled().thread_block()?;
    Ok(stop())
}

/// All signals that the daemon receives through descriptors.
pub(crate) fn handled() -> SigSet {
    let mut set = stop();
    set.add(Signal::SIGUSR2);
    set
}

fn stop() -> SigSet {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGHUP);
    set
}

fn upgrade() -> SigSet {
    let mut set = SigSet::empty();
    set.add(Signal::SIGUSR2);
    set
}

/// Calls `on_upgrade` for each SIGUSR2, as long as the loop runs. The signal is blocked.
pub(crate) fn watch_upgrade(
    event_loop: &EventLoop,
    on_upgrade: impl Fn() + 'static,
) -> Result<(), Errno> {
    let mut signals = StopSignals::new(event_loop, &upgrade())?;
    event_loop.spawn(async move {
        loop {
            signals.next().await;
            on_upgrade();
        }
    });
    Ok(())
}

impl StopSignals {
    /// Watches the blocked signals.
    pub(crate) fn new(event_loop: &EventLoop, blocked: &SigSet) -> Result<Self, Errno> {
        let fd = SignalFd::with_flags(blocked, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let dup: OwnedFd = fd.as_fd().try_clone_to_owned().map_err(|_| Errno::last())?;
        let events = nix::poll::PollFlags::POLLIN.bits().cast_unsigned();
        let ready = Readiness::new(event_loop, Arc::new(dup), events.into());
        let event_loop = event_loop.clone();
        Ok(StopSignals { fd, ready, event_loop, timeout_ns: None, asked_ns: None })
    }

    /// Sets the time that the daemon has to end, nanoseconds. `None`: no limit.
    pub(crate) fn set_timeout(&mut self, timeout_ns: Option<u64>) {
        self.timeout_ns = timeout_ns;
    }

    /// Returns the time until the process has to end, nanoseconds. `None`: no limit.
    ///
    /// The time counts from the first signal, or else from the first call.
    pub(crate) fn left_ns(&mut self) -> Option<u64> {
        let now_ns = self.event_loop.now_ns();
        let asked_ns = *self.asked_ns.get_or_insert(now_ns);
        Some(self.timeout_ns?.saturating_sub(now_ns.saturating_sub(asked_ns)))
    }

    /// Completes when a part of the time that is left has passed: half of it for `parts` 2.
    pub(crate) fn part_has_passed(&mut self, parts: u64) -> impl Future<Output = ()> + use<> {
        let end = self.left_ns().map(|ns| {
            self.event_loop.sleep_until(self.event_loop.now_ns().saturating_add(ns / parts))
        });
        async move {
            match end {
                Some(end) => end.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Waits for the next signal.
    pub(crate) async fn next(&mut self) -> &'static str {
        loop {
            if let Ok(Some(info)) = self.fd.read_signal() {
                self.asked_ns.get_or_insert(self.event_loop.now_ns());
                let number = i32::try_from(info.ssi_signo).unwrap_or_default();
                return Signal::try_from(number).map_or("a signal", Signal::as_str);
            }
            self.ready.wait().await;
        }
    }

    /// Waits for a signal that insists on an end that was asked for just now. SIGHUP does not: a terminal that
    /// closes sends it.
    pub(crate) async fn insisted(&mut self) {
        let asked = self.event_loop.now_ns();
        while self.next().await == Signal::SIGHUP.as_str()
            || self.event_loop.now_ns().saturating_sub(asked) < SAME_REQUEST_NS
        {}
    }
}
