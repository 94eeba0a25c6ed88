//! A virtio-blk device under load. Each job is a queue and a driver thread, which keeps `depth` requests in flight.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use fastrand::Rng;
use hdrhistogram::Histogram;

use crate::clock::thread_cpu;
use crate::machine::Machine;
use crate::virtio_blk::{GuestQueue, Op, QueueArea, VirtioBlk, take_count};

/// How a driver waits for answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// It sleeps until a signal, as a guest waits for its interrupt.
    Signal,
    /// It requests signals and polls the used ring meanwhile: a vCPU that runs when its interrupt comes, and so takes
    /// answers at once.
    Running,
    /// It polls the used ring and requests no signals.
    Poll,
}

/// A load.
#[derive(Debug, Clone, Copy)]
pub struct LoadConfig {
    /// Number of queues, each with a thread; 1 or more.
    pub jobs: u16,
    /// Requests that each job keeps in flight.
    pub depth: u16,
    /// Bytes per request, a multiple of 512.
    pub size: u32,
    /// The kind of request. Writes overwrite the disk.
    pub op: Op,
    /// How the drivers wait.
    pub wait: Wait,
    /// Whether VIRTIO_F_EVENT_IDX is negotiated.
    pub event_idx: bool,
    /// Duration before the measurement.
    pub warm_up: Duration,
    /// Duration of the measurement.
    pub measured: Duration,
}

/// The measurements of all jobs together.
#[derive(Debug, Clone)]
pub struct LoadResult {
    /// Requests answered.
    pub requests: u64,
    /// Requests per second.
    pub iops: f64,
    /// Kicks the drivers made.
    pub kicks: u64,
    /// Signals the drivers got.
    pub signals: u64,
    /// Batches of answers that the device published.
    pub batches: u64,
    /// Calls of io_uring_enter or epoll_pwait2 on the I/O threads.
    pub enters: u64,
    /// CPU time of the I/O threads.
    pub io_cpu: Duration,
    /// CPU time of the driver threads.
    pub driver_cpu: Duration,
    /// From a request's submission to its answer, nanoseconds.
    pub latencies: Histogram<u64>,
    /// Signals and batches from the first request to the last, warm-up included. The counts above come from two threads,
    /// whose measurements begin and end at slightly different times.
    pub in_all: InAll,
}

/// Counts over a whole load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InAll {
    /// Signals that the device sent.
    pub signals: u64,
    /// Batches of answers that it published.
    pub batches: u64,
}

/// Time limit for requests in flight at the end of the load.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);
/// Maximum sleep of a driver before it checks for the end of the load.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

impl LoadConfig {
    fn area(&self, job: u16) -> QueueArea {
        let one = QueueArea { base: 0, depth: self.depth, request_size: self.size };
        QueueArea { base: one.end() * u64::from(job), ..one }
    }

    /// Returns the bytes of guest memory that the machine must have.
    pub fn memory(&self) -> u64 {
        self.area(self.jobs).base
    }

