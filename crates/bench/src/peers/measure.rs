//! One measurement of one server.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;

use super::compare::{Figure, Sample};
use super::contender::{Contender, Node, Polling, Setup};
use super::fio::{Fio, Target, Terms};
use super::images::{Image, Maker};
use super::rows::Disk;
use super::server::Server;
use crate::host::process::Usage;
use crate::host::syscalls::Counter;
use crate::load::arrivals::{Arrivals, Pace};
use crate::load::{Client, Load, Running, together};
use crate::session::Session;

/// Settings common to all measurements of a run.
#[derive(Debug)]
pub(crate) struct Bench {
    /// The run.
    pub(crate) session: Session,
    /// Makes images. Its data are the file of the file node.
    pub(crate) images: Maker,
    /// The client that sends the load; `None` for this program's. Idle servers and counted system calls use this program's.
    pub(crate) fio: Option<Fio>,
}

/// Time from its last request until a server counts as idle. Adaptive polling ends long before.
const SETTLE: Duration = Duration::from_secs(1);
/// Requests that a client has served before it is idle.
const BEFORE_IDLE: u32 = 16;

impl Bench {
    /// The options of a server for a disk.
    pub(crate) fn setup(
        &self,
        node: Node,
        polling: Polling,
        queues: usize,
        exports: usize,
    ) -> Setup {
        let socket = |i| self.session.sockets.path(&format!("export{i}.sock"));
        let sockets = (0..exports).map(socket).collect();
        Setup { nodes: vec![node; exports], polling, queues, io_threads: 1, sockets }
    }

    /// The disk of a row, and the image that is made for it.
    fn disk(&self, disk: Disk) -> Result<(Node, Option<Image>)> {
        Ok(match disk {
            Disk::Null => (Node::Null, None),
            Disk::File => (Node::File(self.images.data.clone()), None),
            Disk::Image(contents, place) => {
                let image = self.images.make(contents, place)?;
                (image.node.clone(), Some(image))
            }
        })
    }

    /// Throughput, latency and CPU time under a load.
    pub(crate) fn load(
        &self,
        contender: &Contender,
        disk: Disk,
        load: &Load,
        polling: Polling,
    ) -> Result<Sample> {
        let (node, _image) = self.disk(disk)?;
        let session = &self.session;
        let mut server = session.serve(contender, &self.setup(node, polling, load.queues, 1))?;
        let Some(fio) = &self.fio else {
            let running = server.connect(0, &session.bound(load))?.start()?;
            return own_sample(server, running, session.warm_up, session.run_time);
        };
        // fio does not count requests of the ramp, so there is none where CPU time matters.
        let ramp = if polling == Polling::Off { Duration::ZERO } else { session.warm_up };
        let (socket, terms) = (server.listening(0)?, Terms { ramp, ..session.terms() });
        fio_sample(fio, Target::Export(&socket), load, terms, server)
    }

    /// System calls per request under a load, polling off; nothing is timed meanwhile.
    pub(crate) fn syscalls(&self, contender: &Contender, disk: Disk, load: &Load) -> Result<f64> {
        let (node, _image) = self.disk(disk)?;
        let session = &self.session;
        let setup = self.setup(node, Polling::Off, load.queues, 1);
        let mut server = session.serve(contender, &setup)?;
        let client = server.connect(0, &session.bound(load))?;
        // Attached before the first request and detached after the last, so that calls and requests match.
        let counter = Counter::attach(server.pid(), &session.directory)?;
        let running = client.start()?;
        watch(&mut server, &running, session.run_time.min(Duration::from_secs(1)))?;
        let (_, requests) = running.finish()?;
        let calls = counter.detach()?;
        server.stop()?;
        ensure!(requests > 0, "no request was served while system calls were counted");
        Ok(calls as f64 / requests as f64)
    }

