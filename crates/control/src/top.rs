//! `top`: a live view of what a running daemon does.

use std::ffi::OsString;

use crate::ctl::{self, CtlSocket};
use crate::error::OptionError;
use crate::place::OneOf;
use crate::table::{Field, Row, put};

/// Options of `top`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopOptions {
    /// Where the daemon's monitor is.
    pub socket: CtlSocket,
    /// `--interval-ms`: time from one look to the next, milliseconds, more than 0.
    pub interval_ms: u64,
    /// `--count`: end after so many views; `None`: when asked to.
    pub count: Option<u64>,
    /// `--batch`: print views one after the other, for programs and files.
    pub batch: bool,
    /// `--sort`.
    pub sort: TopSort,
}

/// What the busiest export is, which is shown first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TopSort {
    /// None: in the daemon's order.
    #[default]
    Order,
    /// Most requests per second.
    Requests,
    /// Most bytes per second.
    Bytes,
    /// Highest 99th percentile of latency.
    Latency,
    /// Most requests in flight.
    Depth,
}

/// What the command line said.
pub(crate) struct Draft {
    arguments: Vec<OsString>,
    interval_ms: u64,
    count: Option<u64>,
    batch: bool,
    sort: TopSort,
}

/// The options of the command line.
pub(crate) static OPTIONS: &[Field<Draft>] = &[
    Row::default("interval-ms", "1000", "time from one look to the next, in milliseconds")
        .int(10..=3_600_000, |top, ms| put(&mut top.interval_ms, ms.unsigned_abs())),
    Row::optional("count", "runs until q is pressed", "end after so many views")
        .int(1..=i64::MAX, |top, count| put(&mut top.count, Some(count.unsigned_abs()))),
    Row::optional(
        "batch",
        "a view that is kept up to date, on a terminal",
        "print views one after the other, for programs and files",
    )
    .flag(|top| top.batch = true),
    Row::default("sort", "order", "which exports come first").at(&OneOf {
        at: |top: &mut Draft| &mut top.sort,
        words: &[
            ("order", TopSort::Order, "in the daemon's order"),
            ("requests", TopSort::Requests, "by requests per second"),
            ("bytes", TopSort::Bytes, "by bytes per second"),
            ("latency", TopSort::Latency, "by the 99th percentile of latency"),
            ("depth", TopSort::Depth, "by requests in flight"),
        ],
    }),
];

/// Takes the socket.
pub(crate) fn start(arguments: Vec<OsString>) -> Draft {
    Draft { arguments, interval_ms: 1000, count: None, batch: false, sort: TopSort::Order }
}

/// Puts what was said together.
pub(crate) fn finish(draft: Draft) -> Result<TopOptions, OptionError> {
    let Draft { arguments, interval_ms, count, batch, sort } = draft;
    let mut arguments = arguments.into_iter();
    let socket = arguments.next().ok_or_else(|| {
        OptionError::new("top: a socket is missing").hint("Usage: ringmill top <socket> [options]")
    })?;
    if let Some(extra) = arguments.next() {
        let extra = extra.to_string_lossy();
        return Err(OptionError::new(format!("top: {extra}: Unexpected argument")));
    }
    Ok(TopOptions { socket: ctl::socket(socket), interval_ms, count, batch, sort })
}
