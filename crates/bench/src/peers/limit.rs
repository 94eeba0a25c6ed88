//! The same reads without a server: the lower limit of cost.

use std::ffi::OsString;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::compare::{Figure, Measured, Sample};
use super::measure::Bench;
use super::rows::{Disk, Row, Work};
use super::tree::Tree;
use crate::bare;
use crate::echo;
use crate::host::affinity::while_bound_to;
use crate::host::timed::children_cpu;
use crate::load::Load;
use crate::load::offsets::Order;

/// Names of what reads the file itself.
pub(crate) const T_IO_URING: &str = "t/io_uring";
pub(crate) const BARE: &str = "bare loop";
/// What sleeping and waking costs, which no server that sleeps can do without: at depth 1, also for a null node.
const ECHO: &str = "bare echo";

/// The results without a server, by the names above. CPU time is in [`Measured::median`]'s unit, microseconds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Limits {
    /// Rounds of each.
    pub(crate) all: Vec<(&'static str, Measured)>,
    /// Failed measurements, with the reasons.
    pub(crate) failures: Vec<String>,
}

/// fio's bare loop, if it is in the peers' tree.
pub(crate) fn find_t_io_uring(tree: &Tree) -> Option<Vec<OsString>> {
    tree.program("usr/local/bin/t_io_uring").ok()
}

/// Their names, for the report.
pub(crate) fn describe() -> [String; 3] {
    [
        "bare loop: ours (`crates/bench/src/bare.rs`): SINGLE_ISSUER, DEFER_TASKRUN, NO_SQARRAY, file and buffers \
         registered, half of the depth per io_uring_enter, on the servers' CPU"
            .to_owned(),
        format!(
            "t/io_uring: fio's, on the servers' CPU, made by scripts/setup-peers.sh: `t_io_uring {} $DIR/FILE`",
            bare_options(&Load { depth: 64, ..super::rows::load() }, 4).join(" ")
        ),
        "bare echo: ours (`crates/bench/src/echo.rs`): a thread on the servers' CPU sleeps in read(2) of an eventfd, reads or \
         writes a block of the file with pread(2) or pwrite(2) (not for the null node), and writes another eventfd; the client \
         does nothing else than that, on its own CPU"
            .to_owned(),
    ]
}

/// Measures one round of what a row is compared with.
pub(crate) fn measure(bench: &Bench, t_io_uring: Option<&[OsString]>, row: &mut Row) {
    let Work::Load(load) = row.work.clone() else { return };
    let (session, disk, has_echo) = (&bench.session, row.disk, row.has_echo());
    let mut keep = |name, measure: &dyn Fn() -> Result<Sample>| match measure() {
        Ok(sample) => row.limits.add(name, sample),
        Err(error) => row.limits.failures.push(format!("{name}: {error:#}")),
    };
    let done = |done: bare::Done| Sample::of(&[(Figure::Cpu, done.cpu), (Figure::Iops, done.iops)]);
    if row.is_beside_limits {
        keep(BARE, &|| {
            let read = || bare::read(&bench.images.data, &load, session.run_time);
            while_bound_to(session.cpus.server, read).map(done)
        });
        if let Some(program) = t_io_uring {
            keep(T_IO_URING, &|| self::t_io_uring(program, bench, &load).map(done));
        }
    }
    if has_echo {
        let file = (disk == Disk::File).then_some(&*bench.images.data);
        keep(ECHO, &|| echo::run(file, &load, session.cpus, session.run_time).map(done));
    }
}

impl Limits {
    fn add(&mut self, name: &'static str, sample: Sample) {
        match self.all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, measured)) => measured.rounds.push(sample),
            None => {
                let rounds = vec![sample];
                self.all.push((name, Measured { rounds, ..Measured::default() }));
            }
        }
    }
}

fn t_io_uring(program: &[OsString], bench: &Bench, load: &Load) -> Result<bare::Done> {
    // It takes whole seconds and prints a line after each but the last.
    let seconds = bench.session.run_time.as_secs().max(2);
    let (first, rest) = program.split_first().context("no program")?;
    let before = children_cpu()?;
    let output = while_bound_to(bench.session.cpus.server, || {
        let mut command = Command::new(first);
        command.args(rest).args(bare_options(load, seconds)).arg(&bench.images.data);
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
