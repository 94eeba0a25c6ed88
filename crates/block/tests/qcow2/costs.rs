//! What ranges cost the loop that a guest or a client chooses: counted, not timed.

use block::request::Op;
use block::status::{ExtentState, extent};
use event_loop::{BUDGET, IoBufs};

use crate::common::{Rig, memory};
use crate::qcow2::image::{Folder, check, open, options, qemu_img};

const ZEROES: Op = Op::WriteZeroes { may_unmap: false, no_fallback: false, fua: false };
const UNMAP: Op = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
const OPS: [Op; 4] = [Op::BlockStatus, Op::Discard, ZEROES, UNMAP];
/// A step that exceeds the budget of an iteration, units: 50, and a table of 64 KiB that is read or made.
const LAST_STEP: u64 = 100;

fn room(op: Op) -> IoBufs {
    if op == Op::BlockStatus { memory(1024, 0) } else { IoBufs::new() }
}

/// Submits requests for these ranges at once. Returns the iterations until all are answered, and the most that were
/// answered in one.
fn at_once(rig: &mut Rig, op: Op, ranges: impl Iterator<Item = (u64, u64)>) -> (u64, usize) {
    let mut tags: Vec<_> = ranges.map(|(at, len)| rig.submit(op, at, len, room(op))).collect();
    let (mut iterations, mut most) = (0, 0);
    while !tags.is_empty() {
        rig.event_loop.run_once(true).unwrap();
        iterations += 1;
        let before = tags.len();
        tags.retain(|tag| match rig.answer(*tag) {
            Some((result, _)) => {
                assert_eq!(result, Ok(()), "{op:?}");
                false
            }
            None => true,
        });
        most = most.max(before - tags.len());
    }
    (iterations, most)
}

#[test]
fn an_empty_image_costs_the_same_at_any_size() {
    let folder = Folder::new("empty");
    let of = |size: &str| {
        qemu_img(&folder, &["create", "-q", "-f", "qcow2", "DIR/disk", size]);
        let node = open(&options(&folder.path("disk")));
        let size = node.geometry().size;
        let mut rig = Rig::new(node);
        let tag = rig.submit(Op::BlockStatus, 0, size, memory(64, 0));
        let (result, told) = rig.wait(tag);
        assert_eq!(result, Ok(()));
        let found = extent(&told, 0).unwrap();
        assert_eq!((found.len, found.state, found.depth), (size, ExtentState::Hole, 0));
        OPS.map(|op| at_once(&mut rig, op, (0..128).map(|_| (0, size))).0)
    };
    let (small, large) = (of("1G"), of("2P"));
    for ((op, small), large) in OPS.iter().zip(small).zip(large) {
        assert!(large <= small + 4, "{op:?}: {small} iterations, {large} of 2 PiB");
    }
}

#[test]
fn work_on_tables_is_spread_over_iterations() {
    const TABLE: u64 = 512 << 20;
    const TABLES: u64 = 24;
    let folder = Folder::new("tables");
    let size = (TABLE * TABLES).to_string();
    let create = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", "DIR/disk", &size];
    qemu_img(&folder, &create);
    let mut rig = Rig::new(open(&options(&folder.path("disk"))));
    let meter = rig.event_loop.meter();
    // Reads the tables.
    at_once(&mut rig, Op::BlockStatus, (0..TABLES).map(|nth| (nth * TABLE, TABLE)));
    let tables = |rig: &mut Rig, op, each: u64| {
        let ranges = (0..TABLES * each).map(|nth| (nth / each * TABLE, TABLE));
        at_once(rig, op, ranges)
    };
    // 8,192 entries at 4 thousandths of a unit.
    let (_, most) = tables(&mut rig, Op::BlockStatus, 4);
    assert!((2..=12).contains(&most), "{most} tables were walked in an iteration");
    // Every cluster is given up.
    for op in [ZEROES, UNMAP] {
        let (iterations, _) = tables(&mut rig, op, 1);
        assert!(iterations >= TABLES, "{op:?}: {iterations} iterations");
    }
    // Nothing is left to be done.
    let (iterations, _) = tables(&mut rig, Op::Discard, 1);
    assert!(iterations <= 12, "{iterations}");
    assert!(meter.most() <= BUDGET + LAST_STEP, "{} units in an iteration", meter.most());
    drop(rig);
    check(&folder, "disk");
}
