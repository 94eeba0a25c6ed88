//! A monitor that is asked at a pace, to see how long its answers take.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use serde_json::json;

use crate::monitor::Monitor;

/// From one question to the next, if the answer came meanwhile.
const PACE: Duration = Duration::from_millis(10);

/// A thread that asks a monitor.
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
    let mut latencies = Histogram::<u64>::new(3).context("making a histogram")?;
    // The connection is the first question.
    let mut asked = Instant::now();
    let mut monitor = Monitor::connect(socket)?;
    loop {
        let elapsed = asked.elapsed();
        latencies.record(elapsed.as_micros() as u64).context("recording a latency")?;
        if is_over.load(Ordering::Relaxed) {
            return Ok(latencies.value_at_percentile(99.0) as f64);
        }
        std::thread::sleep(PACE.saturating_sub(elapsed));
        asked = Instant::now();
        monitor.execute("query-version", &json!({}))?;
    }
}
