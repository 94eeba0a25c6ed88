//! How much a hostile front end or client costs its neighbours, beside other servers.
//!
//! One daemon has a victim's export. On the same I/O thread, and on another, it has exports, an NBD server and a monitor for
//! the attacker. The victim's requests are paced, and so are a second monitor's. Phases with and without an attack alternate.

mod monitor;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context, Error, Result, anyhow};
use hostile::images::Costly;
use hostile::{Attack, Target};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::figures::median;
use crate::host::footprint::Footprint;
use crate::load::Load;
use crate::load::arrivals::{Arrivals, Pace};
use crate::options::Options;
use crate::peers::compare::{Figure, Sample};
use crate::peers::contender::{Contender, Node, qemu_img, quoted};
use crate::peers::measure::own_figures;
use crate::peers::rows;
use crate::peers::server::Server;
use crate::report::{Section, Table};
use crate::session::{Session, SocketDirectory};
use monitor::Probe;

/// Requests per second of the victim.
const RATE: f64 = 1000.0;

/// Maximum share of its requests that a victim of ringmill may lose.
const MOST_LOST: f64 = 0.05;
/// What a neighbour should bear at most: the victim's 99th percentile and the monitor's, microseconds; the victim's median
/// beside that without an attack; growth of the server's memory, MiB.
const P99: f64 = 2000.0;
const MONITOR: f64 = 20_000.0;
const P50: f64 = 1.2;
const GROWTH: f64 = 16.0;

/// Maximum repetitions, with the phases of the long form, of an attack that seems to cost more in the short form, whose
/// phases are so short that a hiccup of the machine shows.
const AGAIN: usize = 3;

/// The long form: milliseconds of a phase, and number of phases.
const LONG_MS: u64 = 700;
const ROUNDS: usize = 3;

/// Time for an attack's rounds. A server that hangs is killed then, so that whatever waits for it ends.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time for memory to be given back after an attack.
const GIVEN_BACK: Duration = Duration::from_secs(3);

/// The contenders, ringmill first.
const KNOWN: [&str; 2] = ["ringmill", "qsd"];

/// The results of an attack over all rounds. Pairs are without and with the attack.
struct Row {
    name: String,
    server: String,
    blows: f64,
    /// Requests per second.
    rate: [f64; 2],
    /// Latencies, microseconds.
    p50: [f64; 2],
    p99: [f64; 2],
    /// The daemon's CPU time, percent of one CPU.
    cpu: [f64; 2],
    /// The 99th percentile of the monitor's answers under attack, microseconds.
    monitor: f64,
    /// Growth of the anonymous memory over all rounds, MiB.
    growth: f64,
}

struct Bench {
    session: Session,
    run_time: Duration,
}

/// Measures and reports. Fails if ringmill's victim sees an error, or loses more than permitted.
pub(crate) fn run(options: &Options) -> Result<()> {
    let attacks = options.choose(attacks(), |(_, _, name)| name.clone())?;
    let session = Session::new(options, ROUNDS, [100, LONG_MS])?;
    let contenders = Contender::all(options, &KNOWN, usize::from(options.quick()))?;
    let (rounds, run_time) = (session.rounds, session.run_time);
    let mut bench = Bench { session, run_time };
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    // Why ringmill's first row has failed, of those that have.
    let mut verdict = Ok(());
    for (attack, place, name) in attacks {
        for contender in &contenders {
            eprintln!("{name}, {}", contender.name);
            let mut row = bench.row(contender, attack, place, &name, rounds);
            for _ in 0..AGAIN {
                if !options.quick() || row.as_ref().is_ok_and(|row| row.lost() <= MOST_LOST) {
                    break;
                }
                bench.run_time = Duration::from_millis(LONG_MS);
                row = bench.row(contender, attack, place, &name, ROUNDS);
                bench.run_time = run_time;
            }
            let failure = match &row {
                Ok(row) if row.lost() > MOST_LOST => Some("too much is lost".to_owned()),
                Ok(_) => None,
                Err(error) => Some(format!("{error:#}")),
            };
            if let Some(failure) = failure {
                let failure = format!("{name}, {}: {failure}", contender.name);
                if contender.is_ringmill() && verdict.is_ok() {
                    verdict = Err(anyhow!(failure.clone()));
                }
                failures.push(failure);
            }
            rows.extend(row.ok());
        }
    }
    let mut text = bench.session.machine.clone();
    text.push(bench.session.method("without and with each attack, in turns, medians"));
    text.push(format!(
        "The victim sends {RATE} reads of 4 KiB per second by the clock, whether they are answered or not, on a null node; the \
         attacker is on the victim's CPU, at the lowest priority. A monitor sends a command every 10 ms"
    ));
    let describe = |contender| {
        bench.session.describe(contender, &[command(contender, &bench.session.sockets, &[])])
    };
    text.extend(contenders.iter().map(describe));
    text.extend(failures.iter().map(|failure| format!("Failed: {failure}")));
    let report = Section { heading: String::new(), text, tables: vec![table(&rows)] };
    report.publish(options.path("json").as_deref())?;
    verdict
}

