//! One used-buffer notification per batch.

use anyhow::Result;
use event_loop::Ablation;
use vcpu::load::Wait;
use vcpu::virtio_blk::Op;

use super::finding::Finding;
use super::options::Options;
use super::rig::{Disk, Figures, Rig, Row, Variant};
use crate::figures::median;
use crate::goal::{Bound, Goal};
use crate::plot::Bar;
use crate::report::Table;

/// Depth, jobs, and the published change of IOPS in percent.
const ROWS: [(u16, u16, Option<f64>); 4] =
    [(1, 1, Some(-1.0)), (1, 8, None), (64, 1, None), (64, 8, Some(9.0))];

/// Measures it.
pub(crate) fn measure(rig: &Rig, options: &Options) -> Result<Finding> {
    let off = Ablation { no_batching: true, ..Ablation::default() };
    let variants = [Variant { ablation: off, ..Variant::default() }, Variant::default()];
    let mut finding = Finding {
        heading: "Batched used-buffer notifications".into(),
        method: vec![format!(
            "randread, 4 KiB, 1 I/O thread, a queue and a thread per job, {} rounds; the guest \
             asks for signals (EVENT_IDX) and runs when one comes, as a busy vCPU does. Off: used index and signal per request. Published: \
             QEMU, 8 vCPUs, NVMe.",
            rig.rounds
        )],
        ..Finding::default()
    };
    let mut table = Table::new(&[
        "load",
        "batching",
        "signals/request",
        "IOPS",
        "least..most",
        "CPU us/request",
        "least..most",
        "p50 us",
        "IOPS %",
        "CPU %",
        "published IOPS %",
    ]);
    for disk in [Disk::Null, Disk::Ram, Disk::File] {
        for (depth, jobs, published) in ROWS {
            let row = Row { disk, op: Op::Read, depth, jobs, wait: Wait::Running };
            if !rig.has(&row) || (options.run.quick && jobs == 8) {
                continue;
            }
            let figures = rig.compare(&row, &variants)?;
            let [off, on] = [&figures[0], &figures[1]];
            let more = percent(&on.iops, &off.iops);
            let cost = percent(&on.cpu, &off.cpu);
            for (name, figures) in [("off", off), ("on", on)] {
                let (iops, cpu) = (Bar::of(&figures.iops), Bar::of(&figures.cpu));
                let mut cells = vec![
                    row.to_string(),
                    name.into(),
                    format!("{:.3}", median(figures.signals.iter().copied())),
                    format!("{:.0}", iops.median),
                    format!("{:.0}..{:.0}", iops.least, iops.most),
                    format!("{:.3}", cpu.median),
                    format!("{:.3}..{:.3}", cpu.least, cpu.most),
                    format!("{:.1}", median(figures.p50.iter().copied())),
                ];
                if name == "on" {
                    cells.push(format!("{:+.1}", Bar::of(&more).median));
                    cells.push(format!("{:+.1}", Bar::of(&cost).median));
                    cells.push(published.map_or("-".into(), |change| format!("{change:+.0}")));
                }
                table.row(cells);
            }
            if depth == 1 {
                finding.goals.push(within_noise(&row, &more, off));
            } else {
                finding.goals.push(Goal {
                    what: format!("IOPS gained by 9 % or CPU saved by 15 %, the better: {row}"),
                    bound: Bound::AtLeast,
                    limit: 1.0,
                    value: Some((Bar::of(&more).median / 9.0).max(-Bar::of(&cost).median / 15.0)),
                    digits: 2,
                });
            }
        }
    }
    finding.method.extend(rig.notes.iter().cloned());
    finding.tables = vec![table];
    Ok(finding)
}

/// The median change may be below zero by as much as the rounds without batching differ.
fn within_noise(row: &Row, more: &[f64], off: &Figures) -> Goal {
    let spread = Bar::of(&off.iops);
    Goal {
        what: format!("IOPS %, within the spread of the rounds: {row}"),
        bound: Bound::AtLeast,
        limit: -(spread.most - spread.least) / spread.median * 100.0,
        value: Some(Bar::of(more).median),
        digits: 1,
    }
}

/// The change in percent per round.
fn percent(on: &[f64], off: &[f64]) -> Vec<f64> {
    on.iter().zip(off).map(|(on, off)| (on / off - 1.0) * 100.0).collect()
}
