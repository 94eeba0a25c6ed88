//! How long a live upgrade makes a guest wait.
//!
//! A client keeps its queue full while the daemon is upgraded, again and again, by the same program. The pause of an upgrade is the
//! longest time without an answer from before the upgrade until after it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::figures::Rounds;
use crate::host::data_file;
use crate::load::queue::Op;
use crate::load::{Load, Running};
use crate::options::Options;
use crate::peers::contender::{Contender, Node, qemu_img};
use crate::peers::{ringmill, rows};
use crate::report::{Section, Table};
use crate::session::Session;

/// Requests in flight.
const DEPTH: usize = 64;
/// Answers between two upgrades.
const BETWEEN: u64 = 32 * DEPTH as u64;
/// How long answers may take to come.
const PATIENCE: Duration = Duration::from_secs(30);
/// Size of the raw file, and of the qcow2 image as a guest sees it, bytes.
const RAW: u64 = 64 << 20;
const QCOW2: u64 = 4 << 30;
/// What the other process writes before it syncs, MiB.
const WRITER: u64 = 200;
/// The limit of a pause, milliseconds.
const LIMIT: f64 = 100.0;

/// An image, and whether another program keeps its disk busy.
#[derive(Debug, Clone, Copy)]
struct Row {
    name: &'static str,
    qcow2: bool,
    writer: bool,
}

const ROWS: [Row; 4] = [
    Row { name: "raw file", qcow2: false, writer: false },
    Row { name: "qcow2, growing", qcow2: true, writer: false },
    Row { name: "raw file, busy disk", qcow2: false, writer: true },
    Row { name: "qcow2, growing, busy disk", qcow2: true, writer: true },
];

/// Measures and reports. Fails if an upgrade fails, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let rows = options.choose(ROWS.to_vec(), |row| row.name.to_owned())?;
    // Each successor of the daemon becomes a child of this process, to be waited for.
    set_child_subreaper(true).context("PR_SET_CHILD_SUBREAPER")?;
    let session = Session::unbound(options, 50, [0, 0])?;
    let bench = Bench { ringmill: ringmill(options)?, session };
    let mut text = bench.session.machine.clone();
    text.push(format!(
        "Method: {} upgrades per row; random writes of 4 KiB, {DEPTH} in flight, O_DIRECT, neither side bound to a CPU; \
         {} MiB raw file, written with random data; new qcow2 image of {} GiB with clusters of 64 KiB. Busy disk: another \
         thread writes {WRITER} MiB to the same file system and syncs them, in a loop. A pause is the longest time without an \
         answer",
        bench.session.rounds,
        RAW >> 20,
        QCOW2 >> 30
    ));
    let mut pauses: Vec<(Row, Vec<f64>)> = Vec::new();
    for row in rows {
        eprintln!("{}", row.name);
        pauses.push((row, bench.pauses(row).with_context(|| row.name)?));
    }
    let tables = vec![summary(&pauses), each(&pauses)];
    Section { heading: String::new(), text, tables }.publish(options.path("json").as_deref())
}

struct Bench {
    session: Session,
    ringmill: Contender,
}

impl Bench {
    /// The pause of each upgrade, milliseconds.
    fn pauses(&self, row: Row) -> Result<Vec<f64>> {
        let path = |name: &str| self.session.sockets.path(name);
        let (disk, monitor, pid_file) = (path("disk.sock"), path("qmp.sock"), path("pid"));
        let command = self.ringmill.command(vec![
            format!("--pidfile={}", pid_file.display()),
            "--object=iothread,id=io0".into(),
            format!("--blockdev={},node-name=disk", self.node(row)?.spelled()),
            format!("--chardev=socket,id=qmp,path={},server=on,wait=off", monitor.display()),
            "--monitor=chardev=qmp".into(),
            format!(
                "--export=type=vhost-user-blk,id=disk,node-name=disk,writable=on,iothread=io0,\
                 addr.type=unix,addr.path={}",
                disk.display()
            ),
        ]);
        let mut server = self.session.start("upgrade", &command, &[disk, monitor.clone()])?;
        let load = Load { op: Op::Write, depth: DEPTH, ..rows::load() };
        let client = server.connect(0, &load)?;
        let _daemon = Successor(pid_file);
        let _writer = row.writer.then(|| Writer::start(&self.session.directory)).transpose()?;
        measure(&client.start()?, self.session.rounds, || self.upgrade(&monitor))
    }

