//! One measurement of one server with many exports.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::host::data_file;
use crate::host::footprint::{Footprint, slab};
use crate::host::process::Usage;
use crate::load::arrivals::{Arrivals, Pace};
use crate::load::{Client, Load, Running};
use crate::peers::contender::{Contender, Node, Polling, Setup, numbered};
use crate::peers::measure::SocketDirectory;
use crate::peers::rows;
use crate::peers::server::Server;

/// Requests that a client has served before it is idle.
const BEFORE_IDLE: u32 = 16;
/// Requests in flight on each export when all are busy.
const DEPTH_OF_ALL: usize = 4;
/// Time limit of the first requests of all exports.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of each export's file.
const FILE_SIZE: u64 = 256 << 10;

/// Settings common to all measurements of a run.
pub(crate) struct Bench {
    /// Directory of logs and files.
    pub(crate) directory: PathBuf,
    /// Directory of sockets.
    pub(crate) sockets: SocketDirectory,
    /// Duration before the measurement.
    pub(crate) warm_up: Duration,
    /// Duration of the measurement.
    pub(crate) run_time: Duration,
    /// How long other exports have been idle before one is measured.
    pub(crate) settle: Duration,
    /// The CPU of the clients, if they are bound.
    pub(crate) client_cpu: Option<usize>,
    /// The CPU of the servers, if they are bound.
    pub(crate) server_cpu: Option<usize>,
}

/// The footprint of an idle server with a client on each export.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Idle {
    /// Milliseconds until all listen.
    pub(crate) start: f64,
    /// Its footprint.
    pub(crate) footprint: Footprint,
    /// Growth of the machine's kernel objects since before the server's start, KiB, including those of the clients.
    pub(crate) slab: f64,
    /// CPU time, percent of one CPU.
    pub(crate) cpu: f64,
    /// Context switches per second: each wake-up is one.
    pub(crate) switches: f64,
}

/// The results of a load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Busy {
    /// Requests per second.
    pub(crate) iops: f64,
    /// CPU time of the server per request, microseconds.
    pub(crate) cpu: f64,
    /// Median latency, microseconds, of the median queue.
    pub(crate) p50: f64,
    /// Median latency of the slowest queue, as a multiple.
    pub(crate) slowest: f64,
}

impl Bench {
    fn setup(&self, node: Node, polling: Polling, exports: usize) -> Setup {
        let sockets = (0..exports).map(|i| self.sockets.0.join(format!("{i}.sock"))).collect();
        Setup { node, polling, queues: 1, io_threads: 1, sockets }
    }

    fn start(&self, contender: &Contender, setup: &Setup) -> Result<Server> {
        Server::start(contender, setup, self.server_cpu, &self.directory)
    }

    fn load(&self) -> Load {
        Load { cpu: self.client_cpu, ..rows::load() }
    }

    /// Makes a client over exports `from..to`, and serves a few requests on each.
    fn idle_clients(&self, server: &mut Server, from: usize, to: usize) -> Result<Option<Running>> {
        // One burst on each at once, and the next one long after the measurement.
        let burst = BEFORE_IDLE;
        let per_second = f64::from(burst) * (to - from) as f64 / 86_400.0;
        let arrivals = Arrivals::Paced(Pace { per_second, burst });
        let load = Load { arrivals, depth: burst as usize, ..self.load() };
        let Some(clients) = connect(server, from..to, &load)? else { return Ok(None) };
        let running = clients.start()?;
        let wanted = u64::from(burst) * (to - from) as u64;
        let begun = Instant::now();
        while running.completed() < wanted {
            wait(server, &running, Duration::from_millis(5))?;
            ensure!(
                begun.elapsed() < PATIENCE,
                "only {} of the {wanted} first requests were served within {PATIENCE:?}",
                running.completed()
            );
        }
        Ok(Some(running))
    }

    /// Measures an idle server of files.
    pub(crate) fn idle(&self, contender: &Contender, exports: usize) -> Result<Idle> {
        let setup = self.setup(Node::Files(self.directory.join(FILES)), Polling::Default, exports);
        let slab_before = slab()?;
        let begun = Instant::now();
        let mut server = self.start(contender, &setup)?;
        server.listening(exports - 1)?;
        let start = begun.elapsed().as_secs_f64() * 1e3;
        let clients = self.idle_clients(&mut server, 0, exports)?;
        std::thread::sleep(self.settle);
        let before = Usage::read(server.pid())?;
        std::thread::sleep(self.run_time);
        let after = Usage::read(server.pid())?;
        server.check()?;
        let footprint = Footprint::read(server.pid())?;
        let slab = slab()? as f64 - slab_before as f64;
        drop(clients);
        server.stop()?;
        let seconds = (after.at - before.at).as_secs_f64();
        Ok(Idle {
            start,
            footprint,
            slab,
            cpu: (after.cpu - before.cpu).as_secs_f64() / seconds * 100.0,
            switches: after.switches.saturating_sub(before.switches) as f64 / seconds,
        })
    }

