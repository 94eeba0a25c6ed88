//! The virtio-blk device and its driver, at both ends of a queue.

use std::time::Duration;

use event_loop::{IoThreadConfig, LoopConfig};
use vcpu::load::{LoadConfig, Wait};
use vcpu::machine::{Machine, MachineConfig, null_co};
use vcpu::virtio_blk::Op;

fn load(jobs: u16, depth: u16, op: Op, wait: Wait) -> LoadConfig {
    LoadConfig {
        jobs,
        depth,
        size: 4096,
        op,
        wait,
        event_idx: true,
        warm_up: Duration::from_millis(20),
        measured: Duration::from_millis(500),
    }
}

fn machine(memory: u64, io_threads: usize) -> Machine {
    let io_thread = |i| IoThreadConfig {
        event_loop: LoopConfig { name: format!("io{i}"), ..LoopConfig::default() },
        ..IoThreadConfig::default()
    };
    let io_threads = (0..io_threads).map(io_thread).collect();
    Machine::new(MachineConfig { memory, io_threads, disk: null_co(1 << 30) }).unwrap()
}

#[test]
fn every_kind_of_load_is_served() {
    for (jobs, depth, op, wait, io_threads) in [
        (1, 1, Op::Read, Wait::Signal, 1),
        (1, 64, Op::Write, Wait::Poll, 1),
        (8, 64, Op::Read, Wait::Signal, 1),
        (3, 4, Op::Write, Wait::Signal, 2),
    ] {
        let load = load(jobs, depth, op, wait);
        let machine = machine(load.memory(), io_threads);
        let result = load.run(&machine).unwrap();
        assert!(result.requests > 0, "{load:?}");
        assert_eq!(result.latencies.len(), result.requests);
        assert!(result.batches > 0 && result.io_cpu > Duration::ZERO, "{load:?}");
        if wait == Wait::Poll {
            // The first batch is signalled in any case.
            assert!(
                result.in_all.signals <= u64::from(jobs),
                "asked for none: {:?}",
                result.in_all
            );
        }
    }
}

#[test]
fn a_batch_is_signalled_once() {
    let load = load(1, 64, Op::Read, Wait::Signal);
    let result = load.run(&machine(load.memory(), 1)).unwrap();
    assert!(result.in_all.signals <= result.in_all.batches, "{:?}", result.in_all);
    assert!(result.in_all.signals > 0, "{:?}", result.in_all);
}

#[test]
fn a_machine_without_the_memory_is_refused() {
    let load = load(2, 16, Op::Read, Wait::Signal);
    assert!(load.run(&machine(load.memory() / 2, 1)).is_err());
}