    /// Runs the load.
    ///
    /// # Errors
    ///
    /// The machine has too little memory, the disk is smaller than a request, or a request fails.
    pub fn run(&self, machine: &Machine) -> Result<LoadResult> {
        ensure!(self.jobs > 0 && self.depth > 0, "a load has jobs and a depth");
        ensure!(self.size > 0 && self.size.is_multiple_of(512), "{} bytes?", self.size);
        let blocks = machine.disk().geometry().size / u64::from(self.size);
        ensure!(blocks > 0, "the disk is smaller than a request");
        if self.op == Op::Write {
            machine.fill(0, self.memory())?;
        }
        std::thread::scope(|scope| {
            let (setups, receiver) = mpsc::channel();
            let mut jobs = Vec::new();
            for job in 0..self.jobs {
                let (go, gone) = mpsc::sync_channel(1);
                let (setups, memory) = (setups.clone(), machine.memory().clone());
                let thread = scope.spawn(move || {
                    let queue = GuestQueue::new(&memory, self.area(job), self.event_idx)?;
                    setups.send((job, queue.setup()))?;
                    // So that the receiver does not wait for another one.
                    drop(setups);
                    // The sender is dropped if another job failed to start.
                    let begin = gone.recv().context("the load was not begun")?;
                    Job::new(self, queue, begin, blocks, job.into()).run()
                });
                jobs.push((go, thread));
            }
            drop(setups);
            let mut setups: Vec<_> = receiver.iter().take(self.jobs.into()).collect();
            setups.sort_by_key(|(job, _)| *job);
            let setups: Vec<_> = setups.into_iter().map(|(_, setup)| setup).collect();
            let calls: Vec<_> = setups.iter().map(|setup| setup.call.clone()).collect();
            let device = if setups.len() == jobs.len() {
                Some(VirtioBlk::start(machine, &setups)?)
            } else {
                None
            };
            let begin = Instant::now();
            let mut threads = Vec::new();
            for (go, thread) in jobs {
                if device.is_some() {
                    // Fails if the thread has ended with an error, which its join returns.
                    let _ = go.send(begin);
                }
                threads.push(thread);
            }
            let observed = device.as_ref().map(|device| self.observe(machine, device, begin));
            let mut result = LoadResult::new()?;
            for thread in threads {
                let job = thread.join().map_err(|_| anyhow!("a driver thread panicked"))??;
                result.add(&job)?;
            }
            let stats = device.as_ref().map(|device| device.stats().to_vec());
            // The device must exist until the drivers have their answers.
            drop(device);
            for stats in stats.iter().flatten() {
                result.in_all.batches += stats.batches.get();
            }
            for call in calls {
                // A late signal, for answers that the driver had found before.
                result.in_all.signals += take_count(&call)?;
            }
            let observed = observed.context("a driver thread did not begin")??;
            result.io_cpu = observed.io_cpu;
            result.enters = observed.enters;
            result.batches = observed.batches;
            Ok(result)
        })
    }

    /// The device side's counters during the measurement.
    fn observe(&self, machine: &Machine, device: &VirtioBlk, begin: Instant) -> Result<Observed> {
        sleep_until(begin + self.warm_up);
        let before = Observed::read(machine, device)?;
        sleep_until(begin + self.warm_up + self.measured);
        let after = Observed::read(machine, device)?;
        Ok(Observed {
            io_cpu: after.io_cpu - before.io_cpu,
            enters: after.enters - before.enters,
            batches: after.batches - before.batches,
        })
    }
}

struct Observed {
    io_cpu: Duration,
    enters: u64,
    batches: u64,
}

impl Observed {
    fn read(machine: &Machine, device: &VirtioBlk) -> Result<Observed> {
        let threads = machine.io_threads().iter();
        Ok(Observed {
            io_cpu: machine.io_cpu_time()?,
            enters: threads.map(|thread| thread.handle().stats().enters.get()).sum(),
            batches: device.stats().iter().map(|stats| stats.batches.get()).sum(),
        })
    }
}

fn sleep_until(at: Instant) {
    std::thread::sleep(at.saturating_duration_since(Instant::now()));
}

/// One driver thread.
struct Job<'a> {
    config: &'a LoadConfig,
    queue: GuestQueue,
    begin: Instant,
    blocks: u64,
    random: Rng,
    /// Submission time of the request in each slot.
    started: Vec<Instant>,
}

/// One job's measurements.
struct JobResult {
    requests: u64,
    kicks: u64,
    signals: u64,
    elapsed: Duration,
    cpu: Duration,
    latencies: Histogram<u64>,
    /// Including warm-up and end.
    all_signals: u64,
}

impl<'a> Job<'a> {
    fn new(
        config: &'a LoadConfig,
        queue: GuestQueue,
        begin: Instant,
        blocks: u64,
        seed: u64,
    ) -> Self {
        let started = vec![begin; config.depth.into()];
        Job { config, queue, begin, blocks, random: Rng::with_seed(seed), started }
    }

