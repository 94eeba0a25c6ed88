//! How much a hostile front end or client costs its neighbours.
//!
//! One daemon has a victim's export. On the same I/O thread, and on another, it has exports, an NBD server and a monitor for
//! the attacker. The victim's requests are paced. Phases with and without an attack alternate.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hostile::{Attack, Target};

use crate::figures::median;
use crate::host::process::Usage;
use crate::host::{affinity, machine};
use crate::load::arrivals::{Arrivals, Pace};
use crate::load::offsets::Order;
use crate::load::queue::Op;
use crate::load::{Client, Load, Threads, Wait};
use crate::options::RunOptions;
use crate::peers::contender::ringmill_program;
use crate::peers::measure::{SocketDirectory, make_directory};
use crate::peers::server::Server;
use crate::peers::{build_ringmill, cpus};
use crate::report::{Section, Table};

/// Requests per second of the victim, which leave both CPUs partly idle.
const RATE: f64 = 20_000.0;

/// Maximum share of its requests that a victim may lose.
const MOST_LOST: f64 = 0.05;
/// Maximum repetitions, with the phases of the long form, of an attack that seems to cost more in the short form, whose
/// phases are so short that a hiccup of the machine shows.
const AGAIN: usize = 3;

/// The long form: milliseconds of a phase, and number of phases.
const LONG_MS: u64 = 700;
const ROUNDS: usize = 3;

/// The results of an attack over all rounds.
struct Row {
    name: String,
    blows: f64,
    /// Requests per second without the attack.
    quiet: f64,
    /// Requests per second with the attack.
    attacked: f64,
    /// 99th percentiles of the latencies, microseconds, without and with the attack.
    p99: [f64; 2],
    /// The daemon's CPU time, percent of one CPU, without and with the attack.
    cpu: [f64; 2],
}

/// A phase.
struct Sample {
    rate: f64,
    p99: f64,
    cpu: f64,
}

struct Bench {
    server: Server,
    sockets: SocketDirectory,
    run_time: Duration,
    client_cpu: Option<usize>,
}

/// Measures and reports. Fails if the victim sees an error, or loses more than permitted.
pub(crate) fn run(options: &RunOptions) -> Result<()> {
    build_ringmill(&options.places)?;
    let directory = make_directory(&options.directory)?;
    let [client_cpu, server_cpu] = cpus(options.client_cpu, options.server_cpu)?;
    let conditions = machine::describe(&directory);
    let sockets = SocketDirectory::new()?;
    let program = ringmill_program(&options.places)?;
    let command = command(program.into(), &sockets);
    let exports = ["victim", "same", "other"].map(|name| sockets.0.join(format!("{name}.sock")));
    let server = Server::spawn("neighbours", &command, &exports, server_cpu, &directory)?;
    if let Some(cpu) = client_cpu {
        affinity::bind_this_thread(cpu)?;
    }
    let run_time = options.run_time(100, LONG_MS);
    let mut bench = Bench { server, sockets, run_time, client_cpu };
    (0..exports.len()).try_for_each(|nth| bench.server.listening(nth).map(drop))?;
    let rounds = options.rounds(ROUNDS);
    let mut rows = Vec::new();
    for &attack in Attack::ALL.iter().filter(|attack| !attack.is_over_tls()) {
        let places: &[&str] = match attack {
            // NBD has only one export, on the victim's I/O thread.
            Attack::NbdDeaf => &["same"],
            _ if attack.is_on_io_thread() => &["same", "other"],
            _ => &["other"],
        };
        for place in places {
            let thread = match attack.is_on_io_thread() {
                true => format!("{place} I/O thread"),
                false => "control thread".to_owned(),
            };
            let name = format!("{}, {thread}", attack.name());
            if !options.wants(&name) {
                continue;
            }
            eprintln!("{name}");
            let mut row = bench.row(attack, place, name.clone(), rounds);
            for _ in 0..AGAIN {
                if !options.quick || row.as_ref().is_ok_and(|row| row.lost() <= MOST_LOST) {
                    break;
                }
                bench.run_time = Duration::from_millis(LONG_MS);
                row = bench.row(attack, place, name.clone(), ROUNDS);
                bench.run_time = run_time;
            }
            rows.push(row.with_context(|| format!("under {name}"))?);
        }
    }
    ensure!(!rows.is_empty(), "--rows matches none");
    bench.server.stop()?;
    let table = table(&rows);
    let method = method(rounds, run_time, [client_cpu, server_cpu]);
    let text = conditions.into_iter().chain([method]).collect();
    let report = Section { heading: String::new(), text, tables: vec![table] };
    report.publish(options.json.as_deref())?;
    let lost = rows.iter().find(|row| row.lost() > MOST_LOST);
    lost.map_or(Ok(()), |row| bail!("too much is lost under {}", row.name))
}

impl Row {
    /// The share of its requests that the victim has lost.
    fn lost(&self) -> f64 {
        1.0 - self.attacked / self.quiet
    }
}

