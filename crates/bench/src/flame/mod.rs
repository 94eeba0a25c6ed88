//! A flame graph of the daemon with 64 reads of 4 KiB in flight, and the shares of its layers.

mod layers;

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inferno::collapse::{Collapse, perf};
use inferno::flamegraph;

use crate::host::data_file;
use crate::load::Load;
use crate::peers::build_ringmill;
use crate::peers::contender::{self, Node, Places, Polling, Setup};
use crate::peers::measure::{self, SocketDirectory};
use crate::peers::rows;
use crate::peers::server::Server;

/// Requests in flight.
const DEPTH: usize = 64;
/// Duration of the load before the recording.
const WARM_UP: Duration = Duration::from_millis(500);
/// Samples per second of CPU time. No divisor of a timer's frequency.
const FREQUENCY: &str = "1999";
/// Bytes of stack per sample, from which a stack without frame pointers is unwound.
const CALL_GRAPH: &str = "dwarf,8192";
/// Narrower frames are omitted, percent.
const NARROWEST: f64 = 0.2;

/// What to record.
#[derive(Debug)]
pub(crate) struct Options {
    /// Duration.
    pub(crate) run_time: Duration,
    /// Directory of the data file, whose file system is measured, and of perf's output.
    pub(crate) directory: PathBuf,
    /// File of the graph.
    pub(crate) output: PathBuf,
    /// The daemon, if not the one next to this program.
    pub(crate) ringmill: Option<PathBuf>,
    /// CPUs of client and server, if they are to be bound.
    pub(crate) cpus: Option<[usize; 2]>,
}

/// Records, draws, and prints the layers.
pub(crate) fn run(options: &Options) -> Result<()> {
    let directory = measure::make_directory(&options.directory)?;
    let places = Places { ringmill: options.ringmill.clone(), ..Places::default() };
    build_ringmill(&places)?;
    let ringmill = contender::find("ringmill", &places)?;
    let sockets = SocketDirectory::new()?;
    let setup = Setup {
        node: Node::File(data_file::prepare(&directory, 1 << 30)?),
        polling: Polling::Default,
        queues: 1,
        io_threads: 1,
        sockets: vec![sockets.0.join("flame.sock")],
    };
    let [client_cpu, server_cpu] = [0, 1].map(|i| options.cpus.map(|cpus| cpus[i]));
    let mut server = Server::start(&ringmill, &setup, server_cpu, &directory)?;
    let load = Load { depth: DEPTH, cpu: client_cpu, ..rows::load() };
    let running = server.connect(0, &load)?.start()?;
    measure::watch(&mut server, &running, WARM_UP)?;
    let data = directory.join("flame.perf");
    let before = running.completed();
    record(&server.pid().to_string(), options.run_time, &data)?;
    let requests = running.completed() - before;
    running.finish()?;
    server.stop()?;
    ensure!(requests > 0, "no request was served while perf recorded");
    let folded = fold(&data)?;
    print_layers(&folded, requests);
    draw(&folded, &options.output)?;
    println!("the graph is in {}", options.output.display());
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
