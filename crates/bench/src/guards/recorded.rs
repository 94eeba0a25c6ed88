//! The recorded counts, and what is to be said of a count beside its record.

use anyhow::{Context, Result};

/// A count may exceed its record by so much, relatively: what another version of the C library or of a
/// dependency changes.
const SLACK: f64 = 0.02;
/// And fall below it by so much before the record has to follow.
const GAIN: f64 = 0.05;

/// Counts by row.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Counts(Vec<(String, f64)>);

impl Counts {
    /// Reads a file of counts: a row's name and its count on each line, `#` begins a comment.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or(line).trim());
        let count = |line: &str| {
            let (name, count) = line.rsplit_once(' ').context("not a name and a count")?;
            anyhow::Ok((name.trim().to_owned(), count.parse()?))
        };
        let counts = lines.filter(|line| !line.is_empty());
        let counts = counts.map(|line| count(line).with_context(|| format!("'{line}'")));
        Ok(Counts(counts.collect::<Result<_>>()?))
    }

    /// The text that [`parse`](Self::parse) reads.
    pub(super) fn format(&self) -> String {
        self.0.iter().map(|(name, count)| format!("{name} {count:.2}\n")).collect()
    }

    pub(super) fn push(&mut self, name: &str, count: f64) {
        self.0.push((name.to_owned(), count));
    }

    /// What was recorded for a row.
    pub(super) fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(other, _)| other == name).map(|(_, count)| *count)
    }
}

/// What a count means beside its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Fine,
    /// Requests have become dearer.
    Above,
    /// They have become cheaper, and the record no longer guards that.
    Below,
    /// There is no record.
    Unknown,
}

impl Verdict {
    pub(super) fn of(count: f64, recorded: Option<f64>) -> Self {
        match recorded {
            None => Verdict::Unknown,
            Some(recorded) if count > recorded * (1.0 + SLACK) => Verdict::Above,
            Some(recorded) if count < recorded * (1.0 - GAIN) => Verdict::Below,
            Some(_) => Verdict::Fine,
        }
    }

    /// For the report.
    pub(super) fn words(self) -> &'static str {
        match self {
            Verdict::Fine => "as recorded",
            Verdict::Above => "DEARER than recorded",
            Verdict::Below => "cheaper than recorded: record it, so that it stays",
            Verdict::Unknown => "NOT RECORDED",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_as_they_are_written() {
        let mut counts = Counts::default();
        counts.push("null depth 64", 1088.3);
        counts.push("file depth 1", 4248.0);
        let text = format!("# a comment\n\n{}", counts.format());
        assert_eq!(Counts::parse(&text).unwrap(), counts);
        assert_eq!(counts.get("file depth 1"), Some(4248.0));
        assert_eq!(counts.get("file depth 2"), None);
        let error = format!("{:#}", Counts::parse("null depth x").unwrap_err());
        assert!(error.contains("null depth x"), "{error}");
    }

    #[test]
    fn a_count_may_differ_a_little_from_its_record() {
        for (count, verdict) in [
            (1000.0, Verdict::Fine),
            (1019.0, Verdict::Fine),
            (1021.0, Verdict::Above),
            (951.0, Verdict::Fine),
            (949.0, Verdict::Below),
        ] {
            assert_eq!(Verdict::of(count, Some(1000.0)), verdict, "{count}");
        }
        assert_eq!(Verdict::of(1000.0, None), Verdict::Unknown);
    }
}
