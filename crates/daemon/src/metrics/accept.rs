//! The `Accept` header (RFC 9110, section 12.5.1): which format of the page a client prefers.

/// A format of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Prometheus' text format, version 0.0.4. The default, as in Prometheus' client libraries:
    /// OpenMetrics is sent only to clients that name it.
    Classic,
    /// OpenMetrics, version 1.0.0.
    OpenMetrics,
}

/// The preference for each format, in thousandths; `None`: not named.
#[derive(Debug, Default)]
pub(super) struct Accept {
    open_metrics: Option<u32>,
    /// The most specific range that covers `text/plain` counts: its specificity and preference.
    classic: Option<(u32, u32)>,
}

impl Accept {
    /// Adds the value of one `Accept` header. Ranges that cannot be read do not count.
    pub(super) fn add(&mut self, value: &str) {
        value.split(',').filter_map(Range::parse).for_each(|range| self.add_range(&range));
    }

    fn add_range(&mut self, range: &Range<'_>) {
        let specificity = match range.media.to_ascii_lowercase().as_str() {
            "application/openmetrics-text" if matches!(range.version, None | Some("1.0.0")) => {
                self.open_metrics = self.open_metrics.max(Some(range.quality));
                return;
            }
            "text/plain" => match range.version {
                None => 2,
                Some("0.0.4") => 3,
                Some(_) => return,
            },
            "text/*" => 1,
            "*/*" => 0,
            _ => return,
        };
        self.classic = self.classic.max(Some((specificity, range.quality)));
    }

    /// Returns the preferred format. A client that accepts neither format gets the classic format,
    /// as from Prometheus' client libraries.
    pub(super) fn format(&self) -> Format {
        let classic = self.classic.map_or(0, |(_, quality)| quality);
        match self.open_metrics {
            Some(quality) if quality > 0 && quality >= classic => Format::OpenMetrics,
            _ => Format::Classic,
        }
    }
}

/// A media range with the parameters that matter here.
struct Range<'a> {
    media: &'a str,
    version: Option<&'a str>,
    quality: u32,
}

impl<'a> Range<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let mut range =
            Range { media: parts.next().unwrap_or_default(), version: None, quality: 1000 };
        for part in parts {
            let (name, value) = part.split_once('=')?;
            if name.eq_ignore_ascii_case("q") {
                range.quality = thousandths(value)?;
            } else if name.eq_ignore_ascii_case("version") {
                range.version = Some(value.trim_matches('"'));
            }
        }
        Some(range)
    }
}

/// A `qvalue`: 0 to 1, with at most three digits behind the point.
fn thousandths(value: &str) -> Option<u32> {
    let (whole, rest) = value.split_once('.').unwrap_or((value, ""));
    if rest.len() > 3 || !rest.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let fraction: u32 = format!("{rest:0<3}").parse().ok()?;
    match (whole, fraction) {
        ("0", fraction) => Some(fraction),
        ("1", 0) => Some(1000),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[&str]) -> Format {
        let mut accept = Accept::default();
        values.iter().for_each(|value| accept.add(value));
        accept.format()
    }

    #[test]
    fn prometheus_gets_its_preferred_format() {
        // As Prometheus 2.42 and 3.5 send it.
        let second = "application/openmetrics-text;version=1.0.0,\
                      application/openmetrics-text;version=0.0.1;q=0.75,\
                      text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let third = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                     application/openmetrics-text;version=0.0.1;q=0.5,\
                     text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,\
                     text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let classic = "text/plain;version=0.0.4;q=1,*/*;q=0.1";
        assert_eq!(of(&[second]), Format::OpenMetrics);
        assert_eq!(of(&[third]), Format::OpenMetrics);
        assert_eq!(of(&[classic]), Format::Classic);
    }

    #[test]
    fn open_metrics_is_for_clients_that_name_it() {
        for values in [
            &[][..],
            &[""],
            &["*/*"],
            &["text/html, */*;q=0.8"],
            &["application/json"],
            &["application/openmetrics-text;q=0"],
            &["application/openmetrics-text;version=0.0.1"],
            &["application/openmetrics-text;version=2.0.0, text/plain;q=0.1"],
            &["application/openmetrics-text;q=0.4, text/plain;q=0.5"],
            &["application/openmetrics-text;q=0.4", "text/*;q=0.5"],
            &["application/openmetrics-text;q=2", "application/openmetrics-text;q"],
            &["application/*"],
        ] {
            assert_eq!(of(values), Format::Classic, "{values:?}");
        }
        for values in [
            &["application/openmetrics-text"][..],
            &["Application/OpenMetrics-Text ; Version=\"1.0.0\" ; Q=0.001"],
            &["text/plain", "application/openmetrics-text"],
            // The more specific range counts.
            &["*/*, text/plain;q=0.5, application/openmetrics-text;q=0.6"],
        ] {
            assert_eq!(of(values), Format::OpenMetrics, "{values:?}");
        }
    }

    #[test]
    fn a_preference_has_three_digits() {
        for (text, expected) in [
            ("0", Some(0)),
            ("1", Some(1000)),
            ("0.", Some(0)),
            ("0.5", Some(500)),
            ("0.025", Some(25)),
            ("1.000", Some(1000)),
            ("1.001", None),
            ("0.1234", None),
            ("", None),
            (".5", None),
            ("-0.1", None),
            ("0.+1", None),
            ("x", None),
        ] {
            assert_eq!(thousandths(text), expected, "{text}");
        }
    }
}
