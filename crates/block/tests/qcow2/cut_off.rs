//! Flushes and resizes that are cut off, each a little later than the one before, and an image that is used
//! further.

use std::task::{Context, Waker};

use block::NodeRegistry;
use block::request::Op;
use event_loop::{EventLoop, IoBufs, LoopConfig};

use crate::common::Rig;
use crate::qcow2::image::{Folder, contents, judge, open, options, qemu_img};
use crate::qcow2::model::SIZE;

fn create(folder: &Folder) {
    let size = SIZE.to_string();
    let options = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "disk.qcow2"];
    qemu_img(folder, &[&options[..], &[&size]].concat());
}

/// The loop ends, as that of an I/O thread which has failed.
#[test]
fn a_flush_that_is_cut_off_loses_nothing() {
    let folder = Folder::new("qcow2-cut-off");
    let image = folder.path("disk.qcow2");
    for turns in 0.. {
        create(&folder);
        let node = open(&options(&image));
        let mut expected = vec![0; SIZE];
        let mut rig = Rig::new(node.clone());
        // In tables of their own, so that each step has something to write.
        for at in [0, 2 << 20] {
            rig.write(at as u64, &[7; 65536], 0).unwrap();
            expected[at..at + 65536].fill(7);
        }
        let flush = rig.submit(Op::Flush, 0, 0, IoBufs::new());
        let mut left = turns;
        while left > 0 && !rig.has_answers() {
            rig.event_loop.run_once(true).unwrap();
            left -= 1;
        }
        let is_over = rig.answer(flush).is_some();
        rig.event_loop.shut_down().unwrap();
        drop(rig);
        let found = contents(&node);
        assert!(found == expected, "after {turns} turns");
        drop(node);
        judge(&folder, "disk.qcow2", &expected);
        if is_over {
            assert!(turns > 5, "it was never cut off");
            break;
        }
    }
}

/// Who has asked for it does not wait for it any more.
#[test]
fn a_resize_continues_after_its_future_is_dropped() {
    let folder = Folder::new("qcow2-resize-cut-off");
    create(&folder);
    let mut registry = NodeRegistry::new();
    let node = registry.open(&options(&folder.path("disk.qcow2"))).unwrap();
    let mut rig = Rig::new(node.clone());
    rig.write(0, &[7; 65536], 0).unwrap();
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let size = 4 * SIZE;
    let mut resize = Box::pin(registry.resize(node.name(), size as u64, &event_loop).unwrap());
    let mut cx = Context::from_waker(Waker::noop());
    assert!(resize.as_mut().poll(&mut cx).is_pending());
    drop(resize);
    event_loop.block_on(registry.resized()).unwrap();
    assert_eq!(node.geometry().size, size as u64);
    let mut expected = vec![0; size];
    expected[..65536].fill(7);
    drop((rig, registry));
    let found = contents(&node);
    assert!(found == expected);
    drop(node);
    judge(&folder, "disk.qcow2", &expected);
}