    /// An idle server, with default polling, after a few requests.
    pub(crate) fn idle(&self, contender: &Contender, exports: usize) -> Result<Sample> {
        let setup = self.setup(Node::Null, Polling::Default, 1, exports);
        let mut server = self.session.serve(contender, &setup)?;
        let clients = idle_clients(&self.session, &mut server, 0..exports)?;
        std::thread::sleep(SETTLE);
        let sample = idle_sample(&mut server, self.session.run_time)?;
        drop(clients);
        server.stop()?;
        Ok(sample)
    }
}

impl Session {
    /// Starts a storage daemon.
    pub(crate) fn serve(&self, contender: &Contender, setup: &Setup) -> Result<Server> {
        self.start(&contender.name, &contender.serving(setup), &setup.sockets)
    }

    /// A load, sent from the client's CPU.
    pub(crate) fn bound(&self, load: &Load) -> Load {
        Load { cpu: self.cpus.client, ..load.clone() }
    }

    /// The settings of fio's job, without a ramp: fio does not count its requests, but the server spends CPU time on them.
    pub(crate) fn terms(&self) -> Terms<'_> {
        Terms {
            ramp: Duration::ZERO,
            run_time: self.run_time,
            cpu: self.cpus.client,
            directory: &self.directory,
        }
    }
}

/// Makes a client over several exports, and serves a few requests on each. `None`: there are no exports.
pub(crate) fn idle_clients(
    session: &Session,
    server: &mut Server,
    exports: std::ops::Range<usize>,
) -> Result<Option<Running>> {
    // One burst on each at once, and the next one long after the measurement.
    let (burst, count) = (BEFORE_IDLE, exports.len());
    let per_second = f64::from(burst) * count as f64 / 86_400.0;
    let arrivals = Arrivals::Paced(Pace { per_second, burst });
    let load = Load { arrivals, depth: burst as usize, ..super::rows::load() };
    let Some(clients) = connect(session, server, exports, &load)? else { return Ok(None) };
    let running = clients.start()?;
    let wanted = u64::from(burst) * count as u64;
    let begun = Instant::now();
    while running.completed() < wanted {
        watch(server, &running, Duration::from_millis(1))?;
        let done = running.completed();
        ensure!(
            begun.elapsed() < PATIENCE,
            "{done} of the {wanted} first requests were served within {PATIENCE:?}"
        );
    }
    Ok(Some(running))
}

/// Makes one client over several exports; `None` without exports.
pub(crate) fn connect(
    session: &Session,
    server: &mut Server,
    exports: std::ops::Range<usize>,
    load: &Load,
) -> Result<Option<Client>> {
    let load = session.bound(load);
    let clients: Vec<Client> =
        exports.map(|export| server.connect(export, &load)).collect::<Result<_>>()?;
    Ok(Client::join(clients))
}

/// What a server takes within `run_time` without a load.
pub(crate) fn idle_sample(server: &mut Server, run_time: Duration) -> Result<Sample> {
    let before = Usage::read(server.pid())?;
    std::thread::sleep(run_time);
    let after = Usage::read(server.pid())?;
    server.check()?;
    Ok(sample(f64::NAN, [f64::NAN; 3], [&before, &after], f64::NAN))
}

/// The figures of a load of which `iops` and the latencies in microseconds are known, and what the server has taken for all of its
/// `requests`.
fn sample(iops: f64, latency: [f64; 3], [before, after]: [&Usage; 2], requests: f64) -> Sample {
    let seconds = (after.at - before.at).as_secs_f64();
    let cpu = (after.cpu - before.cpu).as_secs_f64();
    let switches = after.switches.saturating_sub(before.switches) as f64;
    Sample::of(&[
        (Figure::Iops, iops),
        (Figure::Cpu, cpu * 1e6 / requests),
        (Figure::Switches, switches / requests),
        (Figure::P50, latency[0]),
        (Figure::P99, latency[1]),
        (Figure::P999, latency[2]),
        (Figure::CpuShare, cpu / seconds * 100.0),
        (Figure::WakeUps, switches / seconds),
    ])
}

