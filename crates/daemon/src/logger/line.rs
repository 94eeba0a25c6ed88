//! The form of log lines. Pure functions.

use std::time::{SystemTime, UNIX_EPOCH};

use log::Level;

use crate::calendar::utc;

/// The form of all lines.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Style {
    /// Each line begins with its priority, sd-daemon(3). Time and program are left out: the journal adds both.
    pub(super) is_journal: bool,
    /// Each line begins with the time.
    pub(super) has_time: bool,
    /// Each line is a JSON object, with the time whatever `has_time` is.
    pub(super) is_json: bool,
}

/// A log line.
pub(super) struct Line<'a> {
    pub(super) program: &'a str,
    pub(super) level: Level,
    /// The message, in one line or several.
    pub(super) text: &'a str,
    pub(super) time: SystemTime,
}

impl Line<'_> {
    /// Returns the bytes to write, newline included.
    pub(super) fn in_style(&self, style: Style) -> String {
        let Line { program, level, text, time } = self;
        let text = match style {
            Style { is_json: true, .. } => {
                let name = match level {
                    Level::Error => "error",
                    Level::Warn => "warning",
                    Level::Info => "info",
                    Level::Debug | Level::Trace => "debug",
                };
                let (time, pid) = (timestamp(*time), std::process::id());
                let message = serde_json::Value::from(*text);
                format!(
                    r#"{{"time":"{time}","level":"{name}","program":"{program}","pid":{pid},"message":{message}}}"#
                )
            }
            Style { is_journal: true, .. } => (*text).to_owned(),
            Style { has_time, .. } => {
                let time = if has_time { timestamp(*time) + " " } else { String::new() };
                // As in QEMU, errors have no prefix.
                let word = match level {
                    Level::Error => "",
                    Level::Warn => "warning: ",
                    Level::Info => "info: ",
                    Level::Debug | Level::Trace => "debug: ",
                };
                format!("{time}{program}: {word}{text}")
            }
        };
        let priority = match (style.is_journal, level) {
            (false, _) => "",
            (true, Level::Error) => "<3>",
            (true, Level::Warn) => "<4>",
            (true, Level::Info) => "<6>",
            (true, Level::Debug | Level::Trace) => "<7>",
        };
        text.lines().map(|line| format!("{priority}{line}\n")).collect()
    }
}

/// Returns the time in UTC by RFC 3339, with microseconds, as in QEMU's log.
fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (date, clock) = utc(since);
    let micros = since.subsec_micros();
    format!("{date}T{clock}.{micros:06}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn line(level: Level, text: &str, style: Style) -> String {
        let time = UNIX_EPOCH + Duration::from_micros(951_782_400_000_042);
        Line { program: "qsd", level, text, time }.in_style(style)
    }

    #[test]
    fn without_more_lines_are_those_of_qsd() {
        let plain = |level, text| line(level, text, Style::default());
        assert_eq!(plain(Level::Error, "no\nTry this."), "qsd: no\nTry this.\n");
        assert_eq!(plain(Level::Warn, "hm"), "qsd: warning: hm\n");
        assert_eq!(plain(Level::Info, "so"), "qsd: info: so\n");
        assert_eq!(plain(Level::Debug, "so"), "qsd: debug: so\n");
    }

    #[test]
    fn the_time_is_in_front_when_it_is_asked_for() {
        let style = Style { has_time: true, ..Style::default() };
        let expected = "2000-02-29T00:00:00.000042Z qsd: warning: hm\n";
        assert_eq!(line(Level::Warn, "hm", style), expected);
    }

    #[test]
    fn each_line_has_its_priority_for_the_journal() {
        let style = Style { is_journal: true, has_time: true, is_json: false };
        assert_eq!(line(Level::Error, "no\nTry this.", style), "<3>no\n<3>Try this.\n");
        let levels = [Level::Warn, Level::Info, Level::Debug];
        let lines = levels.map(|level| line(level, "x", style));
        assert_eq!(lines, ["<4>x\n", "<6>x\n", "<7>x\n"]);
    }

    #[test]
    fn json_is_one_object_per_line_whatever_the_text() {
        let style = Style { is_json: true, ..Style::default() };
        let line = line(Level::Warn, "a \"b\"\n\u{1b}c", style);
        assert_eq!(line.matches('\n').count(), 1);
        let json: serde_json::Value = serde_json::from_str(&line).unwrap();
        let expected = serde_json::json!({
            "time": "2000-02-29T00:00:00.000042Z", "level": "warning", "program": "qsd",
            "pid": std::process::id(), "message": "a \"b\"\n\u{1b}c",
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_868_799, "2000-02-29T23:59:59.000000Z"),
            (951_868_800, "2000-03-01T00:00:00.000000Z"),
            (1_798_761_599, "2026-12-31T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }
}
