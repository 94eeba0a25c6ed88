//! fio as the client: its libblkio engine drives a vhost-user-blk export, its nbd engine (by libnbd)
//! an NBD export, its io_uring engine the file itself.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::contender::{in_path, version};
use super::tree::Tree;
use crate::host::affinity;
use crate::load::arrivals::Arrivals;
use crate::load::offsets::Order;
use crate::load::queue::Op;
use crate::load::{Load, Wait};
use crate::report::Table;

/// fio in the peers tree, built with libblkio.
const PROGRAM: &str = "usr/local/bin/fio-blkio";
/// Time limit beyond its jobs: fio waits for ever for a server that does not answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// An installed fio.
#[derive(Debug, Clone)]
pub(crate) struct Fio {
    program: Vec<OsString>,
    /// Its reported version.
    pub(crate) version: String,
}

/// The target of the requests.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target<'a> {
    /// The vhost-user-blk export on this socket.
    Export(&'a Path),
    /// The NBD export at this URI.
    Nbd(&'a str),
    /// This file of a FUSE file system, with `O_DIRECT` and Linux AIO: io_uring would use a thread per request.
    Mounted(&'a Path),
}

/// The settings of a job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms<'a> {
    /// Duration before the measurement.
    pub(crate) ramp: Duration,
    /// Duration of the measurement.
    pub(crate) run_time: Duration,
    /// Its CPU.
    pub(crate) cpu: Option<usize>,
    /// Directory of its output.
    pub(crate) directory: &'a Path,
}

/// fio's results.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Counted {
    /// Requests per second.
    pub(crate) iops: f64,
    /// Number of measured requests.
    pub(crate) requests: f64,
    /// Duration of the measurement.
    pub(crate) seconds: f64,
    /// Latency in microseconds at the 50th, 99th and 99.9th percentile.
    pub(crate) latency: [f64; 3],
}

impl Fio {
    /// Finds fio in the tree, if it has one.
    pub(crate) fn find(tree: &Tree) -> Result<Option<Self>> {
        if !tree.has(PROGRAM) {
            return Ok(None);
        }
        let program = tree.program(PROGRAM)?;
        let version = version(&program).context("asking fio for its version")?;
        Ok(Some(Self { program, version }))
    }

    /// Finds the machine's fio, which has this engine.
    pub(crate) fn of_machine(engine: &str) -> Result<Self> {
        let path = in_path("fio").context("fio is not in PATH (scripts/setup-tests.sh)")?;
        let program = vec![path.into()];
        let version = version(&program).context("asking fio for its version")?;
        let known = Command::new(&program[0]).arg(format!("--enghelp={engine}")).output();
        let known = known.context("asking fio for its engines")?;
        ensure!(known.status.success(), "{version} has no {engine} engine; Debian's fio has");
        Ok(Self { program, version })
    }

    /// Runs a job to its end. `check` is called from time to time, and its error ends the job.
    pub(crate) fn run(
        &self,
        target: Target<'_>,
        load: &Load,
        terms: Terms<'_>,
        mut check: impl FnMut() -> Result<()>,
    ) -> Result<Counted> {
        let output = terms.directory.join("fio.json");
        let log = terms.directory.join("fio.log");
        let (program, first) = self.program.split_first().context("no fio to start")?;
        let mut command = Command::new(program);
        command.args(first).args(engine(target)).args(job(load)?);
        command.args(duration("runtime", terms.run_time));
        if !terms.ramp.is_zero() {
            command.args(duration("ramp_time", terms.ramp));
        }
        let create = |path: &Path| {
            File::create(path).with_context(|| format!("creating {}", path.display()))
        };
        command.stdin(Stdio::null()).stdout(create(&output)?).stderr(create(&log)?);
        let spawn = || command.spawn().context("starting fio");
        let mut running = Running(affinity::while_bound_to(terms.cpu, spawn)?);
        let end = Instant::now() + terms.ramp + terms.run_time + PATIENCE;
        let said = || fs::read_to_string(&log).unwrap_or_default();
        let status = loop {
            if let Some(status) = running.0.try_wait().context("asking after fio")? {
                break status;
            }
            check()?;
            ensure!(
                Instant::now() < end,
                "fio has not ended {PATIENCE:?} after its time: {}",
                said()
            );
            std::thread::sleep(Duration::from_millis(20));
        };
        ensure!(status.success(), "fio: {status}: {}", said());
        let text =
            fs::read_to_string(&output).with_context(|| format!("reading {}", output.display()))?;
        parse(&text, load.op).with_context(|| format!("in what fio printed ({})", said()))
    }

    /// The command for the report, without parts that vary per job.
    pub(crate) fn command_to_show(target: Target<'_>) -> String {
        format!("fio {} JOB", engine(target).join(" "))
    }
}

/// A running fio, killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // Not SIGTERM: fio would first finish its requests, which may hang.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

