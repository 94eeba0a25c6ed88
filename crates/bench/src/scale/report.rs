//! The report: tables, goals, a plot.

use super::figures::{DEPTHS, Figures, Rounds, SECOND_THREAD, middle};
use super::measure::{Bench, Busy, Idle};
use crate::figures::range;
use crate::goal::{self, Bound, Goal};
use crate::peers::contender::Contender;
use crate::plot::Bar;
use crate::plot::lines::{Group, Line, Lines, Mark, Scale};
use crate::report::{DEBUG, Section, Table};

/// The report of a run.
pub(crate) fn section(
    mut text: Vec<String>,
    bench: &Bench,
    rounds: usize,
    contenders: &[Contender],
    figures: &Figures,
) -> Section {
    for contender in contenders {
        text.push(format!("{}: {}", contender.name, contender.version));
    }
    let bound = match (bench.client_cpu, bench.server_cpu) {
        (Some(client), Some(server)) if client != server => {
            format!("clients on CPU {client}, server, with all its threads, on CPU {server}")
        }
        _ => "clients and server share the CPUs, so that figures of both are mixed up".into(),
    };
    text.push(format!("Method: {rounds} round(s) of {:?} each; {bound}{DEBUG}", bench.run_time));
    for contender in contenders {
        for (exports, why) in figures.failures(&contender.name) {
            text.push(format!("{} FAILED with {exports} exports: {why}", contender.name));
        }
    }
    let servers: Vec<&str> = contenders.iter().map(|c| c.name.as_str()).collect();
    let mut tables = vec![idle_table(figures, &servers), busy_table(figures, &servers)];
    if servers.contains(&"ringmill") {
        tables.push(threads_table(figures));
        tables.push(goal::table("to reach", &goals(figures)));
    }
    tables.retain(|table| !table.body.is_empty());
    Section { heading: String::new(), text, tables }
}

fn anonymous(idle: &Idle) -> f64 {
    idle.footprint.anonymous as f64
}

fn idle_table(figures: &Figures, servers: &[&str]) -> Table {
    let mut table = Table::new(&[
        "idle exports",
        "server",
        "start ms",
        "KiB in all",
        "KiB each",
        "page tables KiB each",
        "slab KiB each",
        "fds each",
        "threads",
        "CPU %",
        "switches/s",
    ]);
    for (exports, server, rounds) in lines(figures, servers) {
        let idle = &rounds.idle;
        if idle.is_empty() {
            table.row([exports.to_string(), server.to_owned(), "failed".into()]);
            continue;
        }
        let each = |figure: fn(&Idle) -> f64, digits| {
            let each = figures.each(exports, server, figure);
            each.map_or("-".into(), |each| format!("{each:.digits$}"))
        };
        table.row([
            exports.to_string(),
            server.to_owned(),
            format!("{:.0}", middle(idle, |idle| idle.start)),
            format!("{:.0}", middle(idle, anonymous)),
            each(anonymous, 1),
            each(|idle| idle.footprint.page_tables as f64, 1),
            each(|idle| idle.slab, 1),
            each(|idle| idle.footprint.descriptors as f64, 2),
            format!("{:.0}", middle(idle, |idle| idle.footprint.threads as f64)),
            format!("{:.2}", middle(idle, |idle| idle.cpu)),
            format!("{:.1}", middle(idle, |idle| idle.switches)),
        ]);
    }
    table
}

fn busy_table(figures: &Figures, servers: &[&str]) -> Table {
    let mut table = Table::new(&[
        "busy",
        "server",
        "exports",
        "IOPS",
        "least..most",
        "x fewest",
        "CPU us/req",
        "p50 us",
        "slowest p50 x",
    ]);
    let mut add = |what: String, pick: &dyn Fn(&Rounds) -> &[Busy]| {
        for (exports, server, rounds) in lines(figures, servers) {
            let rounds = pick(rounds);
            if rounds.is_empty() {
                let failed =
                    [what.clone(), server.to_owned(), exports.to_string(), "failed".into()];
                table.row(failed);
                continue;
            }
            let fewest = figures.exports().first().and_then(|&n| figures.get(n, server)).map(pick);
            let (least, most) = range(rounds.iter().map(|busy| busy.iops));
            table.row([
                what.clone(),
                server.to_owned(),
                exports.to_string(),
                format!("{:.0}", iops(rounds)),
                format!("{least:.0}..{most:.0}"),
                fewest.map_or("-".into(), |fewest| format!("{:.2}", iops(rounds) / iops(fewest))),
                format!("{:.2}", middle(rounds, |busy| busy.cpu)),
                format!("{:.1}", middle(rounds, |busy| busy.p50)),
                format!("{:.2}", middle(rounds, |busy| busy.slowest)),
            ]);
        }
    };
    for (i, depth) in DEPTHS.into_iter().enumerate() {
        add(format!("one, depth {depth}"), &move |rounds| &rounds.one_busy[i]);
    }
    add("all".into(), &|rounds| &rounds.all_busy);
    table
}

