//! The report: aligned text for the terminal, Markdown for docs/BENCHMARKS.md.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::bars::Bar;
use super::result::{LoadFigures, Outcome, idle};
use super::rows::Row;

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
    pub(crate) bars: Vec<Bar>,
}

const BEGIN: &str = "<!-- bench peers: begin -->";
const END: &str = "<!-- bench peers: end -->";

struct Table {
    head: Vec<String>,
    body: Vec<Vec<String>>,
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

    /// Puts the Markdown between the marks in `file`.
    pub(crate) fn write_markdown(&self, file: &Path) -> Result<()> {
        let text =
            fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let text = replace_section(&text, &self.markdown())
            .with_context(|| format!("in {}", file.display()))?;
        fs::write(file, text).with_context(|| format!("writing {}", file.display()))
    }

    fn tables(&self) -> Vec<Table> {
        [self.load_table(), self.idle_table(), self.bar_table()]
            .into_iter()
            .filter(|table| !table.body.is_empty())
            .collect()
    }

    fn load_table(&self) -> Table {
        let head = [
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
        ];
        let mut body = Vec::new();
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
                        body.push(cells);
                    }
                    Outcome::Failed(_) => {
                        body.push(vec![row.name.clone(), name.clone(), "failed".into()]);
                    }
                    Outcome::Idle(_) => {}
                }
            }
        }
        Table { head: head.map(String::from).to_vec(), body }
    }

    fn idle_table(&self) -> Table {
        let mut body = Vec::new();
        for (row, outcomes) in &self.results {
            for (outcome, (name, ..)) in outcomes.iter().zip(&self.contenders) {
                if let Outcome::Idle(samples) = outcome {
                    let (cpu, switches) = idle(samples);
                    body.push(vec![
                        row.name.clone(),
                        name.clone(),
                        format!("{cpu:.2}"),
                        format!("{switches:.1}"),
                    ]);
                }
            }
        }
        Table { head: ["idle", "server", "CPU %", "switches/s"].map(String::from).to_vec(), body }
    }

    fn bar_table(&self) -> Table {
        let cells = |bar: &Bar| {
            let value = bar.value.map_or("-".into(), |value| format!("{value:.*}", bar.digits));
            vec![
                bar.what.clone(),
                value,
                format!("{:.*}", bar.digits, bar.limit),
                bar.verdict().into(),
            ]
        };
        Table {
            head: ["to reach, as a ratio to qsd", "measured", "at most", ""]
                .map(String::from)
                .to_vec(),
            body: self.bars.iter().map(cells).collect(),
        }
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

impl Table {
    fn text(&self) -> String {
        let lines = || std::iter::once(&self.head).chain(&self.body);
        let width = |column: usize| {
            lines().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max()
        };
        let widths: Vec<usize> = (0..self.head.len()).map(|i| width(i).unwrap_or(0)).collect();
        let mut text = String::new();
        for line in lines() {
            let mut cells = String::new();
            for (column, (cell, &width)) in line.iter().zip(&widths).enumerate() {
                match is_figure(column) {
                    true => cells += &format!("{cell:>width$}  "),
                    false => cells += &format!("{cell:<width$}  "),
                }
            }
            text += cells.trim_end();
            text += "\n";
        }
        text
    }

    fn markdown(&self) -> String {
        let line = |cells: &[String]| {
            let mut line = String::from("|");
            for column in 0..self.head.len() {
                line += &format!(" {} |", cells.get(column).map_or("", String::as_str));
            }
            line + "\n"
        };
        let rule: Vec<String> = (0..self.head.len())
            .map(|column| if is_figure(column) { "---:".into() } else { "---".into() })
            .collect();
        let mut text = line(&self.head) + &line(&rule);
        for cells in &self.body {
            text += &line(cells);
        }
        text
    }
}

/// The first column is words in every table, and so is the second where there are servers; numbers
/// are easier to compare flush right, and a word there does no harm.
fn is_figure(column: usize) -> bool {
    column >= 2
}

fn replace_section(text: &str, section: &str) -> Result<String> {
    let (Some(begin), Some(end)) = (text.find(BEGIN), text.find(END)) else {
        bail!("the marks {BEGIN} and {END} are missing");
    };
    if end < begin {
        bail!("{END} comes before {BEGIN}");
    }
    Ok(format!("{}{BEGIN}\n{section}{}", &text[..begin], &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_section_between_the_marks_is_replaced() {
        let text = format!("# A\n{BEGIN}\nold\n{END}\n# B\n");
        let new = replace_section(&text, "new\n").unwrap();
        assert_eq!(new, format!("# A\n{BEGIN}\nnew\n{END}\n# B\n"));
        assert_eq!(replace_section(&new, "new\n").unwrap(), new);
        assert!(replace_section("# A", "new").is_err());
        assert!(replace_section(&format!("{END}{BEGIN}"), "new").is_err());
    }
}
