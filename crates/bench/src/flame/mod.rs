//! A flame graph of the daemon with 64 reads of 4 KiB in flight, and the shares of its layers.

mod layers;

use std::fs::{self, File};
use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inferno::collapse::{Collapse, perf};
use inferno::flamegraph;

use crate::host::data_file;
use crate::load::Load;
use crate::options::Options;
use crate::peers::contender::{Node, Polling, Setup};
use crate::peers::measure::watch;
use crate::peers::{ringmill, rows};
use crate::session::Session;

/// Requests in flight.
const DEPTH: usize = 64;
/// Samples per second of CPU time. No divisor of a timer's frequency.
const FREQUENCY: &str = "1999";
/// Bytes of stack per sample, from which a stack without frame pointers is unwound.
const CALL_GRAPH: &str = "dwarf,8192";
/// Narrower frames are omitted, percent.
const NARROWEST: f64 = 0.2;

/// Records, draws, and prints the layers.
pub(crate) fn run(options: &Options) -> Result<()> {
    let session = Session::new(options, 1, [1_000, 10_000])?;
    let setup = Setup {
        nodes: vec![Node::File(data_file::prepare(&session.directory, 1 << 30)?)],
        polling: Polling::Default,
        queues: 1,
        io_threads: 1,
        sockets: vec![session.sockets.path("flame.sock")],
    };
    let mut server = session.serve(&ringmill(options)?, &setup)?;
    let load = session.bound(&Load { depth: DEPTH, ..rows::load() });
    let running = server.connect(0, &load)?.start()?;
    watch(&mut server, &running, session.warm_up)?;
    let data = session.directory.join("flame.perf");
    let before = running.completed();
    record(&server.pid().to_string(), session.run_time, &data)?;
    let requests = running.completed() - before;
    running.finish()?;
    server.stop()?;
    ensure!(requests > 0, "no request was served while perf recorded");
    let folded = fold(&data)?;
    print_layers(&folded, requests);
    let output = options.path("output").unwrap_or("docs/benchmarks/flame-read-64.svg".into());
    draw(&folded, &output)?;
    println!("the graph is in {}", output.display());
    Ok(())
}

fn record(pid: &str, time: Duration, data: &Path) -> Result<()> {
    let status = Command::new("perf")
        .args(["record", "--quiet", "-e", "cpu-clock", "-F", FREQUENCY])
        .args(["--call-graph", CALL_GRAPH, "-p", pid, "-o"])
        .arg(data)
        .args(["--", "sleep", &time.as_secs_f64().to_string()])
        .stdin(Stdio::null())
        .status();
    let status = status.context("starting perf (Debian: linux-perf)")?;
    ensure!(
        status.success(),
        "perf record: {status}; it needs root, or kernel.perf_event_paranoid=1"
    );
    Ok(())
}

/// One line per stack, with its nanoseconds of CPU time.
fn fold(data: &Path) -> Result<String> {
    let script = data.with_extension("txt");
    let output = File::create(&script).with_context(|| script.display().to_string())?;
    let status = Command::new("perf")
        .args(["script", "--no-inline", "-i"])
        .arg(data)
        .stdout(output)
        .stderr(Stdio::null())
        .status();
    ensure!(status.context("starting perf")?.success(), "perf script failed");
    let input = BufReader::new(File::open(&script)?);
    let mut folded = Vec::new();
    let mut folder = perf::Folder::from(perf::Options::default());
    folder.collapse(input, &mut folded).context("reading perf's samples")?;
    String::from_utf8(folded).context("perf's samples")
}

fn print_layers(folded: &str, requests: u64) {
    let layers = layers::add_up(folded.lines());
    let all: u64 = layers.iter().map(|(_, count)| count).sum();
    let each = all as f64 / 1e3 / requests as f64;
    println!("{requests} reads, {each:.2} us of CPU time each");
    println!("\n| layer | time |\n| --- | ---: |");
    for (layer, count) in layers {
        println!("| {layer} | {:.1}% |", count as f64 * 100.0 / all as f64);
    }
    println!();
}

fn draw(folded: &str, output: &Path) -> Result<()> {
    let mut options = flamegraph::Options::default();
    options.title = format!("ringmill: reads of 4 KiB with O_DIRECT, {DEPTH} at a time");
    options.min_width = NARROWEST;
    options.count_name = "ns".into();
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, folded.lines(), &mut svg).context("drawing")?;
    fs::write(output, svg).with_context(|| output.display().to_string())
}
