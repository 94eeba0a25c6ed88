//! The client's loop: submit what is due, take what is done, wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::arrivals::Schedule;
use super::offsets::Offsets;
use super::queue::{Op, Queue};

/// How the client learns of completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It sleeps until the server signals the call eventfd, as a guest waits for its interrupt.
    Signal,
    /// It watches the used ring and asks for no signals.
    Poll,
}

/// The last stretch before an arrival is spun, since a timer's wake-up is late by tens of
/// microseconds on a virtual machine. Only when nothing is in flight: as long as the client waits
/// for the server it sleeps, so that the server pays for waking it.
const SPIN_BEFORE_ARRIVAL: u64 = 100_000;

/// How long a worker sleeps at most before it looks for `stop` again.
const LONGEST_SLEEP: u64 = 200_000_000;

/// How long requests in flight may take once the load is stopped.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// What a worker and the thread that measures share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Take no more arrivals, wait for what is in flight, return.
    pub(crate) stop: AtomicBool,
    /// Give up at once, whatever is in flight.
    pub(crate) abandon: AtomicBool,
    /// Latencies count.
    pub(crate) measuring: AtomicBool,
    /// Requests completed, since the start.
    pub(crate) completed: AtomicU64,
    /// The longest time between two batches of answers while latencies count, nanoseconds.
    pub(crate) longest_gap: AtomicU64,
}

/// One queue as a worker drives it.
pub(crate) struct Lane {
    /// The virtqueue.
    pub(crate) queue: Queue,
    /// Where its requests go.
    pub(crate) offsets: Offsets,
    /// When they start.
    pub(crate) schedule: Schedule,
    /// Slots not in flight.
    pub(crate) free: Vec<u16>,
    /// When the request in each slot started, nanoseconds from the origin.
    pub(crate) started: Vec<u64>,
    /// How long requests took while that was measured, nanoseconds.
    pub(crate) latencies: Histogram<u64>,
}

impl Lane {
    fn in_flight(&self) -> usize {
        self.started.len() - self.free.len()
    }

    /// When the next request can start, if that is a matter of the clock.
    fn due(&self) -> Option<u64> {
        if self.free.is_empty() { None } else { self.schedule.due() }
    }
}

/// One client thread.
pub(crate) struct Worker {
    /// The queues it drives.
    pub(crate) lanes: Vec<Lane>,
    /// What requests do.
    pub(crate) op: Op,
    /// How it waits.
    pub(crate) wait: Wait,
    /// Time zero of the schedules.
    pub(crate) origin: Instant,
    /// Orders from, and counts for, the thread that measures.
    pub(crate) shared: Arc<Shared>,
    /// When the last batch of answers came while latencies counted, nanoseconds from the origin.
    pub(crate) answered: Option<u64>,
}

impl Worker {
    /// Runs until stopped; returns the latencies measured on each lane, in nanoseconds.
    pub(crate) fn run(mut self) -> Result<Vec<Histogram<u64>>> {
        // The default slack of 50 us would be added to every timed sleep.
        nix::sys::prctl::set_timerslack(1).context("PR_SET_TIMERSLACK")?;
        let mut stopped_at = None;
        while !self.shared.abandon.load(Ordering::Relaxed) {
            if self.shared.stop.load(Ordering::Relaxed) {
                let stopped_at = *stopped_at.get_or_insert_with(Instant::now);
                let in_flight: usize = self.lanes.iter().map(Lane::in_flight).sum();
                if in_flight == 0 {
                    break;
                }
                ensure!(
                    stopped_at.elapsed() < DRAIN_LIMIT,
                    "the server has not answered {in_flight} requests within {DRAIN_LIMIT:?}"
                );
            } else {
                self.submit()?;
            }
            if !self.reap()? {
                self.wait(stopped_at.is_some())?;
            }
        }
        Ok(self.lanes.into_iter().map(|lane| lane.latencies).collect())
    }

    fn now(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    fn submit(&mut self) -> Result<()> {
        let now = self.now();
        for lane in &mut self.lanes {
            let mut submitted = false;
            while let Some(&slot) = lane.free.last() {
                let Some(start) = lane.schedule.take(now) else { break };
                lane.free.pop();
                lane.started[usize::from(slot)] = start;
                lane.queue.submit(self.op, lane.offsets.next_offset(), slot)?;
                submitted = true;
            }
            if submitted {
                lane.queue.kick()?;
            }
        }
        Ok(())
    }

    /// Takes all completions; returns whether there were any.
    fn reap(&mut self) -> Result<bool> {
        let mut reaped = 0;
        // One clock reading per batch: all of it was complete by now.
        let mut now = 0;
        let measuring = self.shared.measuring.load(Ordering::Relaxed);
        for lane in &mut self.lanes {
            while let Some((slot, status)) = lane.queue.completed()? {
                ensure!(
                    status == 0,
                    "a request failed: {}",
                    std::io::Error::from_raw_os_error(-status)
                );
                if reaped == 0 {
                    now = self.origin.elapsed().as_nanos() as u64;
                }
                reaped += 1;
                if measuring {
                    let latency = now.saturating_sub(lane.started[usize::from(slot)]);
                    lane.latencies.saturating_record(latency);
                }
                lane.free.push(slot);
                lane.schedule.answered(now);
            }
        }
        if reaped > 0 {
            if let Some(last) = self.answered {
                self.shared.longest_gap.fetch_max(now.saturating_sub(last), Ordering::Relaxed);
            }
            self.answered = measuring.then_some(now);
            self.shared.completed.fetch_add(reaped, Ordering::Release);
        }
        Ok(reaped > 0)
    }

    /// Waits for a completion or the next arrival.
    fn wait(&mut self, stopping: bool) -> Result<()> {
        let due = if stopping { None } else { self.lanes.iter().filter_map(Lane::due).min() };
        let idle = self.lanes.iter().all(|lane| lane.in_flight() == 0);
        let until_due = due.map_or(LONGEST_SLEEP, |due| due.saturating_sub(self.now()));
        if idle {
            if until_due > SPIN_BEFORE_ARRIVAL {
                let sleep = (until_due - SPIN_BEFORE_ARRIVAL).min(LONGEST_SLEEP);
                std::thread::sleep(Duration::from_nanos(sleep));
            }
            return Ok(());
        }
        match self.wait {
            Wait::Poll => {
                std::hint::spin_loop();
                Ok(())
            }
            Wait::Signal => self.sleep(until_due.min(LONGEST_SLEEP)),
        }
    }

    /// Sleeps until a queue is signalled, at most `nanoseconds`.
    fn sleep(&mut self, nanoseconds: u64) -> Result<()> {
        for lane in &mut self.lanes {
            if lane.queue.want_signal() {
                return Ok(());
            }
        }
        let mut fds: Vec<PollFd<'_>> = self
            .lanes
            .iter()
            .map(|lane| PollFd::new(lane.queue.signal_fd(), PollFlags::POLLIN))
            .collect();
        let timeout = TimeSpec::from(Duration::from_nanos(nanoseconds));
        match ppoll(&mut fds, Some(timeout), None) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error).context("ppoll on the call eventfds"),
        }
        let signalled: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
        for (lane, signalled) in self.lanes.iter().zip(signalled) {
            if signalled {
                lane.queue.take_signal()?;
            }
        }
        Ok(())
    }
}
