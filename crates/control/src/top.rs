//! `top`: a live view of what a running daemon does.

use std::ffi::OsString;

use crate::ctl::{self, CtlSocket};
use crate::error::OptionError;
use crate::table::{Choice, Field, Kind, Need, put};

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
    Field {
        name: "interval-ms",
        kind: Kind::Int {
            range: 10..=3_600_000,
            set: |top, ms| put(&mut top.interval_ms, ms.unsigned_abs()),
        },
        need: Need::Default("1000"),
        help: "time from one look to the next, in milliseconds",
    },
    Field {
        name: "count",
        kind: Kind::Int {
            range: 1..=i64::MAX,
            set: |top, count| put(&mut top.count, Some(count.unsigned_abs())),
        },
        need: Need::Optional("runs until q is pressed"),
        help: "end after so many views",
    },
    Field {
        name: "batch",
        kind: Kind::Flag(|top| top.batch = true),
        need: Need::Optional("a view that is kept up to date, on a terminal"),
        help: "print views one after the other, for programs and files",
    },
    Field {
        name: "sort",
        kind: Kind::Choice(&[
            Choice {
                name: "order",
                help: "in the daemon's order",
                set: |top| put(&mut top.sort, TopSort::Order),
            },
            Choice {
                name: "requests",
                help: "by requests per second",
                set: |top| put(&mut top.sort, TopSort::Requests),
            },
            Choice {
                name: "bytes",
                help: "by bytes per second",
                set: |top| put(&mut top.sort, TopSort::Bytes),
            },
            Choice {
                name: "latency",
                help: "by the 99th percentile of latency",
                set: |top| put(&mut top.sort, TopSort::Latency),
            },
            Choice {
                name: "depth",
                help: "by requests in flight",
                set: |top| put(&mut top.sort, TopSort::Depth),
            },
        ]),
        need: Need::Default("order"),
        help: "which exports come first",
    },
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