/// A server's results under fio's load. fio does not report its requests at a given moment, so CPU time and context switches are
/// those of its whole run, from its first connection to its last.
pub(crate) fn fio_sample(
    fio: &Fio,
    target: Target<'_>,
    load: &Load,
    terms: Terms<'_>,
    mut server: Server,
) -> Result<Sample> {
    let before = Usage::read(server.pid())?;
    let counted = fio.run(target, load, terms, || server.check())?;
    let after = Usage::read(server.pid())?;
    server.stop()?;
    let served = counted.requests * (1.0 + terms.ramp.as_secs_f64() / counted.seconds);
    Ok(sample(counted.iops, counted.latency, [&before, &after], served))
}

/// System calls per request of a server under fio's load; nothing is timed meanwhile.
pub(crate) fn fio_calls(
    fio: &Fio,
    target: Target<'_>,
    load: &Load,
    terms: Terms<'_>,
    mut server: Server,
) -> Result<f64> {
    let counter = Counter::attach(server.pid(), terms.directory)?;
    let counted = fio.run(target, load, terms, || server.check())?;
    let calls = counter.detach()?;
    server.stop()?;
    Ok(calls as f64 / counted.requests)
}

/// A server's results under this program's load, after the warm-up.
pub(crate) fn own_sample(
    mut server: Server,
    running: Running,
    warm_up: Duration,
    run_time: Duration,
) -> Result<Sample> {
    let (sample, _) = own_figures(&mut server, running, warm_up, run_time)?;
    server.stop()?;
    Ok(sample)
}

/// The same of a server that goes on, with the median latency of each queue in microseconds.
pub(crate) fn own_figures(
    server: &mut Server,
    running: Running,
    warm_up: Duration,
    run_time: Duration,
) -> Result<(Sample, Vec<f64>)> {
    let ([before, after], requests) = match watch_window(server, &running, warm_up, run_time) {
        Ok(window) => window,
        // The client's error is more informative than the server's.
        Err(error) if running.has_failed() => return Err(running.finish().err().unwrap_or(error)),
        Err(error) => return Err(error),
    };
    let queues = running.finish_queues()?;
    let microseconds =
        |latencies: &Histogram<u64>, p| latencies.value_at_percentile(p) as f64 / 1e3;
    let medians = queues.iter().map(|latencies| microseconds(latencies, 50.0)).collect();
    let all = together(queues)?;
    let latency = [50.0, 99.0, 99.9].map(|p| microseconds(&all, p));
    let iops = requests / (after.at - before.at).as_secs_f64();
    Ok((sample(iops, latency, [&before, &after], requests), medians))
}

/// Time limit of a disk's first request, which takes long on a busy disk.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs the warm-up, then measures for `run_time`, or longer until a request was served. Returns what the server had taken before
/// and after, and the number of requests between.
fn watch_window(
    server: &mut Server,
    running: &Running,
    warm_up: Duration,
    run_time: Duration,
) -> Result<([Usage; 2], f64)> {
    watch(server, running, warm_up)?;
    running.measure(true);
    let (before, requests) = (Usage::read(server.pid())?, running.completed());
    let patience = Instant::now() + PATIENCE;
    watch(server, running, run_time)?;
    while running.completed() == requests {
        ensure!(Instant::now() < patience, "no request was served within {PATIENCE:?}");
        watch(server, running, run_time)?;
    }
    let (after, requests) = (Usage::read(server.pid())?, running.completed() - requests);
    running.measure(false);
    Ok(([before, after], requests as f64))
}

/// Waits, unless the server or the client ends first.
pub(crate) fn watch(server: &mut Server, running: &Running, time: Duration) -> Result<()> {
    const STEP: Duration = Duration::from_millis(250);
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(STEP));
        server.check()?;
        ensure!(!running.has_failed(), "the client has given up");
    }
}