    /// Measures one busy export of a null node at this depth, with all others idle.
    pub(crate) fn one_busy(
        &self,
        contender: &Contender,
        exports: usize,
        depth: usize,
    ) -> Result<Busy> {
        let mut server =
            self.start(contender, &self.setup(Node::Null, Polling::Default, exports))?;
        let idle = self.idle_clients(&mut server, 1, exports)?;
        std::thread::sleep(self.settle);
        let client = server.connect(0, &Load { depth, ..self.load() })?;
        let busy = self.run(&mut server, client)?;
        drop(idle);
        server.stop()?;
        Ok(busy)
    }

    /// Measures busy exports of null nodes, driven by one client thread.
    pub(crate) fn all_busy(&self, contender: &Contender, exports: usize) -> Result<Busy> {
        let mut server =
            self.start(contender, &self.setup(Node::Null, Polling::Default, exports))?;
        let load = Load { depth: DEPTH_OF_ALL, ..self.load() };
        let clients = connect(&mut server, 0..exports, &load)?.context("no exports")?;
        let busy = self.run(&mut server, clients)?;
        server.stop()?;
        Ok(busy)
    }

    /// Measures one export on one or two I/O threads, polling off.
    pub(crate) fn threads(
        &self,
        contender: &Contender,
        io_threads: usize,
        load: &Load,
    ) -> Result<Busy> {
        let setup = self.setup(Node::Null, Polling::Off, 1);
        let setup = Setup { io_threads, queues: load.queues, ..setup };
        let mut server = self.start(contender, &setup)?;
        let client = server.connect(0, &Load { cpu: self.client_cpu, ..load.clone() })?;
        let busy = self.run(&mut server, client)?;
        server.stop()?;
        Ok(busy)
    }

    fn run(&self, server: &mut Server, client: Client) -> Result<Busy> {
        let running = client.start()?;
        wait(server, &running, self.warm_up)?;
        running.measure(true);
        let before = (Usage::read(server.pid())?, running.completed());
        wait(server, &running, self.run_time)?;
        let after = (Usage::read(server.pid())?, running.completed());
        running.measure(false);
        let (queues, _) = running.finish_queues()?;
        let requests = (after.1 - before.1) as f64;
        ensure!(requests > 0.0, "no request was served within {:?}", self.run_time);
        let mut p50: Vec<f64> =
            queues.iter().map(|queue| queue.value_at_percentile(50.0) as f64 / 1e3).collect();
        p50.sort_by(f64::total_cmp);
        ensure!(
            queues.iter().all(|queue| !queue.is_empty()),
            "one of {} queues was not served within {:?}",
            queues.len(),
            self.run_time
        );
        let (middle, last) = (p50[p50.len() / 2], p50[p50.len() - 1]);
        Ok(Busy {
            iops: requests / (after.0.at - before.0.at).as_secs_f64(),
            cpu: (after.0.cpu - before.0.cpu).as_secs_f64() * 1e6 / requests,
            p50: middle,
            slowest: last / middle,
        })
    }
}

/// Makes one client over several exports.
fn connect(
    server: &mut Server,
    exports: std::ops::Range<usize>,
    load: &Load,
) -> Result<Option<Client>> {
    let clients: Vec<Client> =
        exports.map(|export| server.connect(export, load)).collect::<Result<_>>()?;
    Ok(Client::join(clients))
}

/// Waits, unless the server or the client ends first.
fn wait(server: &mut Server, running: &Running, time: Duration) -> Result<()> {
    std::thread::sleep(time);
    server.check()?;
    ensure!(!running.has_failed(), "the client has given up");
    Ok(())
}

/// Prefix of the files' names.
const FILES: &str = "scale-";

/// A file per export, written from end to end; removed when dropped.
pub(crate) struct Files(Vec<PathBuf>);

impl Files {
    /// Makes them.
    pub(crate) fn new(directory: &Path, count: usize) -> Result<Self> {
        let mut files = Files(Vec::with_capacity(count));
        for i in 0..count {
            let path = numbered(&directory.join(FILES), i);
            let context = || format!("writing {}", path.display());
            let mut file = File::create(&path).with_context(context)?;
            files.0.push(path.clone());
            data_file::fill(&mut file, FILE_SIZE).with_context(context)?;
        }
        Ok(files)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}
