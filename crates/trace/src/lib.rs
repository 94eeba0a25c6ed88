//! Trace events of a program.
//!
//! An [`Event`] appears in two ways. As a **static probe** (USDT) of provider `ringmill`: `perf`, `bpftrace`
//! and `gdb` find it in the program's `.note.stapsdt` section and attach to it at run time. And as a line in
//! a **log**, once [`log_events`] has enabled it.
//!
//! Both share one counter per event, the probe's semaphore. The kernel increments it for each tool that
//! attaches, [`log_events`] for the log. At 0 an event costs one load and one branch that is not taken. Its
//! arguments are not evaluated, and the code after the branch is out of line.
//!
//! Each component defines its events beside its code by [`events!`](events!). [`trace!`] fires an event; [`events()`] lists those
//! of all crates of the program.

mod log;
mod sdt;
mod table;

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

#[doc(hidden)]
pub use linkme;

#[doc(hidden)]
pub use log::write;

#[doc(hidden)]
#[linkme::distributed_slice]
pub static EVENTS: [Event];

/// Fires an event: `trace!(probes::poll_grow(ctx, old, new))`, with the path of the event's module.
///
/// The arguments are evaluated only if the event is enabled. They are converted with [`Into`] to the types
/// in the table: [`u64`], [`i64`] or [`&CStr`](std::ffi::CStr). For use on any thread.
#[macro_export]
macro_rules! trace {
    ($($path:ident)::+ ($($arg:expr),+ $(,)?)) => {
        if $($path)::+::is_enabled() {
            $($path)::+::fire($($arg.into()),+);
        }
    };
}

/// Returns the events of all crates of the program, by name.
pub fn events() -> Vec<&'static Event> {
    let mut events: Vec<_> = EVENTS.iter().collect();
    events.sort_by_key(|event| event.name);
    events
}

/// A trace event.
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
    semaphore: &'static AtomicU16,
    logged: AtomicBool,
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
    #[doc(hidden)]
    pub const fn new(
        name: &'static str,
        help: &'static str,
        args: &'static [Arg],
        semaphore: &'static AtomicU16,
    ) -> Self {
        Event { name, help, args, semaphore, logged: AtomicBool::new(false) }
    }

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

/// Enables the log for events that match `pattern`. Returns their number.
///
/// In the pattern `*` stands for any text. A leading `-` disables the log.
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

/// Writes the log to `file`, one write(2) per line, instead of standard error.
///
/// Takes effect once per process.
///
/// # Errors
///
/// Gives `file` back if the log has a file already.
pub fn log_to(file: File) -> Result<(), File> {
    log::FILE.set(file)
}

/// Puts `priority` before each line on standard error. Takes effect once per process.
pub fn log_with_priority(priority: &'static str) {
    // Only the first call counts.
    let _ = log::PRIORITY.set(priority);
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
#[allow(
    unsafe_code,
    reason = "a macro of another crate may have unsafe code, one of the same crate may not"
)]
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

    crate::events! {
        /// A tank is filled, up to `level`.
        tank_filled(tank: text, valve: hex, level: u64, change: i64);
        /// A tank is empty.
        tank_empty(tank: text);
    }

    #[test]
    fn each_table_adds_to_the_list() {
        let events = events();
        let names: Vec<_> = events.iter().map(|event| event.name).collect();
        assert_eq!(names, ["tank_empty", "tank_filled"]);
        assert_eq!(events[0].help, "A tank is empty.");
        let args = events[1].args.iter().map(|arg| (arg.name, arg.format));
        let expected = [
            ("tank", Format::Text),
            ("valve", Format::Hex),
            ("level", Format::Unsigned),
            ("change", Format::Signed),
        ];
        assert!(args.eq(expected));
    }

    #[test]
    fn the_semaphore_counts_the_log_once() {
        let event = EVENTS.iter().find(|event| event.name == "tank_empty").unwrap();
        let looked_at = || event.semaphore.load(Ordering::Relaxed);
        assert_eq!((log_events(event.name), looked_at(), event.is_logged()), (1, 1, true));
        assert_eq!((log_events("tank_e*"), looked_at()), (1, 1));
        assert!(tank_empty::is_enabled() && !tank_filled::is_enabled());
        assert_eq!((log_events("-tank_e*"), looked_at()), (1, 0));
        assert_eq!((log_events("-tank_empty"), looked_at()), (1, 0));
        assert!(!event.is_logged());
        assert_eq!((log_events("tank"), log_events("-"), log_events("")), (0, 0, 0));
    }

    /// A tool reads the arguments by the sizes in the probe's note. They are those of the table.
    #[test]
    fn notes_have_the_sizes_of_the_arguments() {
        // Keeps the functions.
        trace!(tank_filled(c"left", 1u64, 2u64, -3i64));
        trace!(tank_empty(c"left"));
        let program = std::fs::read("/proc/self/exe").unwrap();
        for (name, sizes) in [("tank_filled", "8@ 8@ 8@ -8@"), ("tank_empty", "8@")] {
            let note = [b"ringmill\0", name.as_bytes(), b"\0"].concat();
            let at = program.windows(note.len()).position(|bytes| bytes == note).unwrap();
            let arguments = &program[at + note.len()..];
            let end = arguments.iter().position(|byte| *byte == 0).unwrap();
            let arguments = std::str::from_utf8(&arguments[..end]).unwrap();
            let of_note = arguments.split(' ').map(|word| word.split('@').next().unwrap());
            assert!(
                of_note.eq(sizes.split(' ').map(|word| word.trim_end_matches('@'))),
                "{arguments}"
            );
        }
    }
}
