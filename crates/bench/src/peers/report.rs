//! The report: aligned text for the terminal, Markdown for docs/BENCHMARKS.md.

use super::result::{LoadFigures, Outcome, idle};
use super::rows::Row;
use crate::goal::{self, Goal};
use crate::report::Table;

/// All that a run has found.
#[derive(Debug)]
pub(crate) struct Report {
    /// What was measured on, with what, and how; one line each.
    pub(crate) conditions: Vec<String>,
    /// Name, version and command of each contender; the first is what the others are compared with.
    pub(crate) contenders: Vec<(String, String, String)>,
    /// Per row the outcome of each contender.
    pub(crate) results: Vec<(Row, Vec<Outcome>)>,
    /// What was to be reached.
    pub(crate) bars: Vec<Goal>,
}

impl Report {
    /// Aligned text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.conditions {
            text += &format!("{line}\n");
        }
        for (name, version, command) in &self.contenders {
            text += &format!("{name}: {version}\n  {command}\n");
        }
        for table in self.tables() {
            text += "\n";
            text += &table.text();
        }
        text
    }

    /// Markdown, without a heading of its own.
    pub(crate) fn markdown(&self) -> String {
        let mut text = String::new();
        for line in &self.conditions {
            text += &format!("- {line}\n");
        }
        for (name, version, command) in &self.contenders {
            text += &format!("- {name}: {version}\n\n  ```\n  {command}\n  ```\n");
        }
        for table in self.tables() {
            text += "\n";
            text += &table.markdown();
        }
        text
    }

    fn tables(&self) -> Vec<Table> {
        [
            self.load_table(),
            self.idle_table(),
            goal::table("to reach, as a ratio to qsd", &self.bars),
        ]
        .into_iter()
        .filter(|table| !table.body.is_empty())
        .collect()
    }

    fn load_table(&self) -> Table {
        let mut table = Table::new(&[
            "load (4 KiB)",
            "server",
            "IOPS",
            "least..most",
            "CPU s/M",
            "least..most",
            "calls/req",
            "switches/req",
            "p50 us",
            "p99 us",
            "p99.9 us",
            "IOPS x",
            "CPU x",
            "p50 x",
        ]);
        for (row, outcomes) in &self.results {
            let base = match outcomes.first() {
                Some(Outcome::Load(base)) => Some(base),
                _ => None,
            };
            for (outcome, (name, ..)) in outcomes.iter().zip(&self.contenders) {
                match outcome {
                    Outcome::Load(figures) => {
                        let mut cells = vec![row.name.clone(), name.clone()];
                        cells.extend(load_cells(figures, base));
                        table.row(cells);
                    }
                    Outcome::Failed(_) => {
                        table.row([row.name.clone(), name.clone(), "failed".into()]);
                    }
                    Outcome::Idle(_) => {}
                }
            }
        }
        table
    }

    fn idle_table(&self) -> Table {
        let mut table = Table::new(&["idle", "server", "CPU %", "switches/s"]);
        for (row, outcomes) in &self.results {
            for (outcome, (name, ..)) in outcomes.iter().zip(&self.contenders) {
                if let Outcome::Idle(samples) = outcome {
                    let (cpu, switches) = idle(samples);
                    table.row([
                        row.name.clone(),
                        name.clone(),
                        format!("{cpu:.2}"),
                        format!("{switches:.1}"),
                    ]);
                }
            }
        }
        table
    }
}

fn load_cells(figures: &LoadFigures, base: Option<&LoadFigures>) -> Vec<String> {
    let ratio = |figure: fn(&LoadFigures) -> f64| {
        base.map_or("-".into(), |base| format!("{:.2}", figure(figures) / figure(base)))
    };
    let (least, most) = figures.iops_range();
    let (least_cpu, most_cpu) = figures.cpu_range();
    let [p50, p99, p999] = figures.latency().map(|us| format!("{us:.1}"));
    vec![
        format!("{:.0}", figures.iops()),
        format!("{least:.0}..{most:.0}"),
        format!("{:.3}", figures.cpu()),
        format!("{least_cpu:.3}..{most_cpu:.3}"),
        figures.syscalls.map_or("-".into(), |calls| format!("{calls:.3}")),
        format!("{:.3}", figures.switches()),
        p50,
        p99,
        p999,
        ratio(LoadFigures::iops),
        ratio(LoadFigures::cpu),
        ratio(|figures| figures.latency()[0]),
    ]
}
