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
}

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
        Ok(StopSignals { ready: Readiness::new(event_loop, Arc::new(dup), events.into()), fd })
    }

    /// Waits for the next signal.
    pub(crate) async fn next(&mut self) -> &'static str {
        loop {
            if let Ok(Some(info)) = self.fd.read_signal() {
                let number = i32::try_from(info.ssi_signo).unwrap_or_default();
                return Signal::try_from(number).map_or("a signal", Signal::as_str);
            }
            self.ready.wait().await;
        }
    }

    /// Waits for a second signal after `first`. SIGHUP does not count: a closed terminal or a service manager
    /// sends it together with another signal, in any order.
    pub(crate) async fn insisted(&mut self, first: &str) {
        let hang_up = Signal::SIGHUP.as_str();
        let mut wanted = if first == hang_up { 2 } else { 1 };
        while wanted > 0 {
            if self.next().await != hang_up {
                wanted -= 1;
            }
        }
    }
}
