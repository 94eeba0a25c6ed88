//! A disk that becomes larger while its last cluster is zeroes by a change of metadata that was not flushed.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use block::options::*;
use block::request::Op;
use block::{CreateQcow2, NodeRegistry, create_qcow2};
use event_loop::ring::sim::{Faults, Sim};
use event_loop::{IoBufs, LoopConfig, oneshot};

use crate::common::{Rig, TempFile, blockdev, file_options, filled, tmpfs};
use crate::power::course::NO_POLLING;
use crate::power::guest::SECTOR;
use crate::power::oracle::Image;
use crate::power::path_of;

const CLUSTER: usize = 4096;
/// Where the disk ends meanwhile.
const MIDDLE: usize = CLUSTER - 3 * SECTOR;
/// Power cuts tried at each moment.
const CUTS: u64 = 20;

/// The end of the data of a disk that became smaller is in its last cluster still, and reads as zeroes by its L2
/// table alone. The new size must not be on stable storage before the table.
#[test]
fn a_grown_disk_does_not_show_truncated_data() {
    let file = TempFile::new(&tmpfs(), "power-grown", 0);
    let create = CreateQcow2 { cluster_size: CLUSTER as u32, ..CreateQcow2::new(CLUSTER as u64) };
    create_qcow2(&file.0, &create).unwrap();
    let sim = Sim::new(1, Faults { latency_ns: (1_000, 20_000), ..Faults::default() });
    let fd = sim.file(&file.contents()).unwrap();
    let below = FileOptions { locking: Locking::Off, ..file_options(&path_of(&fd), None) };
    let driver = Driver::from(Qcow2Options {
        file: BlockdevRef::Inline(Box::new(blockdev("file", Driver::file(below)))),
        backing: Backing::None,
        ..Qcow2Options::default()
    });
    let node = NodeRegistry::new().open(&blockdev("disk", driver)).unwrap();
    let config = LoopConfig { poll: NO_POLLING, ..LoopConfig::default() };
    let mut rig = Rig::on(sim.event_loop(config).unwrap(), node.clone());
    let carry_out = |rig: &mut Rig, op, len: usize, bufs| {
        let tag = rig.submit(op, 0, len as u64, bufs);
        rig.wait(tag).0.unwrap();
    };
    carry_out(&mut rig, Op::Write { fua: false }, CLUSTER, filled(&[1; CLUSTER], 0));
    rig.event_loop.block_on(node.clone().resize(MIDDLE as u64, &rig.event_loop)).unwrap().unwrap();
    // The cluster keeps its place, and the table is written before the answer, as there is no journal.
    let keep = Op::WriteZeroes { may_unmap: false, no_fallback: false, fua: false };
    carry_out(&mut rig, keep, MIDDLE, IoBufs::new());
    assert!(sim.storage().unstable_sectors(&fd) > 0, "nothing is to be lost");

    let (done, mut result) = oneshot::channel();
    let resized = node.clone().resize(CLUSTER as u64, &rig.event_loop);
    rig.event_loop.spawn(async move { done.send(resized.await) });
    let mut context = Context::from_waker(Waker::noop());
    let (mut seed, mut grown) = (0, 0);
    loop {
        for _ in 0..CUTS {
            seed += 1;
            let disk = Image::read(&sim.cut(&fd, seed).unwrap(), &[]).unwrap();
            assert!(disk[MIDDLE..].iter().all(|byte| *byte == 0), "cut {seed}");
            grown += usize::from(disk.len() == CLUSTER);
        }
        match Pin::new(&mut result).poll(&mut context) {
            Poll::Pending => rig.event_loop.run_once(sim.in_flight() > 0).unwrap(),
            Poll::Ready(resized) => break resized.unwrap().unwrap(),
        };
    }
    assert!(grown > 0, "the size was never there before it was answered");
}
