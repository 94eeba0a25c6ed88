//! The report: tables and goals.

use super::measure::{Bench, Busy, Idle};
use super::{DEPTHS, Figures, Rounds, SECOND_THREAD, middle};
use crate::figures;
use crate::goal::{self, Bound, Goal};
use crate::peers::contender::Contender;
use crate::report::{Section, Table};

/// The report of a run.
pub(super) fn section(bench: &Bench, contenders: &[Contender], figures: &Figures) -> Section {
    let mut text = bench.session.machine.clone();
    text.extend(contenders.iter().map(|of| format!("{}: {}", of.name, of.version)));
    text.push(bench.session.method("each"));
    for (server, exports, why) in figures.failures() {
        text.push(format!("{server} FAILED with {exports} exports: {why}"));
    }
    let mut tables = vec![idle_table(figures), busy_table(figures)];
    if figures.with_fewest("ringmill").is_some() {
        tables.push(threads_table(figures));
        tables.push(goal::table("to reach", &goals(figures)));
    }
    Section { heading: String::new(), text, tables }
}

fn anonymous(idle: &Idle) -> f64 {
    idle.footprint.anonymous as f64
}

fn idle_table(figures: &Figures) -> Table {
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
    for (exports, server, rounds) in figures.lines() {
        let idle = &rounds.idle;
        if idle.is_empty() {
            table.row([exports.to_string(), server.to_owned(), "failed".into()]);
            continue;
        }
        let each = |figure: fn(&Idle) -> f64, digits| {
            let each = figures.each(exports, server, rounds, figure);
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

fn busy_table(figures: &Figures) -> Table {
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
        for (exports, server, rounds) in figures.lines() {
            let rounds = pick(rounds);
            if rounds.is_empty() {
                let failed =
                    [what.clone(), server.to_owned(), exports.to_string(), "failed".into()];
                table.row(failed);
                continue;
            }
            let fewest = figures.with_fewest(server).map(|(_, fewest)| pick(fewest));
            let of = figures::Rounds::of(&rounds.iter().map(|busy| busy.iops).collect::<Vec<_>>());
            table.row([
                what.clone(),
                server.to_owned(),
                exports.to_string(),
                format!("{:.0}", of.median),
                of.range(0),
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

/// The goals of ringmill.
fn goals(figures: &Figures) -> Vec<Goal> {
    let own = || figures.lines().filter(|(_, server, _)| *server == "ringmill");
    let (Some((fewest, few)), Some((most, server, many))) =
        (figures.with_fewest("ringmill"), own().last())
    else {
        return Vec::new();
    };
    let goal = |what: String, bound, value: f64, digits| {
        Goal::new(what, bound, Some(value).filter(|value| value.is_finite()), digits)
    };
    let each = figures.each(most, server, many, anonymous).unwrap_or(f64::NAN);
    let memory = format!("KiB of resident memory per export, of {most}");
    let mut goals = vec![goal(memory, Bound::AtMost(256.0), each, 1)];
    for (i, depth) in DEPTHS.into_iter().enumerate() {
        let what = format!("IOPS of one, depth {depth}, with {most} exports to that with {fewest}");
        let ratio = iops(&many.one_busy[i]) / iops(&few.one_busy[i]);
        goals.push(goal(what, Bound::AtLeast(0.95), ratio, 3));
    }
    for (exports, _, rounds) in own() {
        // The goal has one digit: 0.04 % is 0.0 %.
        let rounded = |value: f64| (value * 10.0).round() / 10.0;
        let cpu = rounded(middle(&rounds.idle, |idle| idle.cpu));
        let switches = rounded(middle(&rounds.idle, |idle| idle.switches));
        for (what, value) in [("CPU %", cpu), ("context switches/s", switches)] {
            goals.push(goal(format!("{what}, {exports} idle"), Bound::AtMost(0.0), value, 1));
        }
    }
    for ((name, _), [one, two]) in SECOND_THREAD.iter().zip(&figures.threads) {
        let what = format!("CPU per request, two I/O threads to one, {name}");
        goals.push(goal(what, Bound::AtMost(1.05), cpu(two) / cpu(one), 3));
    }
    goals
}
