//! The four published results, each mechanism off and on in one run: docs/BENCHMARKS.md.

mod batched_signals;
mod finding;
pub(crate) mod options;
mod polling;
mod rig;
mod ring_flags;
mod wake_ups;

use anyhow::{Result, bail, ensure};

use crate::host::{affinity, machine};
use crate::report::{Section, write_json};
use finding::Finding;
use options::{Options, Which};
use rig::Rig;

/// Measures and reports. Fails when something could not be measured, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let cpus = affinity::allowed()?;
    ensure!(!options.which.is_empty(), "--only names none of the results");
    std::fs::create_dir_all(&options.run.directory)?;
    let mut text: Vec<String> = machine::describe(&options.run.directory);
    if cpus.len() < 2 {
        text.push("One CPU: guest and I/O thread share it, figures of both are mixed up".into());
    }
    if cfg!(debug_assertions) {
        text.push("DEBUG BUILD, figures mean nothing".into());
    }
    text.iter().for_each(|line| println!("{line}"));
    let mut sections = vec![Section { text, ..Section::default() }];
    let mut failures = Vec::new();
    for &which in &options.which {
        eprintln!("{which} …");
        match measure(which, options) {
            Ok(finding) => {
                let section = finding.section();
                println!("\n{}", section.text());
                sections.push(section);
            }
            Err(error) => failures.push(format!("{which}: {error:#}")),
        }
    }
    if let Some(file) = &options.run.json {
        write_json(file, &sections)?;
    }
    if !failures.is_empty() {
        bail!("not measured: {}", failures.join("; "));
    }
    Ok(())
}

fn measure(which: Which, options: &Options) -> Result<Finding> {
    match which {
        Which::WakeUps => wake_ups::measure(options),
        Which::RingFlags => ring_flags::measure(&Rig::new(options)?, options),
        Which::BatchedSignals => batched_signals::measure(&Rig::new(options)?, options),
        Which::Polling => polling::measure(options),
    }
}
