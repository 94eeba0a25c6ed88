//! Instructions per request, counted by callgrind and compared with recorded counts.
//!
//! Unlike a time, a count is the same on a busy machine, so it may fail a build. Guest and device are on one thread
//! ([`OneThread`]), polling is off, and the file is read from the page cache. So all reads of a round complete at their
//! submission, and nothing is random. A row's count is the difference of two runs, the second twice as long, per request,
//! so the set-up does not count. Only the loop's side is counted, not the guest's.

mod recorded;

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use event_loop::{LoopConfig, PollParams};
use vcpu::machine::{direct, null_co};
use vcpu::one_thread::OneThread;

use crate::host::data_file;
use crate::options::Options;
use recorded::{Counts, Verdict};

/// The function in which callgrind counts, with all its callees.
const COUNTED: &str = "--toggle-collect=vcpu::one_thread::turn";
/// Requests of the shorter run.
const REQUESTS: u64 = 6400;
/// Bytes of the file.
const FILE: u64 = 16 << 20;

struct Row {
    name: &'static str,
    file: bool,
    depth: u16,
    /// Requests in flight are recorded.
    record: bool,
}

impl Row {
    const fn new(name: &'static str, file: bool, depth: u16) -> Row {
        Row { name, file, depth, record: true }
    }
}

const UNRECORDED: Row = Row { record: false, ..Row::new("no record", false, 64) };
const ROWS: [Row; 5] = [
    Row::new("null depth 64", false, 64),
    Row::new("file depth 64", true, 64),
    Row::new("null depth 1", false, 1),
    Row::new("file depth 1", true, 1),
    UNRECORDED,
];
/// Maximum relative cost of the record of requests in flight, for a read of a file.
const MOST_FOR_RECORD: f64 = 0.03;

/// The recorded counts of builds like this one.
const COUNTS: &str = if cfg!(debug_assertions) {
    concat!(env!("CARGO_MANIFEST_DIR"), "/instructions-debug.txt")
} else {
    concat!(env!("CARGO_MANIFEST_DIR"), "/instructions.txt")
};

/// Counts all rows. Fails if a row costs more than recorded, or so much less that the record is useless.
pub(crate) fn run(options: &Options) -> Result<()> {
    let directory = options.directory()?;
    let file = data_file::prepare(&directory, FILE)?;
    // Into the page cache.
    fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
    let context = || COUNTS.to_owned();
    let text = match fs::read_to_string(COUNTS) {
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        read => read.with_context(context)?,
    };
    let recorded = Counts::parse(&text).with_context(context)?;
    // They say how the counts are recorded anew.
    let comments: String =
        text.split_inclusive('\n').filter(|line| line.starts_with('#')).collect();
    let mut counts = Counts::default();
    let mut wrong = 0;
    println!("instructions in user space per 4 KiB read, without the guest's:");
    for row in &ROWS {
        let count = count(row, &file, &directory)?;
        let before = recorded.get(row.name);
        let verdict = Verdict::of(count, before);
        wrong += u32::from(verdict != Verdict::Fine);
        let before = before.map_or("-".into(), |before| format!("{before:.2}"));
        println!("{:14} {count:9.2}, recorded {before}: {}", row.name, verdict.words());
        counts.push(row.name, count);
    }
    let [null, file, unrecorded] =
        [ROWS[0].name, ROWS[1].name, UNRECORDED.name].map(|name| counts.get(name));
    if let (Some(null), Some(file), Some(unrecorded)) = (null, file, unrecorded) {
        let more = null - unrecorded;
        let [of_null, of_file] = [more / unrecorded, more / (file - more)];
        let shown =
            format!("{:.1}% of null depth 64, {:.1}% of file", of_null * 100.0, of_file * 100.0);
        println!("the record of what is in flight: {more:.1}, {shown}");
        // Checks of arithmetic cost more than the record.
        ensure!(
            of_file <= MOST_FOR_RECORD || cfg!(debug_assertions),
            "that is more than {}%",
            MOST_FOR_RECORD * 100.0
        );
    }
    if options.has("record") {
        fs::write(COUNTS, format!("{comments}{}", counts.format())).with_context(context)?;
        println!("recorded in {COUNTS}");
    } else if wrong > 0 {
        bail!(
            "{wrong} row(s) do not cost what {COUNTS} has. If that is intended, record the new counts with the \
             command in that file, and give the reason in the commit"
        );
    }
    Ok(())
}

/// Instructions per request.
fn count(row: &Row, file: &Path, directory: &Path) -> Result<f64> {
    let rounds = REQUESTS / u64::from(row.depth);
    // The kernel may write back or reclaim the file's pages, for which a read waits. Such a run reports that and is
    // repeated.
    let count = |rounds| {
        let run = || run_under_callgrind(row, file, rounds, directory);
        run().or_else(|_| run()).or_else(|_| run())
    };
    let [short, long] = [rounds, 2 * rounds].map(count);
    let more = long? - short?;
    Ok(more as f64 / (rounds * u64::from(row.depth)) as f64)
}

fn run_under_callgrind(row: &Row, file: &Path, rounds: u64, directory: &Path) -> Result<u64> {
    let output = directory.join("callgrind.out");
    let this = std::env::current_exe().context("finding this program's own path")?;
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--tool=callgrind", COUNTED]);
    command.arg(format!("--callgrind-out-file={}", output.display()));
    command.arg(this).args(["guards", "--serve", row.name]).arg(rounds.to_string()).arg(file);
    let result = command.stdin(Stdio::null()).output();
    let result = result.context("starting valgrind (scripts/setup-tests.sh installs it)")?;
    let words = String::from_utf8_lossy(&result.stderr);
    ensure!(result.status.success(), "{} under valgrind: {}: {words}", row.name, result.status);
    let text = fs::read_to_string(&output).context("callgrind's output")?;
    let summary = text.lines().find_map(|line| line.strip_prefix("summary: "));
    let count = summary.context("callgrind counted nothing")?.trim().parse()?;
    ensure!(count > 0, "callgrind did not come across {COUNTED}");
    Ok(count)
}

/// The child: serves `rounds` rounds of a row, after a line on its standard input, or its end.
pub(crate) fn serve(name: &str, rounds: u64, file: &Path) -> Result<()> {
    let row = ROWS.iter().find(|row| row.name == name).with_context(|| format!("no row {name}"))?;
    let mut disk = if row.file { direct(file)? } else { null_co(1 << 30) };
    disk.cache.direct = false;
    let poll = PollParams::OFF;
    let event_loop = LoopConfig { poll, ..LoopConfig::default() };
    let mut guest = OneThread::new(event_loop, &disk, row.depth, row.record)?;
    // The tracer has attached before it sends the line.
    std::io::stdin().read_line(&mut String::new()).context("waiting for a line")?;
    guest.read(rounds)?;
    // One turn takes the requests, and one answers reads. Otherwise they were not one batch.
    let expected = rounds * if row.file { 2 } else { 1 };
    let stats = guest.event_loop().stats();
    let (iterations, enters) = (stats.iterations.get(), stats.enters.get());
    ensure!(
        iterations == expected && enters <= iterations,
        "{iterations} iterations and {enters} enters, not {expected}: {} has to be on a file system \
         that reads its page cache without waiting (ext4, XFS, btrfs), and in it; see --dir",
        file.display()
    );
    Ok(())
}
