//! The classic text format of Prometheus, version 0.0.4, made from a page in OpenMetrics.
//!
//! Samples are equal in both formats. The lines above them differ:
//!
//! | | OpenMetrics | classic |
//! |---|---|---|
//! | name of a counter in `HELP` and `TYPE` | `requests` | `requests_total`, as in its samples |
//! | information | `build`, type `info` | `build_info`, type `gauge` |
//! | a type that is not known | `unknown` | `untyped` |
//! | `UNIT`, `EOF` | present | absent |

/// The format, as HTTP names it.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns `page`, which has the OpenMetrics format, in the classic format.
pub(super) fn from_open_metrics(page: &str) -> String {
    let mut classic = String::with_capacity(page.len());
    // Text of the last `HELP` line. The text is kept until the following `TYPE` line determines the
    // suffix of the metric's name.
    let mut help = "";
    for line in page.lines() {
        let mut words = line.splitn(4, ' ');
        let words = [words.next(), words.next(), words.next(), words.next()];
        match words {
            [Some("#"), Some("HELP"), Some(_), text] => help = text.unwrap_or_default(),
            [Some("#"), Some("TYPE"), Some(name), Some(kind)] => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", kind),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                classic.extend(["# HELP ", name, suffix, " ", help, "\n"]);
                classic.extend(["# TYPE ", name, suffix, " ", kind, "\n"]);
            }
            [Some("#"), ..] => {}
            _ => classic.extend([line, "\n"]),
        }
    }
    classic
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_change_and_samples_stay() {
        let open = "# HELP build the version: 1\n# TYPE build info\nbuild_info{version=\"# 1\"} 1\n\
                    # HELP sent bytes sent\n# TYPE sent counter\n# UNIT sent bytes\nsent_total 3\n\
                    # HELP now \n# TYPE now unknown\nnow 1.5\n# EOF\n";
        let classic = "# HELP build_info the version: 1\n# TYPE build_info gauge\n\
                       build_info{version=\"# 1\"} 1\n\
                       # HELP sent_total bytes sent\n# TYPE sent_total counter\nsent_total 3\n\
                       # HELP now \n# TYPE now untyped\nnow 1.5\n";
        assert_eq!(from_open_metrics(open), classic);
    }
}
