//! Statistics of exports, nodes and I/O threads.

mod block_latency_histogram_set;
mod query_blockstats;
mod x_query_export_stats;
mod x_query_iothread_stats;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[
    &query_blockstats::COMMAND,
    &block_latency_histogram_set::COMMAND,
    &x_query_export_stats::COMMAND,
    &x_query_iothread_stats::COMMAND,
];
