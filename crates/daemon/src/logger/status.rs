//! The status line: the last line of a terminal, below the log.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use nix::unistd::{Pid, getpgrp, tcgetpgrp};
use rustix::termios::tcgetwinsize;

/// Erases the line, with the cursor in the first column.
const ERASE: &str = "\r\x1b[K";
/// Separates two parts.
pub(super) const SPACE: &str = "  ";
/// Width of a terminal that reports none.
const COLUMNS: usize = 80;

/// The state of the status line.
#[derive(Debug)]
pub(super) struct StatusLine {
    /// This process' group, 0 if the group is outside of the PID namespace. Read once, since the sandbox refuses
    /// getpgrp(2) later.
    group: Pid,
    shown: Option<String>,
    /// The line was removed for good.
    is_over: bool,
}

impl StatusLine {
    pub(super) fn new() -> Self {
        StatusLine { group: getpgrp(), shown: None, is_over: false }
    }

    /// Returns the bytes that replace the status line by as many parts as fit.
    pub(super) fn show(&mut self, parts: &[String]) -> Vec<u8> {
        self.show_in(parts, columns(self.group))
    }

    /// As [`show`](Self::show), for a terminal of `columns`; `None` if there is no terminal to write to.
    fn show_in(&mut self, parts: &[String], columns: Option<usize>) -> Vec<u8> {
        match columns {
            Some(columns) if !self.is_over => {
                // A full line would wrap, and `ERASE` would leave its first part.
                let text = fitting(parts, columns.saturating_sub(1));
                let bytes = format!("{ERASE}{text}");
                self.shown = Some(text);
                bytes.into_bytes()
            }
            // A shell may have the terminal by now, and erasing would remove the shell's text.
            _ => {
                self.shown = None;
                Vec::new()
            }
        }
    }

    /// Returns the bytes that write log lines above the status line.
    pub(super) fn around(&mut self, lines: &str) -> Vec<u8> {
        match &self.shown {
            Some(shown) => format!("{ERASE}{lines}{shown}").into_bytes(),
            None => lines.into(),
        }
    }

    /// Returns the bytes that remove the status line for good.
    pub(super) fn end(&mut self) -> Vec<u8> {
        self.is_over = true;
        self.shown.take().map_or(Vec::new(), |_| ERASE.into())
    }
}

/// Joins as many parts as fit, by two spaces. A first part that is too long is cut.
fn fitting(parts: &[String], columns: usize) -> String {
    let whole = (1..=parts.len()).rev().map(|count| parts.iter().take(count));
    let joined = whole.map(|parts| parts.map(String::as_str).collect::<Vec<_>>().join(SPACE));
    let mut shortest = String::new();
    for text in joined {
        if text.chars().count() <= columns {
            return text;
        }
        shortest = text;
    }
    shortest.chars().take(columns).collect()
}

/// Returns the width of the terminal on standard error. `None`: there is no terminal, or another process group
/// has it.
fn columns(group: Pid) -> Option<usize> {
    let stderr = std::io::stderr();
    let has_it = stderr.is_terminal()
        && group.as_raw() != 0
        && tcgetpgrp(stderr.as_fd()).ok() == Some(group);
    let size = has_it.then(|| tcgetwinsize(stderr.as_fd()))?.ok();
    Some(
        size.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0).unwrap_or(COLUMNS),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes).unwrap()
    }

    fn parts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn lines_go_above_what_is_shown() {
        let (mut status, parts) = (StatusLine::new(), parts(&["5 requests/s"]));
        assert_eq!(text(status.around("a\n")), "a\n");
        assert_eq!(text(status.show_in(&parts, Some(80))), "\r\x1b[K5 requests/s");
        assert_eq!(text(status.around("a\nb\n")), "\r\x1b[Ka\nb\n5 requests/s");
        assert_eq!(text(status.end()), "\r\x1b[K");
        assert_eq!(text(status.around("c\n")), "c\n");
        assert_eq!(text(status.show_in(&parts, Some(80))), "");
        assert_eq!(text(status.end()), "");
    }

    #[test]
    fn it_never_fills_the_line() {
        let (mut status, parts) = (StatusLine::new(), parts(&["5 requests/s", "2 MiB/s"]));
        assert_eq!(text(status.show_in(&parts, Some(22))), "\r\x1b[K5 requests/s  2 MiB/s");
        assert_eq!(text(status.show_in(&parts, Some(21))), "\r\x1b[K5 requests/s");
        assert_eq!(text(status.show_in(&parts, Some(5))), "\r\x1b[K5 re");
        assert_eq!(text(status.around("a\n")), "\r\x1b[Ka\n5 re");
        assert_eq!(text(status.show_in(&parts, Some(1))), "\r\x1b[K");
        assert_eq!(text(status.show_in(&[], Some(10))), "\r\x1b[K");
    }

    #[test]
    fn a_terminal_that_another_process_has_is_left_alone() {
        let (mut status, parts) = (StatusLine::new(), parts(&["6 requests/s"]));
        status.show_in(&parts, Some(80));
        assert_eq!(text(status.show_in(&parts, None)), "");
        assert_eq!(text(status.around("a\n")), "a\n");
        assert_eq!(text(status.show_in(&parts, Some(80))), "\r\x1b[K6 requests/s");
    }
}