    fn run(mut self) -> Result<JobResult> {
        self.run_until(self.begin + self.config.warm_up, None)?;
        let mut latencies = histogram()?;
        // A sleeping vCPU takes its signals as they come.
        self.queue.take_signals()?;
        let (start, cpu) = (Instant::now(), thread_cpu());
        let (kicks, signals) = (self.queue.kicks(), self.queue.signals());
        let end = self.begin + self.config.warm_up + self.config.measured;
        let requests = self.run_until(end, Some(&mut latencies))?;
        self.queue.take_signals()?;
        let mut result = JobResult {
            requests,
            kicks: self.queue.kicks() - kicks,
            signals: self.queue.signals() - signals,
            elapsed: start.elapsed(),
            cpu: thread_cpu() - cpu,
            latencies,
            all_signals: 0,
        };
        self.drain()?;
        result.all_signals = self.queue.signals();
        Ok(result)
    }

    /// Keeps `depth` requests in flight. Returns the number of answers.
    fn run_until(
        &mut self,
        end: Instant,
        mut latencies: Option<&mut Histogram<u64>>,
    ) -> Result<u64> {
        let mut answered = 0;
        loop {
            let now = Instant::now();
            if now >= end {
                return Ok(answered);
            }
            while self.queue.in_flight() < self.started.len() {
                let offset = self.random.u64(..self.blocks) * u64::from(self.config.size);
                let slot = self.queue.submit(self.config.op, offset, self.config.size)?;
                let slot = slot.context("the queue has no room for its own depth")?;
                self.started[usize::from(slot)] = now;
            }
            self.queue.kick()?;
            answered += self.take_answers(end, &mut latencies)?;
        }
    }

    /// Waits for answers until `end`, and takes all available ones.
    fn take_answers(
        &mut self,
        end: Instant,
        latencies: &mut Option<&mut Histogram<u64>>,
    ) -> Result<u64> {
        let mut first = self.queue.reap()?;
        if first.is_none() && self.config.wait == Wait::Running && self.queue.enable_signals() {
            first = self.queue.reap()?;
        }
        while first.is_none() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(0);
            }
            match self.config.wait {
                Wait::Poll | Wait::Running => std::hint::spin_loop(),
                Wait::Signal => {
                    self.queue.wait(left.min(LONGEST_SLEEP))?;
                }
            }
            first = self.queue.reap()?;
        }
        self.queue.suppress_signals();
        let now = Instant::now();
        let mut answered = 0;
        let mut next = first;
        while let Some(done) = next {
            ensure!(done.ok, "a request failed");
            answered += 1;
            if let Some(latencies) = latencies {
                let latency = now - self.started[usize::from(done.slot)];
                latencies.saturating_record(latency.as_nanos() as u64);
            }
            next = self.queue.reap()?;
        }
        Ok(answered)
    }

    fn drain(&mut self) -> Result<()> {
        let limit = Instant::now() + DRAIN_LIMIT;
        while self.queue.in_flight() > 0 {
            ensure!(Instant::now() < limit, "requests unanswered within {DRAIN_LIMIT:?}");
            self.take_answers(limit, &mut None)?;
        }
        Ok(())
    }
}

fn histogram() -> Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).context("making the latency histogram")
}

impl LoadResult {
    fn new() -> Result<Self> {
        Ok(LoadResult {
            requests: 0,
            iops: 0.0,
            kicks: 0,
            signals: 0,
            batches: 0,
            enters: 0,
            io_cpu: Duration::ZERO,
            driver_cpu: Duration::ZERO,
            latencies: histogram()?,
            in_all: InAll::default(),
        })
    }

    fn add(&mut self, job: &JobResult) -> Result<()> {
        self.requests += job.requests;
        self.iops += job.requests as f64 / job.elapsed.as_secs_f64();
        self.kicks += job.kicks;
        self.signals += job.signals;
        self.in_all.signals += job.all_signals;
        self.driver_cpu += job.cpu;
        self.latencies.add(&job.latencies).context("adding up latencies")?;
        Ok(())
    }
}
