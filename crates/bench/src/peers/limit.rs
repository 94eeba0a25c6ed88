//! The same reads without a server: the lower limit of cost.

use std::ffi::OsString;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};

use super::client::Client;
use super::fio::{Fio, Target, Terms};
use super::measure::Bench;
use super::rows::Disk;
use super::tree::Tree;
use crate::bare;
use crate::echo;
use crate::host::affinity;
use crate::load::Load;
use crate::load::offsets::Order;

/// fio's bare loop in the peers tree.
const T_IO_URING: &str = "usr/local/bin/t_io_uring";

/// Rounds of reads of the file itself.
#[derive(Debug, Clone, Default)]
pub(crate) struct Limits {
    /// By fio's `t/io_uring`, a bare loop.
    pub(crate) t_io_uring: Vec<bare::Done>,
    /// By the bare loop of this program.
    pub(crate) bare: Vec<bare::Done>,
    /// By fio's io_uring engine on the client's CPU: requests per second.
    pub(crate) fio: Vec<f64>,
    /// At depth 1, also for a null node: a bare echo in place of the server.
    pub(crate) echo: Vec<bare::Done>,
    /// Failed measurements, with the reasons.
    pub(crate) failures: Vec<String>,
}

/// The programs that read the file.
#[derive(Debug)]
pub(crate) struct Readers {
    t_io_uring: Option<Vec<OsString>>,
    fio: Option<Fio>,
}

impl Readers {
    /// Finds the available ones. fio only if it is also the client, as the results could not be compared otherwise.
    pub(crate) fn find(tree: &Tree, client: &Client) -> Result<Self> {
        Ok(Self {
            t_io_uring: tree.has(T_IO_URING).then(|| tree.program(T_IO_URING)).transpose()?,
            fio: match client {
                Client::Fio(fio) => Some(fio.clone()),
                Client::Own => None,
            },
        })
    }

    /// Their number.
    pub(crate) fn count(&self) -> usize {
        1 + usize::from(self.t_io_uring.is_some()) + usize::from(self.fio.is_some())
    }

    /// Their names, for the report.
    pub(crate) fn describe(&self) -> Vec<String> {
        let bare = "bare loop: ours (`crates/bench/src/bare.rs`): SINGLE_ISSUER, DEFER_TASKRUN, \
                    NO_SQARRAY, file and buffers registered, half of the depth per io_uring_enter, \
                    on the servers' CPU";
        let t_io_uring = match self.t_io_uring {
            Some(_) => format!(
                "t/io_uring: fio's, on the servers' CPU: `t_io_uring {} $DIR/FILE`",
                bare_options(&Load { depth: 64, ..super::rows::load() }, 4).join(" ")
            ),
            None => "t/io_uring: not there, made by scripts/setup-peers.sh".into(),
        };
        let fio = match self.fio {
            Some(_) => format!(
                "fio on the file: on the client's CPU: `{}`",
                Fio::command_to_show(Target::File("$DIR/FILE".as_ref()))
            ),
            None => "fio on the file: only with fio as the client".into(),
        };
        let echo = "bare echo: ours (`crates/bench/src/echo.rs`): a thread on the servers' CPU sleeps in \
                    read(2) of an eventfd, reads or writes a block of the file with pread(2) or pwrite(2) \
                    (not for the null node), and writes another eventfd; the client does nothing else \
                    than that, on its own CPU";
        vec![bare.into(), t_io_uring, fio, echo.into()]
    }

    /// One round of each.
    pub(crate) fn measure(&self, bench: &Bench, load: &Load, limits: &mut Limits) {
        let failures = &mut limits.failures;
        keep(&mut limits.bare, failures, "bare loop", || bare_loop(bench, load));
        if let Some(program) = &self.t_io_uring {
            let measure = || t_io_uring(program, bench, load);
            keep(&mut limits.t_io_uring, failures, "t/io_uring", measure);
        }
        if let Some(fio) = &self.fio {
            keep(&mut limits.fio, failures, "fio on the file", || on_the_file(fio, bench, load));
        }
    }
}

fn keep<T>(
    rounds: &mut Vec<T>,
    failures: &mut Vec<String>,
    name: &str,
    measure: impl FnOnce() -> Result<T>,
) {
    match measure() {
        Ok(done) => rounds.push(done),
        Err(error) => failures.push(format!("{name}: {error:#}")),
    }
}