fn command(program: OsString, sockets: &SocketDirectory) -> Vec<OsString> {
    let path = |name: &str| sockets.0.join(name).display().to_string();
    let null =
        |name: &str| format!("driver=null-co,node-name={name},size=1073741824,read-zeroes=on");
    let export = |name: &str, thread: &str| {
        let socket = path(&format!("{name}.sock"));
        format!(
            "type=vhost-user-blk,id={name},node-name={name},addr.type=unix,addr.path={socket},\
             writable=on,num-queues=2,iothread={thread}"
        )
    };
    let monitor = format!("socket,id=monitor,path={},server=on,wait=off", path("qmp.sock"));
    let nbd = format!("addr.type=unix,addr.path={}", path("nbd.sock"));
    let of_nbd = |thread: &str| {
        format!("type=nbd,id=nbd,node-name=hostile,name=hostile,writable=on,iothread={thread}")
    };
    let arguments = [
        "storage-daemon".to_owned(),
        "--object=iothread,id=io0".to_owned(),
        "--object=iothread,id=io1".to_owned(),
        format!("--blockdev={}", null("victim")),
        format!("--blockdev={}", null("same")),
        format!("--blockdev={}", null("other")),
        format!("--blockdev={}", null("hostile")),
        format!("--chardev={monitor}"),
        "--monitor=chardev=monitor".to_owned(),
        format!("--nbd-server={nbd}"),
        format!("--export={}", export("victim", "io0")),
        format!("--export={}", export("same", "io0")),
        format!("--export={}", export("other", "io1")),
        format!("--export={}", of_nbd("io0")),
    ];
    std::iter::once(program).chain(arguments.into_iter().map(Into::into)).collect()
}

impl Bench {
    fn row(&mut self, attack: Attack, place: &str, name: String, rounds: usize) -> Result<Row> {
        let target = Target {
            vhost_user: self.sockets.0.join(format!("{place}.sock")),
            nbd: self.sockets.0.join("nbd.sock"),
            nbd_tls: None,
            monitor: self.sockets.0.join("qmp.sock"),
        };
        let (mut quiet, mut attacked, mut blows) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            quiet.push(self.phase()?);
            let running = attack.begin(target.clone(), self.client_cpu)?;
            let sample = self.phase();
            blows.push(running.blows() as f64 / self.run_time.as_secs_f64());
            drop(running);
            attacked.push(sample?);
        }
        let of =
            |samples: &[Sample], figure: fn(&Sample) -> f64| median(samples.iter().map(figure));
        Ok(Row {
            name,
            blows: median(blows.into_iter()),
            quiet: of(&quiet, |sample| sample.rate),
            attacked: of(&attacked, |sample| sample.rate),
            p99: [of(&quiet, |sample| sample.p99), of(&attacked, |sample| sample.p99)],
            cpu: [of(&quiet, |sample| sample.cpu), of(&attacked, |sample| sample.cpu)],
        })
    }

    fn phase(&mut self) -> Result<Sample> {
        let load = Load {
            op: Op::Read,
            order: Order::Random,
            block_size: 4096,
            depth: 128,
            queues: 1,
            threads: Threads::One,
            arrivals: Arrivals::Paced(Pace { per_second: RATE, burst: 4 }),
            wait: Wait::Signal,
            cpu: self.client_cpu,
        };
        let running = Client::connect(&self.sockets.0.join("victim.sock"), &load)?.start()?;
        std::thread::sleep(self.run_time / 4);
        let pid = self.server.pid();
        let (before, requests) = (Usage::read(pid)?, running.completed());
        running.measure(true);
        std::thread::sleep(self.run_time);
        let (after, answered) = (Usage::read(pid)?, running.completed());
        running.measure(false);
        let (latencies, _) = running.finish()?;
        self.server.check()?;
        let seconds = (after.at - before.at).as_secs_f64();
        Ok(Sample {
            rate: (answered - requests) as f64 / seconds,
            p99: latencies.value_at_percentile(99.0) as f64 / 1e3,
            cpu: (after.cpu - before.cpu).as_secs_f64() / seconds * 100.0,
        })
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(&[
        "attack",
        "by the second",
        "quiet req/s",
        "attacked",
        "lost",
        "p99 us",
        "attacked",
        "CPU %",
        "attacked",
    ]);
    for row in rows {
        let lost = 100.0 * row.lost();
        table.row([
            row.name.clone(),
            format!("{:.0}", row.blows),
            format!("{:.0}", row.quiet),
            format!("{:.0}", row.attacked),
            format!("{lost:.1}%"),
            format!("{:.0}", row.p99[0]),
            format!("{:.0}", row.p99[1]),
            format!("{:.0}", row.cpu[0]),
            format!("{:.0}", row.cpu[1]),
        ]);
    }
    table
}

fn method(rounds: usize, run_time: Duration, cpus: [Option<usize>; 2]) -> String {
    let bound = match cpus {
        [Some(client), Some(server)] if client != server => {
            format!("victim and stranger on CPU {client}, the daemon on CPU {server}")
        }
        _ => "all share the CPUs, so that the stranger's own time is the daemon's loss".to_owned(),
    };
    format!(
        "Method: {rounds} round(s) of {run_time:?} without and {run_time:?} with each attack, in turns, \
         medians; the victim sends {RATE} reads of 4 KiB per second by the clock, whether they are \
         answered or not, on a null node; {bound}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_relative_to_service_without_an_attack() {
        let row = Row {
            name: "x".into(),
            blows: 1.0,
            quiet: 200.0,
            attacked: 190.0,
            p99: [1.0, 2.0],
            cpu: [3.0, 4.0],
        };
        assert!(table(&[row]).text().contains("5.0%"));
    }
}
