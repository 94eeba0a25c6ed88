//! The load generator: a vhost-user-blk client that sends requests and measures how long they take. `bench load` runs it
//! alone.

pub(crate) mod arrivals;
pub mod offsets;
pub(crate) mod queue;
mod worker;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hdrhistogram::Histogram;
use nix::unistd::Pid;
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

use crate::host::affinity;
use crate::host::process::Usage;
use crate::options::Options;
use crate::peers::rows::load;
use arrivals::{Arrivals, Pace, Schedule};
use offsets::{Offsets, Order};
use queue::{Buffers, Op, Queue};
pub(crate) use worker::Wait;
use worker::{Lane, Shared, Worker};

/// Descriptors per request: header, buffer, status.
const DESCRIPTORS_PER_REQUEST: usize = 3;
/// The largest queue that vhost-user servers commonly accept (QEMU's limit).
const MAX_QUEUE_SIZE: usize = 1024;

/// The threads that drive the queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// One thread drives all queues.
    One,
    /// Each queue has a thread.
    PerQueue,
}

/// A load.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Load {
    /// The kind of request.
    pub(crate) op: Op,
    /// The order of offsets.
    pub(crate) order: Order,
    /// Bytes per request, a multiple of 512.
    pub(crate) block_size: usize,
    /// Requests in flight per queue, at most.
    pub(crate) depth: usize,
    /// Number of virtqueues.
    pub(crate) queues: usize,
    /// Client threads.
    pub(crate) threads: Threads,
    /// When requests start.
    pub(crate) arrivals: Arrivals,
    /// How the client waits for completions.
    pub(crate) wait: Wait,
    /// The CPU that all client threads are bound to.
    pub(crate) cpu: Option<usize>,
}

/// A connected client that sends nothing.
pub(crate) struct Client {
    queues: Vec<Queue>,
    capacity: u64,
    load: Load,
    /// Delay of each queue's start relative to the one before, if requests are paced, nanoseconds.
    stagger: u64,
}

/// The delay for joined clients, so that not all send to the server at once.
const STAGGER: u64 = 1_000_000;

impl Client {
    /// Connects to the server at `socket` and sets up memory and queues for `load`.
    pub(crate) fn connect(socket: &Path, load: &Load) -> Result<Self> {
        let path = socket.to_str().context("the socket's path is not UTF-8")?;
        // The features of Linux's virtio-blk driver, as far as virtio-driver supports them.
        let features = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | (VirtioBlkFeatureFlags::SEG_MAX
                | VirtioBlkFeatureFlags::BLK_SIZE
                | VirtioBlkFeatureFlags::FLUSH
                | VirtioBlkFeatureFlags::TOPOLOGY
                | VirtioBlkFeatureFlags::CONFIG_WCE
                | VirtioBlkFeatureFlags::MQ
                | VirtioBlkFeatureFlags::DISCARD
                | VirtioBlkFeatureFlags::WRITE_ZEROES)
                .bits();
        let mut transport: Box<VirtioBlkTransport> = Box::new(
            VhostUser::new(path, features).with_context(|| format!("connecting to {path}"))?,
        );
        let queue_size = (load.depth * DESCRIPTORS_PER_REQUEST).next_power_of_two().max(128);
        ensure!(
            queue_size <= MAX_QUEUE_SIZE,
            "depth {} needs a queue of {queue_size} descriptors, and {MAX_QUEUE_SIZE} is the most",
            load.depth
        );
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, load.queues, queue_size as u16)
            .with_context(|| format!("setting up {} queues", load.queues))?;
        let capacity = transport
            .get_config()
            .context("reading the device's configuration space")?
            .capacity
            .to_native()
            .saturating_mul(512);
        ensure!(
            capacity >= load.block_size as u64,
            "the disk ({capacity} bytes) is smaller than a block"
        );
        let buffers = Arc::new(Buffers::new(load.depth * load.queues, load.block_size)?);
        buffers.share(&mut *transport)?;
        let transport = Arc::from(transport);
        let queues = queues
            .into_iter()
            .enumerate()
            .map(|(i, queue)| Queue::new(queue, i, &transport, &buffers, i * load.depth))
            .collect();
        Ok(Self { queues, capacity, load: load.clone(), stagger: 0 })
    }

    /// Joins several clients with the same load into one.
    pub(crate) fn join(clients: impl IntoIterator<Item = Self>) -> Option<Self> {
        clients.into_iter().reduce(|mut all, client| {
            all.queues.extend(client.queues);
            all.capacity = all.capacity.min(client.capacity);
            all.stagger = STAGGER;
            all
        })
    }

    /// Starts sending.
    pub(crate) fn start(self) -> Result<Running> {
        let load = self.load;
        let queues = self.queues.len();
        let origin = Instant::now();
        let blocks = self.capacity / load.block_size as u64;
        // Hundreds of histograms have to fit into caches and memory.
        let digits = if queues > 16 { 2 } else { 3 };
        let latencies = Histogram::new_with_bounds(1, 60_000_000_000, digits)
            .context("making a latency histogram")?;
        let lanes = self.queues.into_iter().enumerate().map(|(i, queue)| Lane {
            queue,
            latencies: latencies.clone(),
            offsets: Offsets::new(
                load.order,
                blocks,
                load.block_size as u64,
                i as u64,
                queues as u64,
            ),
            schedule: Schedule::new(load.arrivals, queues, i as u64 * self.stagger),
            free: (0..load.depth as u16).rev().collect(),
            started: vec![0; load.depth],
        });
        let groups: Vec<Vec<Lane>> = match load.threads {
            Threads::One => vec![lanes.collect()],
            Threads::PerQueue => lanes.map(|lane| vec![lane]).collect(),
        };
        let mut running = Running { workers: Vec::with_capacity(groups.len()) };
        for lanes in groups {
            let shared = Arc::new(Shared::default());
            let worker = Worker {
                lanes,
                op: load.op,
                wait: load.wait,
                origin,
                shared: Arc::clone(&shared),
                answered: None,
            };
            let cpu = load.cpu;
            let thread = std::thread::Builder::new()
                .name("client".into())
                .spawn(move || {
                    if let Some(cpu) = cpu {
                        affinity::bind_this_thread(cpu)?;
                    }
                    worker.run()
                })
                .context("starting a client thread")?;
            running.workers.push((shared, Some(thread)));
        }
        Ok(running)
    }
}

