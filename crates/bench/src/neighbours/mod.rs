//! How much a hostile front end or client costs its neighbours.
//!
//! One daemon has a victim's export. On the same I/O thread, and on another, it has exports, an NBD server and a monitor for
//! the attacker. The victim's requests are paced. Phases with and without an attack alternate.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hostile::{Attack, Target};

use crate::figures::median;
use crate::load::Load;
use crate::load::arrivals::{Arrivals, Pace};
use crate::options::Options;
use crate::peers::compare::{Figure, Sample};
use crate::peers::contender::{Contender, Node};
use crate::peers::measure::own_figures;
use crate::peers::server::Server;
use crate::peers::{ringmill, rows};
use crate::report::{Section, Table};
use crate::session::{Session, SocketDirectory};

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
    /// Requests per second, without and with the attack.
    rate: [f64; 2],
    /// 99th percentiles of the latencies, microseconds, without and with the attack.
    p99: [f64; 2],
    /// The daemon's CPU time, percent of one CPU, without and with the attack.
    cpu: [f64; 2],
}

struct Bench {
    session: Session,
    server: Server,
    run_time: Duration,
}

/// Measures and reports. Fails if the victim sees an error, or loses more than permitted.
pub(crate) fn run(options: &Options) -> Result<()> {
    let attacks = options.choose(attacks(), |(_, _, name)| name.clone())?;
    let session = Session::new(options, ROUNDS, [100, LONG_MS])?;
    let command = command(&ringmill(options)?, &session.sockets);
    let exports = EXPORTS.map(|(name, _)| session.sockets.path(&format!("{name}.sock")));
    let server = session.start("neighbours", &command, &exports)?;
    let (rounds, run_time) = (session.rounds, session.run_time);
    let mut bench = Bench { session, server, run_time };
    (0..exports.len()).try_for_each(|nth| bench.server.listening(nth).map(drop))?;
    let mut rows = Vec::new();
    for (attack, place, name) in attacks {
        eprintln!("{name}");
        let mut row = bench.row(attack, place, name.clone(), rounds);
        for _ in 0..AGAIN {
            if !options.quick() || row.as_ref().is_ok_and(|row| row.lost() <= MOST_LOST) {
                break;
            }
            bench.run_time = Duration::from_millis(LONG_MS);
            row = bench.row(attack, place, name.clone(), ROUNDS);
            bench.run_time = run_time;
        }
        rows.push(row.with_context(|| format!("under {name}"))?);
    }
    bench.server.stop()?;
    let mut text = bench.session.machine.clone();
    text.push(bench.session.method("without and with each attack, in turns, medians"));
    text.push(format!(
        "The victim sends {RATE} reads of 4 KiB per second by the clock, whether they are answered or not, on a null node; the \
         stranger is on the victim's CPU"
    ));
    let report = Section { heading: String::new(), text, tables: vec![table(&rows)] };
    report.publish(options.path("json").as_deref())?;
    let lost = rows.iter().find(|row| row.lost() > MOST_LOST);
    lost.map_or(Ok(()), |row| bail!("too much is lost under {}", row.name))
}

/// All attacks, each with the export that it attacks, and its name.
fn attacks() -> Vec<(Attack, &'static str, String)> {
    let mut attacks = Vec::new();
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
            attacks.push((attack, *place, format!("{}, {thread}", attack.name())));
        }
    }
    attacks
}

impl Row {
    /// The share of its requests that the victim has lost.
    fn lost(&self) -> f64 {
        1.0 - self.rate[1] / self.rate[0]
    }
}

/// The vhost-user-blk exports, and their I/O threads.
const EXPORTS: [(&str, &str); 3] = [("victim", "io0"), ("same", "io0"), ("other", "io1")];

fn command(ringmill: &Contender, sockets: &SocketDirectory) -> Vec<OsString> {
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
    options.extend([
        null("hostile"),
        format!("--chardev=socket,id=monitor,path={},server=on,wait=off", path("qmp.sock")),
        "--monitor=chardev=monitor".into(),
        format!("--nbd-server=addr.type=unix,addr.path={}", path("nbd.sock")),
        hostile.into(),
    ]);
    ringmill.command(options)
}

impl Bench {
    fn row(&mut self, attack: Attack, place: &str, name: String, rounds: usize) -> Result<Row> {
        let target = Target {
            vhost_user: self.session.sockets.path(&format!("{place}.sock")),
            nbd: self.session.sockets.path("nbd.sock"),
            nbd_tls: None,
            monitor: self.session.sockets.path("qmp.sock"),
        };
        let (mut quiet, mut attacked, mut blows) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            quiet.push(self.phase()?);
            let running = attack.begin(target.clone(), self.session.cpus.client)?;
            let sample = self.phase();
            blows.push(running.blows() as f64 / self.run_time.as_secs_f64());
            drop(running);
            attacked.push(sample?);
        }
        let of = |samples: &[Sample], figure| median(samples.iter().map(|sample| sample[figure]));
        let both = |figure| [of(&quiet, figure), of(&attacked, figure)];
        Ok(Row {
            name,
            blows: median(blows.into_iter()),
            rate: both(Figure::Iops),
            p99: both(Figure::P99),
            cpu: both(Figure::CpuShare),
        })
    }

    fn phase(&mut self) -> Result<Sample> {
        let arrivals = Arrivals::Paced(Pace { per_second: RATE, burst: 4 });
        let load = self.session.bound(&Load { depth: 128, arrivals, ..rows::load() });
        let running = self.server.connect(0, &load)?.start()?;
        let warm_up = self.run_time / 4;
        let (sample, _) = own_figures(&mut self.server, running, warm_up, self.run_time)?;
        self.server.check()?;
        Ok(sample)
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
            format!("{:.0}", row.rate[0]),
            format!("{:.0}", row.rate[1]),
            format!("{lost:.1}%"),
            format!("{:.0}", row.p99[0]),
            format!("{:.0}", row.p99[1]),
            format!("{:.0}", row.cpu[0]),
            format!("{:.0}", row.cpu[1]),
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
            blows: 1.0,
            rate: [200.0, 190.0],
            p99: [1.0, 2.0],
            cpu: [3.0, 4.0],
        };
        assert!(table(&[row]).text().contains("5.0%"));
    }
}
