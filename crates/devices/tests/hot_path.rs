//! What a request costs, counted: allocations, locks, system calls of the ring, signals.

use crate::rig;

use block::options::{BlockdevOptions, Cache, Driver, FileOptions, Locking};
use event_loop::counting::{allocations, locks_taken};
use rig::*;
use stats::Kind;

fn file_options(name: &str) -> BlockdevOptions {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, vec![0x77; 4 << 20]).unwrap();
    let file = FileOptions { filename: path, aio: None, locking: Locking::Off };
    BlockdevOptions {
        driver: Driver::file(file),
        cache: Cache { direct: true, no_flush: false },
        ..null_options()
    }
}

/// Reads and writes `depth` at a time, `rounds` times.
fn drive(rig: &mut Rig, depth: u64, rounds: u64) {
    for round in 0..rounds {
        for n in 0..depth {
            let sector = (round * depth + n) % 512 * 8;
            if n % 2 == 0 {
                rig.add(IN, sector, &[], 4096);
            } else {
                rig.add(OUT, sector, &[7; 4096], 0);
            }
        }
        rig.publish();
        rig.reap(depth as usize);
    }
}

fn count(options: &BlockdevOptions, depth: u64, poll_max_ns: u64) {
    let mut rig = Rig::new(options, 256, poll_max_ns);
    drive(&mut rig, depth, 300);
    rig.signals();
    let before = (
        allocations(),
        rig.event_loop.stats().enters.get(),
        rig.event_loop.stats().iterations.get(),
        rig.stats.signals.get(),
        rig.stats.batches.get(),
        locks_taken(),
    );
    drive(&mut rig, depth, 500);
    let stats = rig.event_loop.stats();
    assert_eq!(allocations() - before.0, 0, "allocations in steady state");
    assert_eq!(locks_taken() - before.5, 0, "locks in steady state");
    let (enters, iterations) = (stats.enters.get() - before.1, stats.iterations.get() - before.2);
    assert!(enters <= iterations, "{enters} enters in {iterations} iterations");
    let (signals, batches) =
        (rig.stats.signals.get() - before.3, rig.stats.batches.get() - before.4);
    assert!(signals <= batches, "{signals} signals for {batches} batches");
    assert!(batches <= iterations, "{batches} batches in {iterations} iterations");
    assert_eq!(rig.stats.done(Kind::Read) + rig.stats.done(Kind::Write), 800 * depth);
}

#[test]
fn steady_state_allocates_nothing_and_signals_once_per_batch() {
    for poll_max_ns in [0, 32768] {
        for depth in [1, 64] {
            count(&null_options(), depth, poll_max_ns);
            count(&file_options("hot-path"), depth, poll_max_ns);
        }
    }
}

#[test]
fn a_batch_of_64_is_one_signal() {
    let mut rig = Rig::new(&null_options(), 256, 0);
    drive(&mut rig, 64, 1);
    rig.signals();
    drive(&mut rig, 64, 1);
    assert_eq!(rig.signals(), 1);
}

/// A driver that is awake need not wait for the end of a long batch.
#[test]
fn a_long_batch_is_shown_in_parts_and_signalled_once() {
    let mut rig = Rig::new(&null_options(), 256, 0);
    drive(&mut rig, 1, 1);
    rig.signals();
    rig.handler.set_enabled(false);
    for _ in 0..22 {
        rig.add(IN, 0, &[], 4096);
    }
    rig.publish();
    let event_loop = rig.event_loop.clone();
    event_loop.section(|| {
        rig.handler.set_enabled(true);
        // All 22 are answered; the batch ends with the section.
        let shown = std::iter::from_fn(|| rig.driver.reap()).count();
        assert_eq!((shown, rig.signals()), (20, 0));
    });
    assert_eq!(std::iter::from_fn(|| rig.driver.reap()).count(), 2);
    assert_eq!(rig.signals(), 1);
}

#[test]
fn a_lock_is_counted() {
    let before = locks_taken();
    let rig = Rig::new(&null_options(), 8, 0);
    rig.event_loop.handle().spawn(|_| {}).unwrap();
    assert!(locks_taken() > before, "a message takes the inbox's lock");
}
