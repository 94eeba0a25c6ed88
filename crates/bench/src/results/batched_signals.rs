//! One used-buffer notification per batch.

use anyhow::Result;
use event_loop::Ablation;
use vcpu::load::Wait;
use vcpu::virtio_blk::Op;

use super::rig::{Disk, Figures, Rig, Row, Variant};
use super::section;
use crate::figures::Rounds;
use crate::goal::{Bound, Goal};
use crate::options::Options;
use crate::report::{Section, Table};

/// Depth, jobs, and the published change of IOPS in percent.
const ROWS: [(u16, u16, Option<f64>); 4] =
    [(1, 1, Some(-1.0)), (1, 8, None), (64, 1, None), (64, 8, Some(9.0))];

/// Measures it.
pub(super) fn measure(options: &Options) -> Result<Section> {
    let rig = Rig::new(options)?;
    let off = Ablation { no_batching: true, ..Ablation::default() };
    let variants = [Variant { ablation: off, ..Variant::default() }, Variant::default()];
    let mut goals = Vec::new();
    let mut text = vec![format!(
        "randread, 4 KiB, 1 I/O thread, a queue and a thread per job, {} rounds; the guest \
             asks for signals (EVENT_IDX) and runs when one comes, as a busy vCPU does. Off: used index and signal per request. Published: \
             QEMU, 8 vCPUs, NVMe.",
        rig.rounds
    )];
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
            if !rig.has(&row) || (options.quick() && jobs == 8) {
                continue;
            }
            let figures = rig.compare(&row, &variants)?;
            let [off, on] = [&figures[0], &figures[1]];
            let more = percent(&on.iops, &off.iops);
            let cost = percent(&on.cpu, &off.cpu);
            for (name, figures) in [("off", off), ("on", on)] {
                let (iops, cpu) = (Rounds::of(&figures.iops), Rounds::of(&figures.cpu));
                let mut cells = vec![
                    row.to_string(),
                    name.into(),
                    format!("{:.3}", Rounds::of(&figures.signals).median),
                    format!("{:.0}", iops.median),
                    iops.range(0),
                    format!("{:.3}", cpu.median),
                    cpu.range(3),
                    format!("{:.1}", Rounds::of(&figures.p50).median),
                ];
                if name == "on" {
                    cells.push(format!("{:+.1}", Rounds::of(&more).median));
                    cells.push(format!("{:+.1}", Rounds::of(&cost).median));
                    cells.push(published.map_or("-".into(), |change| format!("{change:+.0}")));
                }
                table.row(cells);
            }
            if depth == 1 {
                goals.push(within_noise(&row, &more, off));
            } else {
                let (more, cost) = (Rounds::of(&more).median, Rounds::of(&cost).median);
                goals.push(Goal::new(
                    format!("IOPS gained by 9 % or CPU saved by 15 %, the better: {row}"),
                    Bound::AtLeast(1.0),
                    Some((more / 9.0).max(-cost / 15.0)),
                    2,
                ));
            }
        }
    }
    text.extend(rig.notes.iter().cloned());
    Ok(section("Batched used-buffer notifications", text, vec![table], &goals))
}

/// The median change may be below zero by as much as the rounds without batching differ.
fn within_noise(row: &Row, more: &[f64], off: &Figures) -> Goal {
    let spread = Rounds::of(&off.iops);
    let what = format!("IOPS %, within the spread of the rounds: {row}");
    let limit = -(spread.most - spread.least) / spread.median * 100.0;
    Goal::new(what, Bound::AtLeast(limit), Some(Rounds::of(more).median), 1)
}

/// The change in percent per round.
fn percent(on: &[f64], off: &[f64]) -> Vec<f64> {
    on.iter().zip(off).map(|(on, off)| (on / off - 1.0) * 100.0).collect()
}
