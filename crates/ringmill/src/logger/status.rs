//! The last line of a terminal, kept up to date below the log.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use rustix::process::{Pid, getpgrp};
use rustix::termios::{tcgetpgrp, tcgetwinsize};

/// Back to the first column, and nothing in the line.
const ERASE: &str = "\r\x1b[K";
/// Between two parts.
pub(super) const SPACE: &str = "  ";
/// Of a terminal that does not say how wide it is.
const COLUMNS: usize = 80;

/// What is shown now.
#[derive(Debug)]
pub(super) struct StatusLine {
    /// This process' group, which the sandbox does not let ask for later.
    group: Pid,
    shown: Option<String>,
    /// Nothing is shown any more.
    is_over: bool,
}

impl StatusLine {
    pub(super) fn new() -> Self {
        StatusLine { group: getpgrp(), shown: None, is_over: false }
    }

    /// What has to be written to show as many of these as there is room for.
    pub(super) fn show(&mut self, parts: &[String]) -> Vec<u8> {
        self.show_in(parts, columns(self.group))
    }

    /// The same in a terminal of that width; `None`: there is none to write to.
    fn show_in(&mut self, parts: &[String], columns: Option<usize>) -> Vec<u8> {
        match columns {
            Some(columns) if !self.is_over => {
                // A line that is full would wrap, and its first part would stay.
                let text = fitting(parts, columns.saturating_sub(1));
                let bytes = format!("{ERASE}{text}");
                self.shown = Some(text);
                bytes.into_bytes()
            }
            // A shell may have the terminal by now: what is there is not ours to erase.
            _ => {
                self.shown = None;
                Vec::new()
            }
        }
    }

    /// What has to be written to have these lines above what is shown.
    pub(super) fn around(&mut self, lines: &str) -> Vec<u8> {
        match &self.shown {
            Some(shown) => format!("{ERASE}{lines}{shown}").into_bytes(),
            None => lines.into(),
        }
    }

    /// What has to be written to remove it for good.
    pub(super) fn end(&mut self) -> Vec<u8> {
        self.is_over = true;
        self.shown.take().map_or(Vec::new(), |_| ERASE.into())
    }
}

/// As many parts as fit, two spaces between them; of the first one, what fits.
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

/// The width of the terminal that standard error is; `None`: it is none, or another process has it.
fn columns(group: Pid) -> Option<usize> {
    let stderr = std::io::stderr();
    let has_it = stderr.is_terminal() && tcgetpgrp(stderr.as_fd()).ok() == Some(group);
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
