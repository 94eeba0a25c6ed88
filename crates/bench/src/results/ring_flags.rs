//! What each ring set-up flag gains.

use anyhow::Result;
use event_loop::{RingChoice, RingFlags, TaskRun};
use vcpu::load::Wait;
use vcpu::virtio_blk::Op;

use super::rig::{Disk, Figures, Rig, Row, Variant};
use super::section;
use crate::figures::Rounds;
use crate::goal::{Bound, Goal};
use crate::options::Options;
use crate::report::{Section, Table};

/// The columns: a plain ring (with what has nothing to do with speed, as all of them have it), each
/// published flag with those before it, and DEFER_TASKRUN for COOP_TASKRUN.
fn columns() -> [(&'static str, RingFlags); 5] {
    let best = RingFlags::BEST;
    let plain =
        RingFlags { single_issuer: false, task_run: TaskRun::Interrupt, no_sqarray: false, ..best };
    let single = RingFlags { single_issuer: true, ..plain };
    let coop = RingFlags { task_run: TaskRun::Coop, ..single };
    let published = RingFlags { no_sqarray: true, ..coop };
    let defer = RingFlags::DEFERRING;
    [
        ("plain", plain),
        ("SINGLE_ISSUER", single),
        ("+ COOP_TASKRUN", coop),
        ("+ NO_SQARRAY", published),
        ("DEFER for COOP", defer),
    ]
}

/// Change in IOPS against the baseline, in percent: op, depth, one figure per published column.
const PUBLISHED: [(Op, u16, [f64; 3]); 4] = [
    (Op::Read, 1, [0.33, 2.1, 5.7]),
    (Op::Read, 64, [0.12, -0.012, -0.026]),
    (Op::Write, 1, [-0.11, 2.8, 5.5]),
    (Op::Write, 64, [-0.2, -0.29, 0.18]),
];

/// Measures it.
pub(super) fn measure(options: &Options) -> Result<Section> {
    let rig = Rig::new(options)?;
    let variants = columns()
        .map(|(_, flags)| Variant { ring: RingChoice::Exactly(flags), ..Variant::default() });
    let mut goals = Vec::new();
    let mut text = vec![format!(
        "4 KiB, one queue, {} rounds; the guest polls for its answers. IOPS with default polling, \
             CPU of the I/O thread with polling off. Changes are medians of each round's ratio to the \
             plain ring of that round. Published: QEMU, virtio-blk on NVMe, 4 vCPUs.",
        rig.rounds
    )];
    // The first column is the baseline.
    let ours = columns()[1..].iter().position(|(_, flags)| *flags == RingFlags::BEST);
    let names = columns().map(|(name, _)| name);
    let mut iops = Table::new(&["IOPS", "plain", names[1], names[2], names[3], names[4]]);
    let mut changes =
        Table::new(&["change of IOPS, %", "", names[1], names[2], names[3], names[4]]);
    let mut cpu =
        Table::new(&["CPU us per request", "plain", names[1], names[2], names[3], names[4]]);
    for disk in [Disk::Ram, Disk::File] {
        for (op, depth, published) in PUBLISHED {
            let row = Row { disk, op, depth, jobs: 1, wait: Wait::Poll };
            if !rig.has(&row) || (options.quick() && op == Op::Write) {
                continue;
            }
            let figures = rig.compare(&row, &variants)?;
            iops.row(std::iter::once(row.to_string()).chain(figures.iter().map(|figures| {
                let bar = Rounds::of(&figures.iops);
                format!("{:.0} ({:.0}..{:.0})", bar.median, bar.least, bar.most)
            })));
            cpu.row(std::iter::once(row.to_string()).chain(figures.iter().map(|figures| {
                let bar = Rounds::of(&figures.cpu);
                format!("{:.3} ({:.3}..{:.3})", bar.median, bar.least, bar.most)
            })));
            let gains: Vec<Rounds> =
                figures[1..].iter().map(|column| Rounds::of(&gain(column, &figures[0]))).collect();
            changes.row(
                [row.to_string(), "measured".into()].into_iter().chain(gains.iter().map(|bar| {
                    format!("{:+.1} ({:+.1}..{:+.1})", bar.median, bar.least, bar.most)
                })),
            );
            if disk == Disk::Ram {
                changes.row(
                    [String::new(), "published".into()]
                        .into_iter()
                        .chain(published.iter().map(|change| format!("{change:+.2}"))),
                );
            }
            let limit = if disk == Disk::Ram && depth == 1 { 5.0 } else { -1.0 };
            goals.push(Goal::new(
                format!("our default against plain, %: {row}"),
                Bound::AtLeast(limit),
                ours.and_then(|column| gains.get(column)).map(|gain| gain.median),
                1,
            ));
        }
    }
    text.extend(rig.notes.iter().cloned());
    Ok(section("Ring set-up flags", text, vec![iops, changes, cpu], &goals))
}

/// Per round, how much more requests per second than the baseline's of that round, in percent.
fn gain(of: &Figures, baseline: &Figures) -> Vec<f64> {
    of.iops.iter().zip(&baseline.iops).map(|(own, base)| (own / base - 1.0) * 100.0).collect()
}
