//! The page: statistics in the text format of OpenMetrics, metric by metric of the table `METRICS`.

use std::fmt;

use block::policy::IoStatus;
use event_loop::LoopStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode as encode_registry;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit};
use stats::{Kind, KindNumbers, QueueNumbers};

use crate::statistics::{
    ExportStatistics, JobStatistics, ProcessStatistics, QueueStatistics, Statistics,
    ThreadStatistics, ThrottleStatistics,
};

/// The format, as HTTP names it.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Prefix of all names except those about the process.
const PREFIX: &str = "ringmill_";

/// A metric: a row of the table.
struct Metric {
    /// Without the prefix, unit and `_total`.
    name: &'static str,
    kind: MetricType,
    unit: Option<Unit>,
    /// Its meaning in one sentence, without a full stop.
    help: &'static str,
    of: Of,
}

/// The objects that a metric describes, each with its own labels, and how the value is read.
enum Of {
    /// The program.
    Build,
    /// The process; without labels and prefix: all programs use these names.
    Process(fn(&ProcessStatistics) -> Option<f64>),
    /// Each I/O thread.
    Thread(fn(&ThreadStatistics) -> Option<f64>),
    /// Each I/O thread's loop.
    Loop(fn(&LoopStats) -> u64),
    /// Each throttle group.
    Throttle(fn(&ThrottleStatistics) -> u64),
    /// Each job that copies.
    Job(fn(&JobStatistics) -> u64),
    /// Each export and node that it offers.
    Node,
    /// Each export.
    Export(fn(&ExportStatistics) -> u64),
    /// Each queue of each export.
    Queue(fn(&QueueNumbers) -> u64),
    /// Each kind of request on each queue of each export.
    Requests(fn(&KindNumbers) -> u64),
    /// Each kind of request on each export: durations.
    Latencies,
}

fn counter(name: &'static str, help: &'static str, of: Of) -> Metric {
    Metric { name, kind: MetricType::Counter, unit: None, help, of }
}

fn gauge(name: &'static str, help: &'static str, of: Of) -> Metric {
    Metric { name, kind: MetricType::Gauge, unit: None, help, of }
}

fn in_unit(unit: Unit, metric: Metric) -> Metric {
    Metric { unit: Some(unit), ..metric }
}