/// One round of the bare echo.
pub(crate) fn measure_echo(bench: &Bench, disk: Disk, load: &Load, limits: &mut Limits) {
    let cpus = echo::Cpus { client: bench.client_cpu, server: bench.server_cpu };
    let file = (disk == Disk::File).then_some(&*bench.data_file);
    keep(&mut limits.echo, &mut limits.failures, "bare echo", || {
        echo::run(file, load, cpus, bench.run_time)
    });
}

fn bare_loop(bench: &Bench, load: &Load) -> Result<bare::Done> {
    on_cpu(bench.server_cpu, || bare::read(&bench.data_file, load, bench.run_time))
}

fn on_the_file(fio: &Fio, bench: &Bench, load: &Load) -> Result<f64> {
    let terms = Terms {
        ramp: bench.warm_up,
        run_time: bench.run_time,
        cpu: bench.client_cpu,
        directory: &bench.directory,
    };
    Ok(fio.run(Target::File(&bench.data_file), load, terms, || Ok(()))?.iops)
}

fn t_io_uring(program: &[OsString], bench: &Bench, load: &Load) -> Result<bare::Done> {
    // It takes whole seconds and prints a line after each but the last.
    let seconds = bench.run_time.as_secs().max(2);
    let (first, rest) = program.split_first().context("no program")?;
    let before = children_cpu()?;
    let output = on_cpu(bench.server_cpu, || {
        let mut command = Command::new(first);
        command.args(rest).args(bare_options(load, seconds)).arg(&bench.data_file);
        command.stdin(Stdio::null()).output().context("starting t/io_uring")
    })?;
    let cpu = children_cpu()? - before;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}", output.status, error.trim());
    let text = String::from_utf8_lossy(&output.stdout);
    let iops = parse(&text).with_context(|| format!("no figures in {text:?}"))?;
    Ok(bare::Done { iops, cpu: cpu * 1e6 / (iops * seconds as f64) })
}

/// Registered buffers (`-B1`) and file (`-F1`), not polled (`-p0`), `O_DIRECT` (`-O1`).
fn bare_options(load: &Load, seconds: u64) -> Vec<String> {
    let batch = bare::batch(load.depth);
    let random = u8::from(load.order == Order::Random);
    format!(
        "-d{} -s{batch} -c{batch} -b{} -p0 -B1 -F1 -O1 -n1 -R{random} -r{seconds}",
        load.depth, load.block_size
    )
    .split(' ')
    .map(Into::into)
    .collect()
}

/// The mean over the seconds. The last line, with the maximum, is omitted.
fn parse(text: &str) -> Option<f64> {
    let seconds: Vec<f64> = text
        .lines()
        .filter_map(|line| line.strip_prefix("IOPS=")?.split(',').next())
        .filter_map(|figure| match figure.strip_suffix(['K', 'M']) {
            Some(number) => {
                let unit = if figure.ends_with('K') { 1e3 } else { 1e6 };
                number.parse::<f64>().ok().map(|number| number * unit)
            }
            None => figure.parse().ok(),
        })
        .collect();
    (!seconds.is_empty()).then(|| seconds.iter().sum::<f64>() / seconds.len() as f64)
}

/// CPU seconds of all children that have ended.
fn children_cpu() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("getrusage")?;
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

fn on_cpu<T>(cpu: Option<usize>, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match cpu {
        Some(cpu) => affinity::while_bound_to(cpu, work),
        None => work(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_t_io_uring_is_parsed() {
        let text = "submitter=0, tid=1, file=f\nIOPS=65120, BW=254MiB/s, IOS/call=32/31\n\
                    IOPS=64.88K, BW=253MiB/s, IOS/call=32/32\nExiting on timeout\n\
                    Maximum IOPS=65120\n";
        assert_eq!(parse(text), Some(65_000.0));
        assert_eq!(parse("IOPS=1.5M, BW=1GiB/s\n"), Some(1.5e6));
        assert_eq!(parse("file: No such file\n"), None);
    }

    #[test]
    fn t_io_uring_has_the_load_of_the_servers() {
        let load = Load { depth: 64, ..super::super::rows::load() };
        assert_eq!(
            bare_options(&load, 4).join(" "),
            "-d64 -s32 -c32 -b4096 -p0 -B1 -F1 -O1 -n1 -R1 -r4"
        );
    }
}
