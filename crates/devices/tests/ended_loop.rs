//! Requests whose loop ends, as an I/O thread's loop does after a failure of its ring.

use crate::rig;

use std::sync::Arc;

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::{BlockdevOptions, BlockdevRef, Driver, ThrottleOptions};
use block::throttle::{Limit, ThrottleGroup, ThrottleLimits};
use event_loop::{EventLoop, LoopConfig};
use guest_memory::GuestMemory;
use guest_memory::test_util::memfd_memory;
use queue::Inflight;
use rig::{IOERR, OUT, Rig, STATUS_AT, null_options};

const ENTRIES: u16 = 64;

/// A disk limited to one request per second: those behind the first wait for a timer.
fn slow_node() -> Arc<dyn BlockNode> {
    let iops_total = Limit { average: 1, ..Limit::default() };
    let limits = ThrottleLimits { iops_total, ..ThrottleLimits::default() };
    let mut registry = NodeRegistry::new();
    registry.add_throttle_group("group", ThrottleGroup::new(limits).unwrap());
    let file = BlockdevRef::Inline(Box::new(BlockdevOptions { node_name: None, ..null_options() }));
    let throttle = ThrottleOptions { throttle_group: "group".into(), file };
    registry.open(&BlockdevOptions::new(Some("slow"), Driver::from(throttle))).unwrap()
}

fn memory_of_record() -> Arc<GuestMemory> {
    memfd_memory(&[(0, Inflight::region_len(ENTRIES) as u64)]).unwrap()
}

fn record(memory: &GuestMemory) -> Inflight {
    Inflight::new(memory, memory.regions()[0].user_addr(), ENTRIES).unwrap()
}

fn new_loop() -> EventLoop {
    EventLoop::new(LoopConfig::default()).unwrap()
}

#[test]
fn unstarted_requests_are_left_in_the_record() {
    let memory = memory_of_record();
    let mut rig = Rig::on_with(new_loop(), &slow_node(), ENTRIES, |_| {}, Some(record(&memory)));
    rig.add(OUT, 0, &[1; 512], 0);
    let (held, _) = rig.add(OUT, 8, &[2; 512], 0);
    rig.publish();
    rig.reap(1);
    rig.event_loop.shut_down().unwrap();
    assert_eq!(rig.driver.reap(), None, "the guest hears nothing of it");
    assert_eq!(rig.redone(record(&memory)), [held]);
}

#[test]
fn unstarted_requests_fail_without_a_record() {
    let mut rig = Rig::on(new_loop(), &slow_node(), ENTRIES, |_| {});
    rig.add(OUT, 0, &[1; 512], 0);
    let (held, slot) = rig.add(OUT, 8, &[2; 512], 0);
    rig.publish();
    rig.reap(1);
    rig.event_loop.shut_down().unwrap();
    assert_eq!(rig.driver.reap().map(|used| used.head), Some(held));
    assert_eq!(rig.memory.read_u8(slot + STATUS_AT).unwrap(), IOERR);
}