/// The bounds of latency buckets in nanoseconds: powers of two, which are bounds of the counters' buckets
/// too, so nothing is estimated. 8 us to 8.6 s.
fn bounds() -> impl Iterator<Item = u64> {
    (13..=33).map(|exponent| 1 << exponent)
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// All metrics.
fn metrics() -> Vec<Metric> {
    use Unit::{Bytes, Seconds};
    let info = |name, help, of| Metric { kind: MetricType::Info, ..gauge(name, help, of) };
    vec![
        info("build", "the version of ringmill", Of::Build),
        info("export", "the exports and the nodes they offer", Of::Node),
        gauge(
            "export_connected",
            "1 while a client is connected, else 0",
            Of::Export(|export| export.connected.into()),
        ),
        gauge(
            "export_io_status",
            "0: running; requests are held after an error: 1 no space left, 2 another error",
            Of::Export(|export| match export.io_status {
                IoStatus::Ok => 0,
                IoStatus::NoSpace => 1,
                IoStatus::Failed => 2,
            }),
        ),
        counter(
            "export_requests",
            "requests completed without an error",
            Of::Requests(|requests| requests.done),
        ),
        counter(
            "export_failed_requests",
            "requests that failed",
            Of::Requests(|requests| requests.failed),
        ),
        counter(
            "export_invalid_requests",
            "requests refused because they are malformed or not allowed",
            Of::Requests(|requests| requests.invalid),
        ),
        in_unit(
            Bytes,
            counter(
                "export_transferred",
                "bytes read, written, discarded or zeroed by completed requests",
                Of::Requests(|requests| requests.bytes),
            ),
        ),
        in_unit(
            Seconds,
            Metric {
                kind: MetricType::Histogram,
                ..gauge(
                    "export_request_duration",
                    "time from taking a request to its answer, failed requests included",
                    Of::Latencies,
                )
            },
        ),
        gauge(
            "export_in_flight_requests",
            "requests taken and not answered yet",
            Of::Queue(QueueNumbers::in_flight),
        ),
        counter("export_batches", "batches of answers", Of::Queue(|queue| queue.batches)),
        counter("export_signals", "signals sent to the guest", Of::Queue(|queue| queue.signals)),
        counter(
            "throttle_group_held_requests",
            "requests that had to wait for a limit of the group",
            Of::Throttle(|group| group.held),
        ),
        in_unit(
            Bytes,
            gauge("job_done", "what a job that copies has done", Of::Job(|job| job.done_bytes)),
        ),
        in_unit(
            Bytes,
            gauge("job_total", "what that job has to do", Of::Job(|job| job.total_bytes)),
        ),
        in_unit(
            Seconds,
            counter(
                "iothread_cpu",
                "CPU time, user and system",
                Of::Thread(|thread| thread.cpu_ns.map(seconds)),
            ),
        ),
        in_unit(
            Seconds,
            counter(
                "iothread_polled",
                "time spent in busy polls",
                Of::Thread(|thread| Some(seconds(thread.handle.stats().polled_ns.get()))),
            ),
        ),
        in_unit(
            Seconds,
            gauge(
                "iothread_poll_window",
                "present limit of a busy poll before the thread sleeps",
                Of::Thread(|thread| Some(seconds(thread.handle.stats().poll_window_ns.get()))),
            ),
        ),
        in_unit(
            Seconds,
            gauge(
                "iothread_poll_max",
                "upper limit of the poll window: poll-max-ns, or what a sleep is worth",
                Of::Thread(|thread| Some(seconds(thread.poll_max_ns))),
            ),
        ),
        counter(
            "iothread_polls_succeeded",
            "busy polls that found an event",
            Of::Loop(|stats| stats.poll_hits.get()),
        ),
        counter(
            "iothread_polls_failed",
            "busy polls that ended without an event",
            Of::Loop(|stats| stats.poll_misses.get()),
        ),
        counter(
            "iothread_iterations",
            "iterations of the event loop",
            Of::Loop(|stats| stats.iterations.get()),
        ),
        counter(
            "iothread_enters",
            "calls of io_uring_enter(2), or of epoll_pwait2(2) without io_uring",
            Of::Loop(|stats| stats.enters.get()),
        ),
        counter(
            "iothread_aio_submits",
            "calls of io_submit(2), for Linux AIO",
            Of::Loop(|stats| stats.aio_submits.get()),
        ),
        counter(
            "iothread_sleeps",
            "system calls that could sleep",
            Of::Loop(|stats| stats.sleeps.get()),
        ),
        counter(
            "iothread_sleeps_called_off",
            "sleeps announced and cancelled because work arrived",
            Of::Loop(|stats| stats.sleeps_called_off.get()),
        ),
        counter(
            "iothread_wakeups",
            "wake-ups of this thread by another thread",
            Of::Loop(|stats| stats.wakes.get()),
        ),
        counter(
            "iothread_submitted_operations",
            "operations submitted to the kernel",
            Of::Loop(|stats| stats.submitted.get()),
        ),
        counter(
            "iothread_completed_operations",
            "operations completed by the kernel",
            Of::Loop(|stats| stats.completed.get()),
        ),
        in_unit(
            Seconds,
            counter(
                "process_cpu",
                "CPU time of the whole process, user and system",
                Of::Process(|process| process.cpu_ns.map(seconds)),
            ),
        ),
        in_unit(
            Bytes,
            gauge(
                "process_resident_memory",
                "resident memory, including mapped guest memory",
                Of::Process(|process| process.resident_bytes.map(|bytes| bytes as f64)),
            ),
        ),
        gauge(
            "process_open_fds",
            "open file descriptors",
            Of::Process(|process| process.open_fds.map(|fds| fds as f64)),
        ),
        in_unit(
            Seconds,
            gauge(
                "process_start_time",
                "start time of the process, in seconds since the epoch",
                Of::Process(|process| process.started_at),
            ),
        ),
    ]
}

/// Writes the page.
pub(super) fn encode(statistics: &Statistics) -> Result<String, fmt::Error> {
    let mut page = String::new();
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Page(statistics.clone())));
    encode_registry(&mut page, &registry)?;
    Ok(page)
}

#[derive(Debug)]
struct Page(Statistics);

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for metric in metrics() {
            let Metric { name, kind, unit, help, of } = &metric;
            let prefix = if matches!(of, Of::Process(_)) { "" } else { PREFIX };
            let name = format!("{prefix}{name}");
            let metric = encoder.encode_descriptor(&name, help, unit.as_ref(), *kind)?;
            Told { metric, kind: *kind, of }.tell(&self.0)?;
        }
        Ok(())
    }
}

type Label<'a> = (&'static str, &'a str);

/// A metric while it is written.
struct Told<'a> {
    metric: MetricEncoder<'a>,
    kind: MetricType,
    of: &'a Of,
}

