//! Trace points of the loop and of the layers above it.
//!
//! An [`Event`] appears in two ways. As a **static probe** (USDT) of provider `ringmill`: `perf`, `bpftrace`
//! and `gdb` find it in the program's `.note.stapsdt` section and attach to it at run time. And as a line in
//! a **log**, once [`log_events`] has enabled it.
//!
//! Both share one counter per event, the probe's semaphore. The kernel increments it for each tool that
//! attaches, [`log_events`] for the log. At 0 an event costs one load and one branch that is not taken. Its
//! arguments are not evaluated, and the code after the branch is out of line.
//!
//! [`trace!`](crate::trace!) fires an event; [`events`] is the table of all of them.

#[macro_use]
mod sdt;

#[doc(hidden)]
pub mod events;
mod log;
mod operation;

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

pub use events::EVENTS;

/// Fires an event of the table: `trace!(poll_grow(ctx, old, new))`.
///
/// The arguments are evaluated only if the event is enabled. They are converted with [`Into`] to the types
/// in the table: [`u64`], [`i64`] or [`&CStr`](std::ffi::CStr). For use on any thread.
#[macro_export]
macro_rules! trace {
    ($event:ident($($arg:expr),+ $(,)?)) => {
        if $crate::trace::events::$event::is_enabled() {
            $crate::trace::events::$event::fire($($arg.into()),+);
        }
    };
}

/// A trace point of the table.
#[derive(Debug)]
pub struct Event {
    /// Its name, which is the probe's name and the first word of a log line.
    pub name: &'static str,
    /// When the event fires.
    pub help: &'static str,
    /// Its arguments, in order.
    pub args: &'static [Arg],
    /// Number of users: the log, and each tool. In the program's data, where the kernel finds it by the
    /// probe's note.
    pub(crate) semaphore: &'static AtomicU16,
    pub(crate) logged: AtomicBool,
}

/// An argument of an [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arg {
    /// The name before the value in the log.
    pub name: &'static str,
    /// Its format.
    pub format: Format,
}

/// The format of an argument. A probe passes each as 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// An unsigned number.
    Unsigned,
    /// A signed number.
    Signed,
    /// An address or a set of bits, in hexadecimal.
    Hex,
    /// Text. A probe passes the address of a string that ends with a zero byte.
    Text,
}

impl Event {
    /// Returns whether the log shows the event.
    pub fn is_logged(&self) -> bool {
        self.logged.load(Ordering::Relaxed)
    }

    fn set_logged(&self, on: bool) {
        if self.logged.swap(on, Ordering::Relaxed) == on {
            return;
        }
        if on {
            self.semaphore.fetch_add(1, Ordering::Relaxed);
        } else {
            self.semaphore.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Enables the log for events whose name matches `pattern`, in which `*` stands for any text. A leading `-`
/// disables it. Returns the number of matching events.
///
/// Call this at program start: the kernel's increment when a tool attaches is not atomic.
pub fn log_events(pattern: &str) -> usize {
    let (pattern, on) = match pattern.strip_prefix('-') {
        Some(pattern) => (pattern, false),
        None => (pattern, true),
    };
    let named = EVENTS.iter().filter(|event| matches(pattern, event.name));
    named.map(|event| event.set_logged(on)).count()
}

/// Writes the log to `file`, one write(2) per line, instead of standard error. Takes effect once per
/// process.
///
/// # Errors
///
/// Gives `file` back if the log has a file already.
pub fn log_to(file: File) -> Result<(), File> {
    log::FILE.set(file)
}

fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(first) else { return false };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        match left.split_once(part) {
            Some((_, after)) => left = after,
            None => return false,
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_qemu() {
        let yes = [
            ("poll_add", "poll_add"),
            ("poll_*", "poll_add"),
            ("*", "poll_add"),
            ("*_add", "poll_add"),
            ("p*l*add", "poll_add"),
            ("**", "poll_add"),
            ("poll_add*", "poll_add"),
            ("*poll_add", "poll_add"),
            ("p*_*d", "poll_add"),
        ];
        for (pattern, name) in yes {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        let no = [
            ("", "poll_add"),
            ("poll", "poll_add"),
            ("poll_ad*dd", "poll_add"),
            ("oll_*", "poll_add"),
            ("*_ad", "poll_add"),
            ("POLL_ADD", "poll_add"),
            ("*l*l*l*", "poll_add"),
            ("poll_???", "poll_add"),
        ];
        for (pattern, name) in no {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn names_are_unique_and_arguments_named() {
        for (index, event) in EVENTS.iter().enumerate() {
            assert!(!event.args.is_empty() && !event.help.is_empty(), "{}", event.name);
            assert!(EVENTS[index + 1..].iter().all(|other| other.name != event.name));
        }
    }

    #[test]
    fn the_semaphore_counts_the_log_once() {
        // No other test of this process logs this event.
        let event = &events::thread_pool_complete_aio::EVENT;
        let looked_at = || event.semaphore.load(Ordering::Relaxed);
        assert_eq!((log_events(event.name), looked_at(), event.is_logged()), (1, 1, true));
        assert_eq!((log_events("thread_pool_complete*"), looked_at()), (1, 1));
        assert_eq!((log_events("-thread_pool_complete*"), looked_at()), (1, 0));
        assert_eq!((log_events("-thread_pool_complete_aio"), looked_at()), (1, 0));
        assert!(!event.is_logged());
        assert_eq!(
            (log_events("thread_pool_complete"), log_events("-"), log_events("")),
            (0, 0, 0)
        );
    }
}
