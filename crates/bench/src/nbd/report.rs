//! The report: aligned text for the terminal, JSON to record.

use anyhow::Result;

use super::Bench;
use super::rows::{Disk, Row, Sender};
use super::servers::Serving;
use crate::peers::compare::{self, Measured};
use crate::peers::contender::Contender;
use crate::peers::fio::{self, Fio, Target};
use crate::peers::method::{self, command_to_show};
use crate::peers::result::Figure;
use crate::report::{DEBUG, Section, Table};

type Results = [(Row, Vec<Measured>)];

/// The report of a run.
pub(super) fn section(
    mut text: Vec<String>,
    bench: &Bench,
    rounds: usize,
    contenders: &[Contender<Serving>],
    results: &Results,
) -> Result<Section> {
    let cpus = method::cpus([bench.client_cpu, bench.server_cpu]);
    text.push(format!(
        "Method: {rounds} round(s) of {:?} per server and row; {cpus}; CPU time is that of all of \
         the server's process, in the same run as requests and latency{DEBUG}",
        bench.run_time,
    ));
    text.push(
        "Files, written with random data: `direct` is read and written past the page cache where \
         the server can (nbdkit's file plugin cannot), and dropped from the page cache before \
         each run; `cached` is in the page cache"
            .into(),
    );
    text.push(format!(
        "Client: {}: `{}`; that of the rows that say so is the load generator of `bench`, which \
         also was the client where system calls were counted",
        bench.fio.version,
        Fio::command_to_show(Target::Nbd("nbd+unix:///?socket=$SOCKETS/nbd.sock"))
    ));
    for contender in contenders {
        let [direct, cached] =
            [Disk::Direct, Disk::Cached].map(|disk| shown_command(bench, contender, disk));
        text.push(format!("{}: {}\n  {direct}\n  {cached}", contender.name, contender.version));
    }
    let mut jobs = Table::new(&["load", "JOB"]);
    for (row, _) in results.iter().filter(|(row, _)| row.sender == Sender::Fio) {
        jobs.row([row.name.clone(), format!("`{}`", fio::job(&row.load)?.join(" "))]);
    }
    let names: Vec<&str> = contenders.iter().map(|contender| contender.name.as_str()).collect();
    let tables =
        vec![ahead(&names, results), compare::table::<Bench>(contenders, results, None), jobs];
    Ok(Section { heading: String::new(), text, tables })
}

/// Ratios of ringmill to each of the peers, row by row.
fn ahead(names: &[&str], results: &Results) -> Table {
    let is_own = |name: &str| name.starts_with("ringmill");
    let mut head = vec!["load".to_owned(), "server".into()];
    for peer in names.iter().filter(|name| !is_own(name)) {
        head.extend([format!("IOPS x {peer}"), format!("CPU x {peer}")]);
    }
    head.push("ahead in".into());
    let mut table = Table { head, body: Vec::new() };
    for (row, measured) in results {
        let (own, peers): (Vec<_>, Vec<_>) =
            names.iter().zip(measured).partition(|(name, _)| is_own(name));
        for (name, own) in own {
            let mut line = vec![row.name.clone(), (*name).to_owned()];
            let (mut most, mut least) = (true, true);
            for (_, peer) in &peers {
                let ratio = |figure| own.median(figure) / peer.median(figure);
                let (iops, cpu) = (ratio(Figure::Iops), ratio(Figure::Cpu));
                most &= iops > 1.0;
                least &= cpu < 1.0;
                line.extend([format!("{iops:.2}"), format!("{cpu:.2}")]);
            }
            line.push(ahead_in(most, least).into());
            table.row(line);
        }
    }
    table
}

fn ahead_in(iops: bool, cpu: bool) -> &'static str {
    match (iops, cpu) {
        (true, true) => "both",
        (true, false) => "IOPS",
        (false, true) => "CPU",
        (false, false) => "neither",
    }
}

/// The command of a contender, without machine-dependent paths.
fn shown_command(bench: &Bench, contender: &Contender<Serving>, disk: Disk) -> String {
    let command = contender.command(&bench.serving(disk));
    let places = [
        (&*bench.directory, "$DIR"),
        (&*bench.sockets.0, "$SOCKETS"),
        (&*bench.tree, "$RINGMILL_PEERS"),
    ];
    command_to_show(&command, &places)
}
