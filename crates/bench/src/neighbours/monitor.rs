//! A monitor that is asked at a pace, to see how long its answers take.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

/// From one question to the next, if the answer came meanwhile.
const PACE: Duration = Duration::from_millis(10);

/// A client of the monitor, on a thread of its own.
pub(super) struct Probe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<f64>>,
}

impl Probe {
    /// Connects, and starts to ask.
    pub(super) fn start(socket: &Path) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (is_over, socket) = (stop.clone(), socket.to_owned());
        let thread = std::thread::Builder::new().name("probe".into());
        let thread = thread.spawn(move || ask(&socket, &is_over)).context("starting a thread")?;
        Ok(Self { stop, thread })
    }

    /// Waits for the last answer. Returns the 99th percentile of all of them, microseconds.
    pub(super) fn finish(self) -> Result<f64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn ask(socket: &Path, is_over: &AtomicBool) -> Result<f64> {
    let begun = Instant::now();
    let mut stream = UnixStream::connect(socket).context("connecting to the monitor")?;
    // As long as this, an answer takes for ever.
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut answers = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    let mut next = |is_answer: fn(&str) -> bool| -> Result<()> {
        loop {
            line.clear();
            let read = answers.read_line(&mut line).context("waiting for the monitor")?;
            anyhow::ensure!(read > 0, "the monitor has closed the connection");
            if is_answer(&line) {
                return Ok(());
            }
        }
    };
    next(|line| line.contains("QMP"))?;
    stream.write_all(b"{\"execute\":\"qmp_capabilities\"}\n")?;
    next(|line| line.contains("return"))?;
    let mut latencies = Histogram::<u64>::new(3).context("making a histogram")?;
    // The connection is the first question.
    let mut asked = begun;
    loop {
        let elapsed = asked.elapsed();
        latencies.record(elapsed.as_micros() as u64).context("recording a latency")?;
        if is_over.load(Ordering::Relaxed) {
            return Ok(latencies.value_at_percentile(99.0) as f64);
        }
        std::thread::sleep(PACE.saturating_sub(elapsed));
        asked = Instant::now();
        stream.write_all(b"{\"execute\":\"query-version\"}\n")?;
        next(|line| line.contains("return"))?;
    }
}