/// All attacks, each with the export that it attacks, and its name.
fn attacks() -> Vec<(Attack, &'static str, String)> {
    let mut attacks = Vec::new();
    for &attack in Attack::ALL.iter().filter(|attack| !attack.is_over_tls()) {
        let places: &[&str] = match attack.is_on_io_thread() {
            // NBD has only the victim's I/O thread.
            true if attack.is_on_nbd_thread() => &["same"],
            true => &["same", "other"],
            false => &["other"],
        };
        for place in places {
            let thread = match attack.is_on_io_thread() {
                true => format!("{place} I/O thread"),
                false => "control thread".to_owned(),
            };
            attacks.push((attack, *place, format!("{}, {thread}", attack.name())));
        }
    }
    attacks
}

/// Options that open an image, and export it.
fn export(image: Costly, path: &Path) -> Vec<String> {
    let (name, path) = (image.name(), quoted(path));
    vec![
        format!(
            "--blockdev=driver=qcow2,node-name={name},discard=unmap,file.driver=file,file.discard=unmap,file.filename={path}"
        ),
        format!(
            "--export=type=nbd,id=nbd-{name},node-name={name},name={name},writable=on,iothread=io0{}",
            image.export_options()
        ),
    ]
}

impl Row {
    /// The share of its requests that the victim has lost.
    fn lost(&self) -> f64 {
        1.0 - self.rate[1] / self.rate[0]
    }

    /// The figures that are beyond the bars.
    fn beyond(&self) -> String {
        let figures = [
            ("p50", self.p50[1] > P50 * self.p50[0]),
            ("p99", self.p99[1] > P99),
            ("monitor", self.monitor > MONITOR),
            ("memory", self.growth > GROWTH),
        ];
        let beyond = figures.iter().filter(|(_, is_beyond)| *is_beyond);
        beyond.map(|(name, _)| *name).collect::<Vec<_>>().join(" ")
    }
}

/// The vhost-user-blk exports, and their I/O threads.
const EXPORTS: [(&str, &str); 3] = [("victim", "io0"), ("same", "io0"), ("other", "io1")];

fn command(contender: &Contender, sockets: &SocketDirectory, more: &[String]) -> Vec<OsString> {
    let path = |name: &str| sockets.path(name).display().to_string();
    let mut options = vec!["--object=iothread,id=io0".into(), "--object=iothread,id=io1".into()];
    let null = |name: &str| format!("--blockdev={},node-name={name}", Node::Null.spelled());
    for (name, thread) in EXPORTS {
        options.push(null(name));
        let socket = path(&format!("{name}.sock"));
        options.push(format!(
            "--export=type=vhost-user-blk,id={name},node-name={name},addr.type=unix,addr.path={socket},\
             writable=on,num-queues=2,iothread={thread}"
        ));
    }
    let hostile =
        "--export=type=nbd,id=nbd,node-name=hostile,name=hostile,writable=on,iothread=io0";
    options.push(null("hostile"));
    for monitor in ["qmp", "probe"] {
        let socket = path(&format!("{monitor}.sock"));
        options.push(format!("--chardev=socket,id={monitor},path={socket},server=on,wait=off"));
        options.push(format!("--monitor=chardev={monitor}"));
    }
    options.extend([
        format!("--nbd-server=addr.type=unix,addr.path={},max-connections=0", path("nbd.sock")),
        hostile.into(),
    ]);
    options.extend(more.iter().cloned());
    contender.command(options)
}

