//! The four published results, each mechanism off and on in one run: docs/BENCHMARKS.md.

mod batched_signals;
mod polling;
mod rig;
mod ring_flags;
mod wake_ups;

use anyhow::{Result, bail};

use crate::goal::{self, Goal};
use crate::host::{affinity, machine};
use crate::options::Options;
use crate::report::{DEBUG, Section, Table, write_json};

/// One result.
type Measure = fn(&Options) -> Result<Section>;

/// All of them.
const RESULTS: [(&str, Measure); 4] = [
    ("wake-ups", wake_ups::measure),
    ("ring-flags", ring_flags::measure),
    ("batched-signals", batched_signals::measure),
    ("polling", polling::measure),
];

/// Measures and reports. Fails when something could not be measured, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let results = options.choose(RESULTS.to_vec(), |(name, _)| (*name).to_owned())?;
    let directory = options.directory()?;
    std::fs::create_dir_all(&directory)?;
    let mut text: Vec<String> = machine::describe(&directory);
    if affinity::allowed()?.len() < 2 {
        text.push("One CPU: guest and I/O thread share it, figures of both are mixed up".into());
    }
    text.push(format!("Rounds in turns; medians{DEBUG}"));
    text.iter().for_each(|line| println!("{line}"));
    let mut sections = vec![Section { text, ..Section::default() }];
    let mut failures = Vec::new();
    for (name, measure) in results {
        eprintln!("{name} …");
        match measure(options) {
            Ok(section) => {
                println!("\n{}", section.text());
                sections.push(section);
            }
            Err(error) => failures.push(format!("{name}: {error:#}")),
        }
    }
    if let Some(file) = options.path("json") {
        write_json(&file, &sections)?;
    }
    if !failures.is_empty() {
        bail!("not measured: {}", failures.join("; "));
    }
    Ok(())
}

/// The report of a result: how it was measured, the figures, what was to be reached.
fn section(heading: &str, text: Vec<String>, mut tables: Vec<Table>, goals: &[Goal]) -> Section {
    let goals = goal::table("to reach", goals);
    tables.extend((!goals.body.is_empty()).then_some(goals));
    Section { heading: heading.into(), text, tables }
}