    /// The disk. Makes the image.
    fn node(&self, row: Row) -> Result<Node> {
        if !row.qcow2 {
            return Ok(Node::File(data_file::prepare(&self.session.directory, RAW)?));
        }
        let image = self.session.directory.join("upgrade.qcow2");
        let (options, size) = (["create", "-f", "qcow2"], QCOW2.to_string());
        qemu_img(&self.session.tree, &options, &[image.as_ref(), size.as_ref()])?;
        Ok(Node::Qcow2(image, None))
    }

    fn upgrade(&self, monitor: &Path) -> Result<()> {
        let output = Command::new(&self.ringmill.program[0]).arg("upgrade").arg(monitor).output();
        let output = output.context("running ringmill upgrade")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ringmill upgrade ended with {}: {said}", output.status);
        Ok(())
    }
}

/// The pause of each of `times` upgrades by `upgrade`, milliseconds.
fn measure(running: &Running, times: usize, upgrade: impl Fn() -> Result<()>) -> Result<Vec<f64>> {
    running.measure(true);
    let mut pauses = Vec::with_capacity(times);
    for _ in 0..times {
        wait_for(running, BETWEEN)?;
        running.take_longest_gap();
        upgrade()?;
        // All requests in flight may have been answered before the pause; the next answer comes after it.
        wait_for(running, DEPTH as u64 + 1)?;
        pauses.push(running.take_longest_gap() as f64 / 1e6);
    }
    Ok(pauses)
}

/// Waits for this many more answers.
fn wait_for(running: &Running, more: u64) -> Result<()> {
    let (all, start) = (running.completed() + more, Instant::now());
    while running.completed() < all {
        ensure!(!running.has_failed(), "the client has ended");
        ensure!(start.elapsed() < PATIENCE, "no answers within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The daemon that serves after some upgrades. Ended when this is dropped.
struct Successor(PathBuf);

impl Drop for Successor {
    fn drop(&mut self) {
        let pid = fs::read_to_string(&self.0).ok().and_then(|pid| pid.trim().parse().ok());
        if let Some(pid) = pid.map(Pid::from_raw)
            && kill(pid, Signal::SIGTERM).is_ok()
        {
            // The first daemon is waited for by its `Server`, which makes this an error of no consequence.
            let _ = waitpid(pid, None);
        }
    }
}

/// A thread that keeps a disk busy.
struct Writer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Writer {
    fn start(directory: &Path) -> Result<Self> {
        let stop = Arc::<AtomicBool>::default();
        let (stopped, path) = (Arc::clone(&stop), directory.join("writer.dat"));
        let thread = std::thread::Builder::new().name("writer".into()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                data_file::fill(&mut File::create(&path)?, WRITER << 20)?;
            }
            fs::remove_file(&path).context("removing the writer's file")
        });
        Ok(Self { stop, thread: Some(thread.context("starting the writer")?) })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Err(error)) = ended.map(|ended| ended.unwrap_or_else(|_| Err(anyhow!("panic"))))
        {
            eprintln!("the writer failed: {error:#}; its rows have no busy disk");
        }
    }
}

fn summary(pauses: &[(Row, Vec<f64>)]) -> Table {
    let mut table = Table::new(&["image", "upgrades", "median ms", "longest ms", "over 100 ms"]);
    for (row, pauses) in pauses {
        let all = Rounds::of(pauses);
        table.row([
            row.name.to_owned(),
            pauses.len().to_string(),
            format!("{:.1}", all.median),
            format!("{:.1}", all.most),
            pauses.iter().filter(|pause| **pause > LIMIT).count().to_string(),
        ]);
    }
    table
}

/// Every pause, in order.
fn each(pauses: &[(Row, Vec<f64>)]) -> Table {
    let mut table = Table::new(&["image", "pauses, ms"]);
    for (row, pauses) in pauses {
        let pauses: Vec<String> = pauses.iter().map(|pause| format!("{pause:.1}")).collect();
        table.row([row.name.to_owned(), pauses.join(" ")]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_median_longest_and_those_over_the_limit() {
        let table = summary(&[(ROWS[0], vec![1.0, 120.0, 3.0])]);
        assert_eq!(table.body, [["raw file", "3", "3.0", "120.0", "1"]]);
    }
}
