//! Limits the rate of similar log lines. A pure value: the time is an argument.

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::time::Duration;

use log::Level;

/// Most similar lines in a period.
pub(super) const LINES: u32 = 20;
/// A period begins with its first line.
pub(super) const PERIOD: Duration = Duration::from_secs(60);

/// Most sources that are distinguished at a time; all others count as one. Sources are places in
/// the program and names by the operator, never text of a client.
const SOURCES: usize = 4096;

/// Longest stored subject in bytes.
const SUBJECT: usize = 80;

/// The source of a line: file and line in the program, and the subject, which is the text before
/// its first colon: `export disk0`.
type Source = (&'static str, u32, String);

/// Lines logged recently.
#[derive(Debug, Default)]
pub(super) struct Rate(BTreeMap<Source, Period>);

#[derive(Debug)]
struct Period {
    level: Level,
    since: Duration,
    lines: u32,
    left_out: u64,
}

/// Suppressed lines.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LeftOut {
    /// The level of the source's first line, which was logged.
    pub(super) level: Level,
    subject: String,
    lines: u64,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LeftOut { subject, lines, level: _ } = self;
        match lines {
            1 => write!(f, "{subject}: 1 similar line was left out"),
            lines => write!(f, "{subject}: {lines} similar lines were left out"),
        }
    }
}

impl Rate {
    /// Whether a line may be logged. Times are of a monotonic clock.
    pub(super) fn admits(
        &mut self,
        place: (&'static str, u32),
        level: Level,
        text: &str,
        now: Duration,
    ) -> bool {
        let subject = text.split_once(": ").map_or("", |(subject, _)| subject);
        let end = (0..=SUBJECT.min(subject.len())).rfind(|end| subject.is_char_boundary(*end));
        let subject = subject.get(..end.unwrap_or(0)).unwrap_or_default();
        let mut source = (place.0, place.1, subject.to_owned());
        if self.0.len() >= SOURCES && !self.0.contains_key(&source) {
            source = Source::default();
        }
        let period =
            self.0.entry(source).or_insert(Period { level, since: now, lines: 0, left_out: 0 });
        let admitted = period.lines < LINES;
        match admitted {
            true => period.lines += 1,
            false => period.left_out += 1,
        }
        admitted
    }

    /// Removes ended periods. Returns their suppressed lines.
    pub(super) fn ended(&mut self, now: Duration) -> Vec<LeftOut> {
        let is_over = |period: &Period| now.saturating_sub(period.since) >= PERIOD;
        // In most calls no period has ended.
        if !self.0.values().any(is_over) {
            return Vec::new();
        }
        let (over, going_on) = mem::take(&mut self.0).into_iter().partition(|(_, p)| is_over(p));
        self.0 = going_on;
        left_out(over)
    }

    /// Removes all periods. Returns their suppressed lines.
    pub(super) fn all(&mut self) -> Vec<LeftOut> {
        left_out(mem::take(&mut self.0))
    }
}

fn left_out(periods: BTreeMap<Source, Period>) -> Vec<LeftOut> {
    let with_lines = periods.into_iter().filter(|(_, period)| period.left_out > 0);
    with_lines
        .map(|((_, _, subject), period)| LeftOut {
            level: period.level,
            subject,
            lines: period.left_out,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: (&str, u32) = ("server.rs", 1);

    fn out(subject: &str, lines: u64) -> LeftOut {
        LeftOut { level: Level::Warn, subject: subject.into(), lines }
    }

    #[test]
    fn lines_beyond_the_rate_are_counted_and_reported_once() {
        let mut rate = Rate::default();
        let begin = Duration::from_secs(5);
        let mut admitted = 0;
        for n in 0..100 {
            let text = format!("export a: client {n}: left");
            admitted += u32::from(rate.admits(PLACE, Level::Warn, &text, begin));
        }
        assert_eq!(admitted, LINES);
        assert_eq!(rate.ended(begin + PERIOD - Duration::from_nanos(1)), []);
        assert!(!rate.admits(PLACE, Level::Warn, "export a: client", begin + PERIOD / 2));
        assert_eq!(rate.ended(begin + PERIOD), [out("export a", 101 - u64::from(LINES))]);
        assert_eq!(rate.ended(begin + PERIOD), []);
        assert!(rate.admits(PLACE, Level::Warn, "export a: client", begin + PERIOD));
        assert_eq!(rate.all(), []);
        assert_eq!(out("export a", 2).to_string(), "export a: 2 similar lines were left out");
    }

    #[test]
    fn each_source_has_its_own_rate() {
        let mut rate = Rate::default();
        for _ in 0..1000 {
            rate.admits(PLACE, Level::Warn, "export a: closed the connection", Duration::ZERO);
        }
        assert!(rate.admits(PLACE, Level::Warn, "export b: closed the connection", Duration::ZERO));
        assert!(rate.admits(("server.rs", 2), Level::Warn, "export a: connected", Duration::ZERO));
        assert!(rate.admits(PLACE, Level::Warn, "no subject", Duration::ZERO));
        assert_eq!(rate.all(), [out("export a", 1000 - u64::from(LINES))]);
    }

    #[test]
    fn memory_is_bounded() {
        let mut rate = Rate::default();
        let long = "\u{20ac}".repeat(1000);
        for n in 0..3 * SOURCES {
            rate.admits(PLACE, Level::Warn, &format!("{n}{long}: text"), Duration::ZERO);
        }
        assert!(rate.0.len() <= SOURCES + 1);
        assert!(rate.0.keys().all(|(_, _, subject)| subject.len() <= SUBJECT));
        let lines: u64 = rate.all().iter().map(|left_out| left_out.lines).sum();
        assert_eq!(lines, 2 * SOURCES as u64 - u64::from(LINES));
    }
}
