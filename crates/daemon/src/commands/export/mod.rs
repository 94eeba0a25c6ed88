//! Exports.

mod block_export_add;
mod block_export_del;
mod query_block_exports;
mod x_block_export_resume;

use event_loop::{oneshot, until};

use super::{Answer, DaemonCommand};
use crate::Daemon;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[
    &block_export_add::COMMAND,
    &block_export_del::COMMAND,
    &x_block_export_resume::COMMAND,
    &query_block_exports::COMMAND,
];

/// `mode` of commands that end exports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum DeleteMode {
    /// Fail when a client uses the export.
    #[default]
    Safe,
    /// Disconnect the clients.
    Hard,
}

/// Longest wait for the end of exports before a command is answered, in nanoseconds.
const EXPORT_END_NS: u64 = 1_000_000_000;

/// Returns the answer to a command that ends exports.
///
/// As in QSD, the answer is sent when the exports have released their resources, at the latest
/// after [`EXPORT_END_NS`].
pub(super) fn when_ended(daemon: &Daemon, ends: Vec<oneshot::Receiver<()>>) -> Answer {
    let enough = daemon.control.sleep_until(daemon.control.now_ns() + EXPORT_END_NS);
    Answer::Later(Box::pin(async move {
        let all = async {
            for end in ends {
                let _ = end.await;
            }
        };
        let _ = until(all, enough).await;
    }))
}