fn threads_table(figures: &Figures) -> Table {
    let mut table =
        Table::new(&["one export", "I/O threads", "IOPS", "CPU us/req", "x one thread", "p50 us"]);
    for ((name, _), rounds) in SECOND_THREAD.iter().zip(&figures.threads) {
        for (threads, busy) in rounds.iter().enumerate() {
            table.row([
                (*name).to_owned(),
                (threads + 1).to_string(),
                format!("{:.0}", iops(busy)),
                format!("{:.3}", cpu(busy)),
                format!("{:.3}", cpu(busy) / cpu(&rounds[0])),
                format!("{:.1}", middle(busy, |busy| busy.p50)),
            ]);
        }
    }
    table
}

fn iops(rounds: &[Busy]) -> f64 {
    middle(rounds, |busy| busy.iops)
}

fn cpu(rounds: &[Busy]) -> f64 {
    middle(rounds, |busy| busy.cpu)
}

/// The available figures, by number of exports, then by server.
fn lines<'a>(
    figures: &'a Figures,
    servers: &'a [&'a str],
) -> impl Iterator<Item = (usize, &'a str, &'a Rounds)> {
    figures.exports().into_iter().flat_map(move |exports| {
        servers
            .iter()
            .filter_map(move |server| Some((exports, *server, figures.get(exports, server)?)))
    })
}

/// The goals of ringmill.
fn goals(figures: &Figures) -> Vec<Goal> {
    let own = "ringmill";
    let all = figures.exports();
    let (Some(&fewest), Some(&most)) = (all.first(), all.last()) else { return Vec::new() };
    let measured = |value: f64| value.is_finite().then_some(value);
    let mut goals = vec![Goal {
        what: format!("KiB of resident memory per export, of {most}"),
        bound: Bound::AtMost,
        limit: 256.0,
        value: figures.each(most, own, anonymous),
        digits: 1,
    }];
    for (i, depth) in DEPTHS.into_iter().enumerate() {
        let one = |exports| figures.get(exports, own).map(|rounds| iops(&rounds.one_busy[i]));
        goals.push(Goal {
            what: format!("IOPS of one, depth {depth}, with {most} exports to that with {fewest}"),
            bound: Bound::AtLeast,
            limit: 0.95,
            value: one(most).zip(one(fewest)).and_then(|(many, few)| measured(many / few)),
            digits: 3,
        });
    }
    for &exports in &all {
        let idle = figures.get(exports, own).map_or(&[][..], |rounds| &rounds.idle);
        // The goal has one digit: 0.04 % is 0.0 %.
        let rounded = |value: f64| measured((value * 10.0).round() / 10.0);
        for (what, figure) in [
            ("CPU %", (|idle: &Idle| idle.cpu) as fn(&Idle) -> f64),
            ("context switches/s", |idle: &Idle| idle.switches),
        ] {
            goals.push(Goal {
                what: format!("{what}, {exports} idle"),
                bound: Bound::AtMost,
                limit: 0.0,
                value: rounded(middle(idle, figure)),
                digits: 1,
            });
        }
    }
    for ((name, _), [one, two]) in SECOND_THREAD.iter().zip(&figures.threads) {
        goals.push(Goal {
            what: format!("CPU per request, two I/O threads to one, {name}"),
            bound: Bound::AtMost,
            limit: 1.05,
            value: measured(cpu(two) / cpu(one)),
            digits: 3,
        });
    }
    goals
}

/// Memory per export.
pub(crate) fn plot(figures: &Figures, contenders: &[Contender]) -> Lines {
    let each = |exports, contender: &Contender| figures.each(exports, &contender.name, anonymous);
    let all = figures.exports();
    let values =
        all.iter().flat_map(|&exports| contenders.iter().filter_map(move |c| each(exports, c)));
    let (_, most) = range(values);
    // Of the fewest exports there is no figure per export.
    let groups = all.iter().skip(1).map(|&exports| {
        let line = |contender| {
            let kib = each(exports, contender)?;
            let bar = Bar { median: kib, least: kib, most: kib };
            Some(Line { mark: Mark::Bar(bar), label: format!("{kib:.1}") })
        };
        let lines = contenders.iter().map(line).collect();
        Group { name: format!("{exports} exports"), lines, goal: None }
    });
    Lines {
        title: "Resident memory of an idle export with a client".into(),
        unit: "KiB".into(),
        scale: Scale::Linear(most),
        series: contenders.iter().map(|contender| contender.name.clone()).collect(),
        groups: groups.collect(),
    }
}
