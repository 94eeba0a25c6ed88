//! ringmill beside its peers: contenders take turns, row by row.

mod bars;
pub(crate) mod compare;
pub(crate) mod contender;
pub(crate) mod fio;
mod images;
mod limit;
pub(crate) mod measure;
pub(crate) mod rows;
pub(crate) mod server;
pub(crate) mod tree;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::host::data_file;
use crate::options::Options;
use crate::report::{Section, Table};
use crate::session::Session;
use compare::{Comparison, Figure, Results, Sample};
use contender::{Contender, Node, Polling};
use fio::{Fio, Target};
use images::Maker;
use measure::Bench;
use rows::{Contents, Disk, Extent, Row, Work};

/// Names of the contenders; the first is what others are compared with.
const KNOWN: [&str; 3] = ["qsd", "ringmill", "pinned"];

/// Measures and reports. Fails when a contender could not be measured, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let extent = match (options.quick(), options.has("full")) {
        (true, true) => bail!("--quick and --full exclude each other"),
        (true, false) => Extent::Quick,
        (false, true) => Extent::Full,
        (false, false) => Extent::Standard,
    };
    let rows = options.choose(rows::rows(extent), |row| row.name.clone())?;
    let usual = if extent == Extent::Full { 5000 } else { 2000 };
    let session = Session::new(options, 3, [300, usual])?;
    let contenders = Contender::all(options, &KNOWN, usize::from(extent == Extent::Standard))?;
    let size = if options.quick() { 64 << 20 } else { 1 << 30 };
    let needs_file =
        rows.iter().any(|row| !matches!(row.disk, Disk::Null | Disk::Image(Contents::New, _)));
    let bench = Peers {
        t_io_uring: limit::find_t_io_uring(&session.tree),
        bench: Bench {
            images: Maker {
                tree: session.tree.clone(),
                directory: session.directory.clone(),
                data: match needs_file {
                    true => data_file::prepare(&session.directory, size)?,
                    false => PathBuf::new(),
                },
            },
            fio: choose_client(options, extent, Fio::find(&session.tree)?)?,
            session,
        },
    };
    let session = &bench.bench.session;
    let results = bench.measure(rows, &contenders, session.rounds, session.counts_syscalls);
    bench.report(extent, size, &contenders, &results)?.publish(options.path("json").as_deref())?;
    let failures = results.iter().flat_map(|(row, _)| {
        row.limits.failures.iter().map(|reason| eprintln!("{}, {reason}", row.name))
    });
    compare::check(&results, failures.count(), &session.directory)
}

/// The client: `None` is the load generator of this program.
fn choose_client(options: &Options, extent: Extent, fio: Option<Fio>) -> Result<Option<Fio>> {
    match options.text("client") {
        Some("fio") if fio.is_none() => {
            bail!("there is no fio with libblkio; scripts/setup-peers.sh builds it")
        }
        Some("fio") => Ok(fio),
        Some(_) => Ok(None),
        None => Ok(fio.filter(|_| extent != Extent::Standard)),
    }
}

struct Peers {
    bench: Bench,
    t_io_uring: Option<Vec<OsString>>,
}

impl Comparison for Peers {
    type Row = Row;

    fn name(row: &Row) -> &str {
        &row.name
    }

    /// CPU time and context switches without polling, all else with default polling.
    fn sample(&self, contender: &Contender, row: &Row) -> Result<Sample> {
        let load = match &row.work {
            Work::Load(load) => load,
            Work::Idle(exports) => return self.bench.idle(contender, *exports),
        };
        let default = self.bench.load(contender, row.disk, load, Polling::Default)?;
        let unpolled = self.bench.load(contender, row.disk, load, Polling::Off)?;
        Ok(default.with(&[Figure::Cpu, Figure::Switches], &unpolled))
    }

    fn calls(&self, contender: &Contender, row: &Row) -> Result<f64> {
        match &row.work {
            Work::Load(load) => self.bench.syscalls(contender, row.disk, load),
            Work::Idle(_) => Ok(0.0),
        }
    }

    fn beside(&self, row: &mut Row) {
        limit::measure(&self.bench, self.t_io_uring.as_deref(), row);
    }
}

impl Peers {
    fn report(
        &self,
        extent: Extent,
        size: u64,
        contenders: &[Contender],
        results: &Results<Row>,
    ) -> Result<Section> {
        let session = &self.bench.session;
        let mut text = session.machine.clone();
        text.push(session.method("per server and row"));
        text.push(format!("File of {} MiB, written with random data", size >> 20));
        text.push(match &self.bench.fio {
            None => "Client: the load generator of `bench`".into(),
            Some(fio) => format!(
                "Client: {} with libblkio: `{}`, with `--runtime={}ms`, where latency and IOPS are taken also \
                 `--ramp_time={}ms`. Idle servers and counted system calls: the load generator of `bench`",
                fio.version,
                Fio::command_to_show(Target::Export("$SOCKETS/export0.sock".as_ref())),
                session.run_time.as_millis(),
                session.warm_up.as_millis()
            ),
        });
        if results.iter().any(|(row, _)| row.is_beside_limits) {
            text.extend(limit::describe());
        }
        let node = match results.iter().any(|(row, _)| row.disk == Disk::File) {
            true => Node::File(self.bench.images.data.clone()),
            false => Node::Null,
        };
        let setup = self.bench.setup(node, Polling::Off, 1, 1);
        let describe =
            |contender: &Contender| session.describe(contender, &[contender.serving(&setup)]);
        text.extend(contenders.iter().map(describe));
        let bars = bars::bars(results, contenders);
        if extent == Extent::Full {
            text.extend(bars::sums(&bars, contenders));
        }
        let mut tables = vec![
            bars::table(&bars),
            bars::beside_table(results, contenders),
            compare::table::<Self>(contenders, results, Some(0)),
            idle_table(contenders, results),
        ];
        if self.bench.fio.is_some() {
            let loads = results.iter().filter_map(|(row, _)| match &row.work {
                Work::Load(load) => Some((row.name.as_str(), load)),
                Work::Idle(_) => None,
            });
            tables.push(fio::jobs(loads)?);
        }
        tables.retain(|table| !table.body.is_empty());
        Ok(Section { heading: String::new(), text, tables })
    }
}

fn idle_table(contenders: &[Contender], results: &Results<Row>) -> Table {
    let mut table = Table::new(&["idle", "server", "CPU %", "switches/s"]);
    for (row, all) in results.iter().filter(|(row, _)| matches!(row.work, Work::Idle(_))) {
        for (contender, measured) in contenders.iter().zip(all) {
            let show = |figure: Figure| figure.show(measured.median(figure));
            let names = [row.name.clone(), contender.name.clone()];
            table.row(names.into_iter().chain([Figure::CpuShare, Figure::WakeUps].map(show)));
        }
    }
    table
}

/// ringmill, measured alone.
pub(crate) fn ringmill(options: &Options) -> Result<Contender> {
    Contender::find("ringmill", &options.places())
}
