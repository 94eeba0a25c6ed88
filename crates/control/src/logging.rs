//! `--log-level` and `--log-format`: verbosity and form of the log.
use crate::place::OneOf;

use crate::table::{Field, Row};

/// `--log-level` and `--log-format`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// `--log-level`. `None`: as `RINGMILL_LOG` says, else warnings and errors.
    pub level: Option<LogLevel>,
    /// `--log-format`. `None`: text.
    pub format: Option<LogFormat>,
}

/// The least severe level that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    /// Failures.
    Error,
    /// Conditions that need attention.
    Warn,
    /// Connections, and steps of the daemon's life.
    Info,
    /// All lines.
    Debug,
}

/// The form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Plain text.
    Text,
    /// One JSON object per line.
    Json,
}

/// The environment variable that replaces `--log-level`.
pub const LOG_VARIABLE: &str = "RINGMILL_LOG";

/// Values of `--log-level` and of [`LOG_VARIABLE`].
static LEVELS: [(&str, LogLevel); 4] = [
    ("error", LogLevel::Error),
    ("warn", LogLevel::Warn),
    ("info", LogLevel::Info),
    ("debug", LogLevel::Debug),
];

impl LogLevel {
    /// Returns the level of that name.
    ///
    /// # Errors
    ///
    /// There is no such level. The text lists the known levels.
    pub fn of(name: &str) -> Result<Self, String> {
        let found = LEVELS.iter().find(|(known, _)| *known == name);
        found.map(|(_, level)| *level).ok_or_else(|| {
            let known: Vec<&str> = LEVELS.iter().map(|(known, _)| *known).collect();
            format!("'{name}' is no level of the log; known levels: {}", known.join(", "))
        })
    }
}

/// A draft of options with `--log-level` and `--log-format`.
pub(crate) trait LogDraft: Sized + 'static {
    fn log(&mut self) -> &mut LogOptions;

    const LOG_LEVEL: Field<Self> = Row::optional(
        "log-level",
        "the value of RINGMILL_LOG, else warn",
        "level of the log on standard error; if given, or if RINGMILL_LOG is set, lines \
         begin with the time",
    )
    .at(&OneOf {
        at: |draft: &mut Self| &mut draft.log().level,
        words: &[
            ("error", LogLevel::Error, "what has failed"),
            ("warn", LogLevel::Warn, "and what needs attention"),
            (
                "info",
                LogLevel::Info,
                "and front ends and clients that come and go, the sandbox, upgrades",
            ),
            (
                "debug",
                LogLevel::Debug,
                "and clients of monitors, the flags of rings, connections that came to nothing",
            ),
        ],
    });

    const LOG_FORMAT: Field<Self> = Row::optional("log-format", "text", "the form of log lines")
        .at(&OneOf {
            at: |draft: &mut Self| &mut draft.log().format,
            words: &[
                ("text", LogFormat::Text, "for people"),
                (
                    "json",
                    LogFormat::Json,
                    "a JSON object per line: time, level, program, pid, message",
                ),
            ],
        });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Command, parse_args};

    fn options(arguments: &[&str]) -> LogOptions {
        match parse_args(arguments.iter().map(Into::into)).expect("right") {
            Command::StorageDaemon(options) => options.log,
            Command::Serve(options) => options.log,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn both_daemons_take_each_level_and_format() {
        let json = Some(LogFormat::Json);
        for (name, level) in LEVELS {
            assert_eq!(LogLevel::of(name), Ok(level));
            let level = Some(level);
            let given = options(&["ringmill", "serve", "disk.img", "--log-level", name]);
            assert_eq!(given, LogOptions { level, format: None });
            let given = ["qemu-storage-daemon", "--log-format=json", "--log-level", name];
            assert_eq!(options(&given), LogOptions { level, format: json });
        }
        assert_eq!(options(&["qemu-storage-daemon"]), LogOptions::default());
        assert!(LogLevel::of("all").is_err_and(|why| why.contains("error, warn, info, debug")));
    }
}