type WorkerThread = JoinHandle<Result<Vec<Histogram<u64>>>>;

/// A running load. Dropping it abandons requests in flight.
pub(crate) struct Running {
    workers: Vec<(Arc<Shared>, Option<WorkerThread>)>,
}

impl Running {
    /// Starts or ends the measurement of latencies.
    pub(crate) fn measure(&self, on: bool) {
        for (shared, _) in &self.workers {
            shared.measuring.store(on, Ordering::Relaxed);
        }
    }

    /// Requests completed since the start.
    pub(crate) fn completed(&self) -> u64 {
        self.workers.iter().map(|(shared, _)| shared.completed.load(Ordering::Acquire)).sum()
    }

    /// The longest time between two batches of answers to a client thread, nanoseconds, since the last call. Counts while latencies
    /// are measured.
    pub(crate) fn take_longest_gap(&self) -> u64 {
        let gaps =
            self.workers.iter().map(|(shared, _)| shared.longest_gap.swap(0, Ordering::Relaxed));
        gaps.max().unwrap_or(0)
    }

    /// Whether a client thread has ended early.
    pub(crate) fn has_failed(&self) -> bool {
        self.workers.iter().any(|(_, thread)| thread.as_ref().is_none_or(JoinHandle::is_finished))
    }

    /// Asks the client's threads to end, whatever is in flight. Dropping also waits for them.
    pub(crate) fn abandon(&self) {
        for (shared, _) in &self.workers {
            shared.abandon.store(true, Ordering::Relaxed);
        }
    }

    /// Waits for requests in flight and ends the load. Returns the measured latencies (ns) and the number of all requests.
    pub(crate) fn finish(mut self) -> Result<(Histogram<u64>, u64)> {
        let queues = self.end()?;
        Ok((together(queues)?, self.completed()))
    }

    /// The same, with the latencies of each queue.
    pub(crate) fn finish_queues(mut self) -> Result<Vec<Histogram<u64>>> {
        self.end()
    }

    fn end(&mut self) -> Result<Vec<Histogram<u64>>> {
        for (shared, _) in &self.workers {
            shared.stop.store(true, Ordering::Relaxed);
        }
        let mut queues = Vec::new();
        for (_, thread) in &mut self.workers {
            let Some(thread) = thread.take() else { continue };
            queues.extend(thread.join().map_err(|_| anyhow!("a client thread panicked"))??);
        }
        Ok(queues)
    }
}