/// Kills a server after [`PATIENCE`], unless it is dropped before.
struct Deadline {
    /// Ends the thread's wait when it is closed.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Deadline {
    fn start(pid: Pid) -> Result<Self> {
        let (end, ended) = std::sync::mpsc::channel();
        let wait = move || {
            if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                let _ = kill(pid, Signal::SIGKILL);
            }
        };
        let thread = std::thread::Builder::new().name("deadline".into()).spawn(wait);
        Ok(Self { end: Some(end), thread: Some(thread.context("starting a thread")?) })
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Bench {
    /// Makes an image anew, as a killed server may have left it in use or unclosed. Returns its path.
    fn make(&self, image: Costly) -> Result<PathBuf> {
        let folder = self.session.directory.join("costly");
        if folder.exists() {
            fs::remove_dir_all(&folder).context("removing the last image")?;
        }
        fs::create_dir(&folder).context("making a folder for an image")?;
        let made = image.make(&folder, &mut |arguments| {
            qemu_img(&self.session.tree, &[], arguments)
                .map_err(|error| io::Error::other(format!("{error:#}")))
        });
        made.with_context(|| format!("making the image '{}'", image.name()))
    }

    /// Measures an attack on a new server, so that no attack's work is left in another's phases.
    fn row(
        &mut self,
        contender: &Contender,
        attack: Attack,
        place: &str,
        name: &str,
        rounds: usize,
    ) -> Result<Row> {
        let sockets = &self.session.sockets;
        let image = attack.image().map(|image| self.make(image)).transpose()?;
        let exported = attack.image().filter(|_| attack.is_on_io_thread()).zip(image.as_deref());
        let options = exported.map_or(Vec::new(), |(image, path)| export(image, path));
        let command = command(contender, sockets, &options);
        let target = Target {
            vhost_user: sockets.path(&format!("{place}.sock")),
            nbd: sockets.path("nbd.sock"),
            nbd_tls: None,
            monitor: sockets.path("qmp.sock"),
            shared_tables: image.clone().filter(|_| !attack.is_on_io_thread()),
        };
        let exports = EXPORTS.map(|(name, _)| sockets.path(&format!("{name}.sock")));
        let probe = sockets.path("probe.sock");
        let mut server = self.session.start(&contender.name, &command, &exports)?;
        (0..exports.len()).try_for_each(|nth| server.listening(nth).map(drop))?;
        let deadline = Deadline::start(server.pid())?;
        let (mut quiet, mut attacked, mut blows) = (Vec::new(), Vec::new(), Vec::new());
        let mut monitor = Vec::new();
        // The first phase also fills pools and caches.
        self.phase(&mut server)?;
        let memory = |server: &Server| Ok::<_, Error>(Footprint::read(server.pid())?.anonymous);
        let before = memory(&server)?;
        for _ in 0..rounds {
            quiet.push(self.phase(&mut server)?);
            let running = attack.begin(target.clone(), self.session.cpus.client)?;
            let probing = Probe::start(&probe)?;
            let sample = self.phase(&mut server);
            blows.push(running.blows() as f64 / self.run_time.as_secs_f64());
            drop(running);
            monitor.push(probing.finish()?);
            attacked.push(sample?);
        }
        let patience = Instant::now() + GIVEN_BACK;
        let growth = loop {
            let growth = (memory(&server)? as f64 - before as f64) / 1024.0;
            if growth <= GROWTH || Instant::now() > patience {
                break growth;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        server.check()?;
        drop(deadline);
        let ended = server.stop();
        if contender.is_ringmill() {
            ended?;
        }
        let of = |samples: &[Sample], figure| median(samples.iter().map(|sample| sample[figure]));
        let both = |figure| [of(&quiet, figure), of(&attacked, figure)];
        Ok(Row {
            name: name.to_owned(),
            server: contender.name.clone(),
            blows: median(blows.into_iter()),
            rate: both(Figure::Iops),
            p50: both(Figure::P50),
            p99: both(Figure::P99),
            cpu: both(Figure::CpuShare),
            monitor: median(monitor.into_iter()),
            growth,
        })
    }

    fn phase(&self, server: &mut Server) -> Result<Sample> {
        let arrivals = Arrivals::Paced(Pace { per_second: RATE, burst: 1 });
        let load = self.session.bound(&Load { depth: 128, arrivals, ..rows::load() });
        let running = server.connect(0, &load)?.start()?;
        let warm_up = self.run_time / 4;
        let (sample, _) = own_figures(server, running, warm_up, self.run_time)?;
        server.check()?;
        Ok(sample)
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(&[
        "attack",
        "server",
        "by the second",
        "lost",
        "p50 us",
        "attacked",
        "p99 us",
        "attacked",
        "monitor p99 us",
        "MiB kept",
        "CPU %",
        "attacked",
        "beyond",
    ]);
    for row in rows {
        let lost = 100.0 * row.lost();
        table.row([
            row.name.clone(),
            row.server.clone(),
            format!("{:.0}", row.blows),
            format!("{lost:.1}%"),
            format!("{:.0}", row.p50[0]),
            format!("{:.0}", row.p50[1]),
            format!("{:.0}", row.p99[0]),
            format!("{:.0}", row.p99[1]),
            format!("{:.0}", row.monitor),
            format!("{:.0}", row.growth),
            format!("{:.0}", row.cpu[0]),
            format!("{:.0}", row.cpu[1]),
            row.beyond(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_relative_to_service_without_an_attack() {
        let row = Row {
            name: "x".into(),
            server: "ringmill".into(),
            blows: 1.0,
            rate: [200.0, 190.0],
            p50: [1.0, 1.1],
            p99: [1.0, 2001.0],
            cpu: [3.0, 4.0],
            monitor: 20_001.0,
            growth: 15.0,
        };
        assert_eq!(row.beyond(), "p99 monitor");
        assert!(table(&[row]).text().contains("5.0%"));
    }
}
