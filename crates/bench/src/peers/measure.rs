//! One measurement of one server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::client::Client;
use super::contender::{Contender, Node, Polling, Setup};
use super::fio::{Fio, Target, Terms};
use super::images::{Image, Maker};
use super::rows::Disk;
use super::server::Server;
use crate::host::process::Usage;
use crate::host::syscalls::Counter;
use crate::load::arrivals::{Arrivals, Pace};
use crate::load::requests::Requests;
use crate::load::{self, Load, Running};

/// Settings common to all measurements of a run.
#[derive(Debug)]
pub(crate) struct Bench {
    /// Directory of logs and the data file.
    pub(crate) directory: PathBuf,
    /// Makes images.
    pub(crate) images: Maker,
    /// Directory of sockets.
    pub(crate) sockets: SocketDirectory,
    /// The file of the file node.
    pub(crate) data_file: PathBuf,
    /// Duration before the measurement.
    pub(crate) warm_up: Duration,
    /// Duration of the measurement.
    pub(crate) run_time: Duration,
    /// The CPU of the client's threads, if they are bound.
    pub(crate) client_cpu: Option<usize>,
    /// The CPU of the servers, if they are bound.
    pub(crate) server_cpu: Option<usize>,
    /// The client that sends the load. Idle servers and counted system calls use this program's client.
    pub(crate) client: Client,
    /// Whether system calls are counted.
    pub(crate) count_syscalls: bool,
}

/// A server's results under a load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoadSample {
    /// Requests per second.
    pub(crate) iops: f64,
    /// Server CPU time per request, microseconds (the same number as CPU-seconds per million).
    pub(crate) cpu: f64,
    /// Server context switches per request.
    pub(crate) switches: f64,
    /// Latency in microseconds at the 50th, 99th and 99.9th percentile.
    pub(crate) latency: [f64; 3],
}

/// An idle server's results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IdleSample {
    /// CPU time, percent of one CPU.
    pub(crate) cpu: f64,
    /// Context switches per second: each wake-up is one.
    pub(crate) switches: f64,
}

/// Time from its last request until a server counts as idle. Adaptive polling ends long before.
pub(crate) const SETTLE: Duration = Duration::from_secs(1);

impl Bench {
    /// The options of a server for a disk.
    pub(crate) fn setup(
        &self,
        node: Node,
        polling: Polling,
        queues: usize,
        exports: usize,
    ) -> Setup {
        let sockets =
            (0..exports).map(|i| self.sockets.0.join(format!("export{i}.sock"))).collect();
        Setup { node, polling, queues, io_threads: 1, sockets }
    }