impl Told<'_> {
    fn tell(&mut self, all: &Statistics) -> fmt::Result {
        match self.of {
            Of::Build => self.metric.encode_info(&[("version", env!("CARGO_PKG_VERSION"))]),
            Of::Process(get) => self.number(&[], get(&all.process)),
            Of::Thread(get) => all
                .threads
                .iter()
                .try_for_each(|thread| self.number(&[("iothread", &thread.id)], get(thread))),
            Of::Loop(get) => all.threads.iter().try_for_each(|thread| {
                self.count(&[("iothread", &thread.id)], get(thread.handle.stats()))
            }),
            Of::Throttle(get) => all
                .throttle_groups
                .iter()
                .try_for_each(|group| self.count(&[("group", &group.id)], get(group))),
            Of::Job(get) => all.jobs.iter().try_for_each(|job| {
                self.count(&[("job_id", &job.id), ("type", job.kind)], get(job))
            }),
            Of::Node => self.nodes(&all.exports),
            Of::Export(get) => all
                .exports
                .iter()
                .try_for_each(|export| self.count(&[("export", &export.id)], get(export))),
            Of::Queue(get) => {
                each_queue(&all.exports, |labels, queue| self.count(labels, get(&queue.numbers)))
            }
            Of::Requests(get) => each_queue(&all.exports, |labels, queue| {
                let [export, number, iothread] = *labels;
                Kind::ALL.into_iter().try_for_each(|kind| {
                    let labels = [export, number, iothread, ("operation", kind.name())];
                    self.count(&labels, get(queue.numbers.kind(kind)))
                })
            }),
            Of::Latencies => all.exports.iter().try_for_each(|export| self.latencies(export)),
        }
    }

    fn nodes(&mut self, exports: &[ExportStatistics]) -> fmt::Result {
        for export in exports {
            for node in &export.nodes {
                let labels = [("export", &*export.id), ("node", node), ("type", export.kind)];
                self.metric.encode_info(&labels)?;
            }
        }
        Ok(())
    }

    fn latencies(&mut self, export: &ExportStatistics) -> fmt::Result {
        let total = export.total();
        for kind in Kind::ALL {
            let KindNumbers { latencies, total_ns, .. } = total.kind(kind);
            let mut below = 0;
            let mut buckets: Vec<(f64, u64)> = bounds()
                .map(|bound| {
                    let before = std::mem::replace(&mut below, latencies.below(bound));
                    (seconds(bound), below - before)
                })
                .collect();
            let count = latencies.count();
            buckets.push((f64::INFINITY, count - below));
            let labels = [("export", &*export.id), ("operation", kind.name())];
            let none: Option<&std::collections::HashMap<usize, Exemplar<NoLabelSet, f64>>> = None;
            self.metric.encode_family(&labels)?.encode_histogram(
                seconds(*total_ns),
                count,
                &buckets,
                none,
            )?;
        }
        Ok(())
    }

    fn count(&mut self, labels: &[Label<'_>], count: u64) -> fmt::Result {
        let mut of = self.metric.encode_family(&labels)?;
        match self.kind {
            MetricType::Counter => of.encode_counter::<NoLabelSet, _, f64>(&count, None),
            _ => of.encode_gauge(&i64::try_from(count).unwrap_or(i64::MAX)),
        }
    }

    /// `None`: the value is not known.
    fn number(&mut self, labels: &[Label<'_>], number: Option<f64>) -> fmt::Result {
        let Some(number) = number else { return Ok(()) };
        let mut of = self.metric.encode_family(&labels)?;
        match self.kind {
            MetricType::Counter => of.encode_counter::<NoLabelSet, _, f64>(&number, None),
            _ => of.encode_gauge(&number),
        }
    }
}

fn each_queue(
    exports: &[ExportStatistics],
    mut tell: impl FnMut(&[Label<'_>; 3], &QueueStatistics) -> fmt::Result,
) -> fmt::Result {
    for export in exports {
        for queue in &export.queues {
            let number = queue.number.to_string();
            let labels =
                [("export", &*export.id), ("queue", &*number), ("iothread", &*queue.iothread)];
            tell(&labels, queue)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name in the samples.
    fn full_name(metric: &Metric) -> String {
        let prefix = if matches!(metric.of, Of::Process(_)) { "" } else { PREFIX };
        let unit = metric.unit.as_ref().map(|unit| format!("_{}", unit.as_str()));
        let end = match metric.kind {
            MetricType::Counter => "_total",
            MetricType::Info => "_info",
            _ => "",
        };
        format!("{prefix}{}{}{end}", metric.name, unit.unwrap_or_default())
    }

    fn labels(of: &Of) -> &'static str {
        match of {
            Of::Build => "version",
            Of::Process(_) => "",
            Of::Thread(_) | Of::Loop(_) => "iothread",
            Of::Throttle(_) => "group",
            Of::Job(_) => "job_id, type",
            Of::Node => "export, node, type",
            Of::Export(_) => "export",
            Of::Queue(_) => "export, queue, iothread",
            Of::Requests(_) => "export, queue, iothread, operation",
            Of::Latencies => "export, operation",
        }
    }

    /// The table of metrics in the documents has exactly these rows.
    #[test]
    fn the_table_in_the_documentation_is_this_one() {
        let row = |metric: Metric| {
            let (kind, labels) = (metric.kind.as_str(), labels(&metric.of));
            format!("| `{}` | {kind} | {labels} | {} |", full_name(&metric), metric.help)
        };
        let rows: Vec<String> = metrics().into_iter().map(row).collect();
        let text = include_str!("../../../../docs/METRICS.md");
        let is_row = |line: &&str| {
            ["| `ringmill_", "| `process_"].iter().any(|start| line.starts_with(start))
        };
        let documented: Vec<&str> = text.lines().filter(is_row).collect();
        assert_eq!(documented, rows, "the rows of docs/METRICS.md\n{}", rows.join("\n"));
    }
}