fn engine(target: Target<'_>) -> Vec<String> {
    // Jobs as threads: they can share a device's queues, and end with fio when it is killed.
    let mut options =
        vec!["--name=job".to_owned(), "--thread=1".into(), "--output-format=json".into()];
    match target {
        Target::Export(socket) => options.extend([
            "--ioengine=libblkio".into(),
            "--libblkio_driver=virtio-blk-vhost-user".into(),
            format!("--libblkio_path={}", socket.display()),
        ]),
        Target::Nbd(uri) => options.extend(["--ioengine=nbd".into(), format!("--uri={uri}")]),
        Target::Mounted(path) => options.extend([
            "--ioengine=libaio".into(),
            "--direct=1".into(),
            "--size=1g".into(),
            format!("--filename={}", path.display().to_string().replace(':', "\\:")),
        ]),
    }
    options
}

/// The options of a load.
pub(crate) fn job(load: &Load) -> Result<Vec<String>> {
    let what = match (load.op, load.order) {
        (Op::Read, Order::Random) => "randread",
        (Op::Write, Order::Random) => "randwrite",
        (Op::Read, Order::Sequential) => "read",
        (Op::Write, Order::Sequential) => "write",
    };
    let mut options = vec![
        format!("--rw={what}"),
        format!("--bs={}", load.block_size),
        format!("--iodepth={}", load.depth),
        "--time_based".into(),
    ];
    if load.queues > 1 {
        // One queue each.
        options.extend([format!("--numjobs={}", load.queues), "--group_reporting=1".into()]);
    }
    if let Arrivals::Paced(pace) = load.arrivals {
        ensure!(pace.burst == 1, "fio does not pace bursts; use --client own");
        // Per job.
        options.push(format!("--rate_iops={:.0}", pace.per_second / load.queues as f64));
    }
    if load.wait == Wait::Poll {
        options.push("--hipri".into());
    }
    Ok(options)
}

/// The options of each load.
pub(crate) fn jobs<'a>(loads: impl Iterator<Item = (&'a str, &'a Load)>) -> Result<Table> {
    let mut table = Table::new(&["load", "JOB"]);
    for (name, load) in loads {
        table.row([name.to_owned(), format!("`{}`", job(load)?.join(" "))]);
    }
    Ok(table)
}

/// In milliseconds, since fio accepts no fractions.
fn duration(name: &str, time: Duration) -> [String; 1] {
    [format!("--{name}={}ms", time.as_millis())]
}

fn parse(text: &str, op: Op) -> Result<Counted> {
    let json = text.find('{').map(|start| &text[start..]).context("no JSON")?;
    let report: Value = serde_json::from_str(json).context("the JSON is broken")?;
    let job = &report["jobs"][0];
    match job["error"].as_i64() {
        Some(0) => {}
        Some(error) => bail!("fio failed: {}", std::io::Error::from_raw_os_error(error as i32)),
        None => bail!("there is no job"),
    }
    let side = match op {
        Op::Read => &job["read"],
        Op::Write => &job["write"],
    };
    let figure = |value: &Value, name: &str| {
        value[name].as_f64().with_context(|| format!("there is no number called {name}"))
    };
    let requests = figure(side, "total_ios")?;
    ensure!(requests > 0.0, "no request was served");
    let percentile = |name| figure(&side["clat_ns"]["percentile"], name).map(|ns| ns / 1e3);
    Ok(Counted {
        iops: figure(side, "iops")?,
        requests,
        seconds: figure(side, "runtime")? / 1e3,
        latency: [percentile("50.000000")?, percentile("99.000000")?, percentile("99.900000")?],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::rows::{Disk, Work, paced, unpaced};

    fn options(work: Work) -> Result<String> {
        let Work::Load(load) = work else { panic!("not a load") };
        job(&load).map(|options| options.join(" "))
    }

    #[test]
    fn loads_are_spelled_as_fio_wants_them() {
        assert_eq!(
            options(unpaced(Disk::Null, Op::Read, 16, 4).work).unwrap(),
            "--rw=randread --bs=4096 --iodepth=16 --time_based --numjobs=4 \
             --group_reporting=1"
        );
        assert_eq!(
            options(paced(Disk::Null, 2000, 1).work).unwrap(),
            "--rw=randread --bs=4096 --iodepth=64 --time_based --rate_iops=2000"
        );
        let error = options(paced(Disk::Null, 2000, 16).work).unwrap_err();
        assert!(error.to_string().contains("bursts"), "{error}");
    }

    #[test]
    fn a_report_is_read_and_a_failure_is_one() {
        let report = |error: i32, ios: u32| {
            format!(
                "fio: a warning\n{{\"jobs\": [{{\"error\": {error}, \"read\": {{\"iops\": 99.5, \
                 \"total_ios\": {ios}, \"runtime\": 2010, \"clat_ns\": {{\"percentile\": \
                 {{\"50.000000\": 1500, \"99.000000\": 2000, \"99.900000\": 3000}}}}}}}}]}}"
            )
        };
        assert_eq!(
            parse(&report(0, 200), Op::Read).unwrap(),
            Counted { iops: 99.5, requests: 200.0, seconds: 2.01, latency: [1.5, 2.0, 3.0] }
        );
        for (text, word) in [
            (report(5, 200), "os error 5"),
            (report(0, 0), "no request"),
            ("fio: it failed".into(), "no JSON"),
            ("{\"jobs\": []}".into(), "no job"),
            ("{\"jobs\": [{\"error\": 0}]}".into(), "total_ios"),
        ] {
            let error = format!("{:#}", parse(&text, Op::Read).unwrap_err());
            assert!(error.contains(word), "{error}");
        }
    }
}