    /// The disk of a row, and the image that is made for it.
    fn disk(&self, disk: Disk) -> Result<(Node, Option<Image>)> {
        Ok(match disk {
            Disk::Null => (Node::Null, None),
            Disk::File => (Node::File(self.data_file.clone()), None),
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
    ) -> Result<LoadSample> {
        let (node, _image) = self.disk(disk)?;
        let setup = self.setup(node, polling, load.queues, 1);
        match &self.client {
            Client::Own => self.own_load(contender, &setup, load),
            Client::Fio(fio) => self.fio_load(fio, contender, &setup, load),
        }
    }

    /// fio does not report its requests at a given moment, so CPU time and context switches are those of its whole run,
    /// connecting included.
    fn fio_load(
        &self,
        fio: &Fio,
        contender: &Contender,
        setup: &Setup,
        load: &Load,
    ) -> Result<LoadSample> {
        let mut server = self.start(contender, setup)?;
        let socket = server.listening(0)?;
        let terms = Terms {
            // fio does not count requests of the ramp, so there is none where CPU time matters.
            ramp: if setup.polling == Polling::Off { Duration::ZERO } else { self.warm_up },
            run_time: self.run_time,
            cpu: self.client_cpu,
            directory: &self.directory,
        };
        fio_sample(fio, Target::Export(&socket), load, terms, server)
    }

    fn own_load(&self, contender: &Contender, setup: &Setup, load: &Load) -> Result<LoadSample> {
        let mut server = self.start(contender, setup)?;
        let running = server.connect(0, &self.bound(load))?.start()?;
        own_sample(server, running, self.warm_up, self.run_time)
    }

    /// System calls per request under a load, polling off; nothing is timed meanwhile. `None` if they cannot be counted here.
    pub(crate) fn syscalls(
        &self,
        contender: &Contender,
        disk: Disk,
        load: &Load,
    ) -> Result<Option<f64>> {
        if !self.count_syscalls {
            return Ok(None);
        }
        let (node, _image) = self.disk(disk)?;
        let setup = self.setup(node, Polling::Off, load.queues, 1);
        let mut server = self.start(contender, &setup)?;
        let client = server.connect(0, &self.bound(load))?;
        count_syscalls(server, client, &self.directory, self.run_time).map(Some)
    }

    /// An idle server, with default polling, after a few requests.
    pub(crate) fn idle(&self, contender: &Contender, exports: usize) -> Result<IdleSample> {
        const REQUESTS: u32 = 16;
        let setup = self.setup(Node::Null, Polling::Default, 1, exports);
        let mut server = self.start(contender, &setup)?;
        // One burst at once, and the next one long after the measurement.
        let pace = Pace { per_second: f64::from(REQUESTS) / 86_400.0, burst: REQUESTS };
        let load = self.bound(&Load {
            arrivals: Arrivals::Paced(pace),
            depth: REQUESTS as usize,
            ..super::rows::load()
        });
        let clients: Vec<Running> = (0..exports)
            .map(|export| server.connect(export, &load)?.start())
            .collect::<Result<_>>()?;
        for client in &clients {
            while client.completed() < u64::from(REQUESTS) {
                watch(&mut server, client, Duration::from_millis(1))?;
            }
        }
        std::thread::sleep(SETTLE);
        let before = Usage::read(server.pid())?;
        std::thread::sleep(self.run_time);
        let after = Usage::read(server.pid())?;
        server.check()?;
        // All at once, as each takes a moment to wake up.
        clients.iter().for_each(Running::abandon);
        drop(clients);
        server.stop()?;
        let seconds = (after.at - before.at).as_secs_f64();
        Ok(IdleSample {
            cpu: (after.cpu - before.cpu).as_secs_f64() / seconds * 100.0,
            switches: after.switches.saturating_sub(before.switches) as f64 / seconds,
        })
    }

    fn start(&self, contender: &Contender, setup: &Setup) -> Result<Server> {
        Server::start(contender, setup, self.server_cpu, &self.directory)
    }

    fn bound(&self, load: &Load) -> Load {
        Load { cpu: self.client_cpu, ..load.clone() }
    }
}

/// A server's results under fio's load, from its first connection to its last.
pub(crate) fn fio_sample(
    fio: &Fio,
    target: Target<'_>,
    load: &Load,
    terms: Terms<'_>,
    mut server: Server,
) -> Result<LoadSample> {
    let before = Usage::read(server.pid())?;
    let counted = fio.run(target, load, terms, || server.check())?;
    let after = Usage::read(server.pid())?;
    server.stop()?;
    let served = counted.requests * (1.0 + terms.ramp.as_secs_f64() / counted.seconds);
    Ok(LoadSample {
        iops: counted.iops,
        cpu: (after.cpu - before.cpu).as_secs_f64() * 1e6 / served,
        switches: after.switches.saturating_sub(before.switches) as f64 / served,
        latency: counted.latency,
    })
}

/// A server's results under this program's load, after the warm-up.
pub(crate) fn own_sample(
    mut server: Server,
    running: Running,
    warm_up: Duration,
    run_time: Duration,
) -> Result<LoadSample> {
    let window = watch_window(&mut server, &running, warm_up, run_time);
    // The client's error is more informative than the server's.
    let (latencies, _) = match window {
        Ok(_) => running.finish()?,
        Err(error) if running.has_failed() => {
            return Err(running.finish().err().unwrap_or(error));
        }
        Err(error) => return Err(error),
    };
    let (before, after) = window?;
    server.stop()?;
    let requests = (after.requests - before.requests) as f64;
    ensure!(requests > 0.0, "no request was served within {PATIENCE:?}");
    let seconds = (after.usage.at - before.usage.at).as_secs_f64();
    let percentile = |p| latencies.value_at_percentile(p) as f64 / 1e3;
    Ok(LoadSample {
        iops: requests / seconds,
        cpu: (after.usage.cpu - before.usage.cpu).as_secs_f64() * 1e6 / requests,
        switches: after.usage.switches.saturating_sub(before.usage.switches) as f64 / requests,
        latency: [percentile(50.0), percentile(99.0), percentile(99.9)],
    })
}

/// System calls per request of a server under this program's load; nothing is timed meanwhile.
pub(crate) fn count_syscalls<Q: Requests>(
    mut server: Server,
    client: load::Client<Q>,
    directory: &Path,
    run_time: Duration,
) -> Result<f64> {
    // Attached before the first request and detached after the last, so that calls and requests match.
    let counter = Counter::attach(server.pid(), directory)?;
    let running = client.start()?;
    watch(&mut server, &running, run_time.min(Duration::from_secs(1)))?;
    let (_, requests) = running.finish()?;
    let calls = counter.detach()?;
    server.stop()?;
    ensure!(requests > 0, "no request was served while system calls were counted");
    Ok(calls as f64 / requests as f64)
}

struct Moment {
    usage: Usage,
    requests: u64,
}

/// Time limit of a disk's first request, which takes long on a busy disk.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs the warm-up, then measures for `run_time`, or longer until a request was served.
fn watch_window(
    server: &mut Server,
    running: &Running,
    warm_up: Duration,
    run_time: Duration,
) -> Result<(Moment, Moment)> {
    watch(server, running, warm_up)?;
    let pid = server.pid();
    let now = || -> Result<Moment> {
        Ok(Moment { usage: Usage::read(pid)?, requests: running.completed() })
    };
    running.measure(true);
    let before = now()?;
    watch(server, running, run_time)?;
    let patience = std::time::Instant::now() + PATIENCE;
    while running.completed() == before.requests && std::time::Instant::now() < patience {
        watch(server, running, run_time)?;
    }
    let after = now()?;
    running.measure(false);
    Ok((before, after))
}

/// Waits, unless the server or the client ends first.
pub(crate) fn watch(server: &mut Server, running: &Running, time: Duration) -> Result<()> {
    const STEP: Duration = Duration::from_millis(250);
    let end = std::time::Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(STEP));
        server.check()?;
        ensure!(!running.has_failed(), "the client has given up");
    }
}

/// A directory for sockets, removed when dropped. Not below the target directory, whose path may exceed the limit of a
/// socket's path (108 bytes, unix(7)).
#[derive(Debug)]
pub(crate) struct SocketDirectory(pub(crate) PathBuf);

impl SocketDirectory {
    /// Makes it.
    pub(crate) fn new() -> Result<Self> {
        let template = std::env::temp_dir().join("bench-XXXXXX");
        let path = nix::unistd::mkdtemp(&template)
            .with_context(|| format!("making a directory like {}", template.display()))?;
        Ok(Self(path))
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Makes the directory for logs and data.
pub(crate) fn make_directory(directory: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("making the directory {}", directory.display()))?;
    // Absolute, since servers may change their working directory.
    directory.canonicalize().with_context(|| format!("resolving {}", directory.display()))
}