/// The latencies of all queues.
pub(crate) fn together(queues: Vec<Histogram<u64>>) -> Result<Histogram<u64>> {
    let mut queues = queues.into_iter();
    let mut all = queues.next().context("the load has no queues")?;
    for latencies in queues {
        all.add(latencies).context("adding up latencies")?;
    }
    Ok(all)
}

impl Drop for Running {
    fn drop(&mut self) {
        self.abandon();
        for (_, thread) in &mut self.workers {
            if let Some(thread) = thread.take() {
                // The load was abandoned, so the client's errors do not matter.
                let _ = thread.join();
            }
        }
    }
}

/// `bench load`: the load of the options, on any server.
pub(crate) fn run(options: &Options) -> Result<()> {
    let load = given(options)?;
    let socket = options.path("socket").context("--socket is missing")?;
    let run_time = options.duration("runtime").unwrap_or(Duration::from_secs(5));
    let pid = options.number("server-pid")?.map(Pid::from_raw);
    let usage = || pid.map(Usage::read).transpose();
    let running = Client::connect(&socket, &load)?.start()?;
    std::thread::sleep(options.duration("warm-up").unwrap_or(Duration::from_millis(500)));
    running.measure(true);
    let before = (Instant::now(), running.completed(), usage()?);
    std::thread::sleep(run_time);
    let after = (Instant::now(), running.completed(), usage()?);
    running.measure(false);
    let (latencies, _) = running.finish()?;
    let requests = (after.1 - before.1) as f64;
    ensure!(requests > 0.0, "no request was served within {run_time:?}");
    let microseconds = |percentile| latencies.value_at_percentile(percentile) as f64 / 1e3;
    println!(
        "{:.0} IOPS, latency p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us",
        requests / (after.0 - before.0).as_secs_f64(),
        microseconds(50.0),
        microseconds(99.0),
        microseconds(99.9)
    );
    if let (Some(before), Some(after)) = (before.2, after.2) {
        println!(
            "server: {:.3} CPU-seconds per million requests, {:.3} context switches per request",
            (after.cpu - before.cpu).as_secs_f64() * 1e6 / requests,
            after.switches.saturating_sub(before.switches) as f64 / requests
        );
    }
    Ok(())
}

fn given(options: &Options) -> Result<Load> {
    let usual = load();
    let (op, order) = match options.text("rw") {
        Some("read") => (Op::Read, Order::Sequential),
        Some("write") => (Op::Write, Order::Sequential),
        Some("randwrite") => (Op::Write, Order::Random),
        _ => (Op::Read, Order::Random),
    };
    let burst = options.number("burst")?.unwrap_or(1);
    let arrivals = match options.number("rate")? {
        Some(per_second) => Arrivals::Paced(Pace { per_second, burst }),
        None => Arrivals::Closed,
    };
    let load = Load {
        op,
        order,
        block_size: options.number("bs")?.unwrap_or(usual.block_size),
        depth: options.number("depth")?.unwrap_or(usual.depth),
        queues: options.number("queues")?.unwrap_or(usual.queues),
        threads: match options.text("threads") {
            Some("per-queue") => Threads::PerQueue,
            _ => Threads::One,
        },
        arrivals,
        wait: match options.text("wait") {
            Some("poll") => Wait::Poll,
            _ => Wait::Signal,
        },
        cpu: options.number("cpu")?,
    };
    if let Arrivals::Paced(pace) = load.arrivals {
        ensure!(
            pace.per_second > 0.0 && pace.burst > 0,
            "--rate and --burst have to be more than 0"
        );
    }
    let size = load.block_size;
    ensure!(size > 0 && size.is_multiple_of(512), "--bs={size}: has to be a multiple of 512");
    ensure!(load.depth > 0 && load.queues > 0, "--depth and --queues have to be more than 0");
    Ok(load)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::COMMANDS;
    use crate::options::parse;

    #[test]
    fn a_load_is_read_from_options() {
        let arguments = "load --socket s --rw write --depth 8 --rate 1000 --burst 4".split(' ');
        let parser = lexopt::Parser::from_args(arguments);
        let (_, options) = parse(COMMANDS, parser).unwrap().unwrap();
        let arrivals = Arrivals::Paced(Pace { per_second: 1000.0, burst: 4 });
        let (op, order) = (Op::Write, Order::Sequential);
        assert_eq!(given(&options).unwrap(), Load { op, order, arrivals, depth: 8, ..load() });
    }
}
