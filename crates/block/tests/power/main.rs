//! Power cuts and killed processes: what a guest was told is on stable storage is there afterwards, and after a
//! kill all that it was told is done; and nothing foreign is.
//!
//! A guest works on an image through the production drivers, over the simulated ring. Between any two
//! completions the power may be cut, and the ring's [storage](event_loop::ring::sim::Storage) says what
//! that leaves: of everything that was not flushed any part, sector by sector. Or the process is killed, which
//! leaves what has completed. Half of the courses have journals of qcow2 images, in memory: a power cut takes
//! them along, and a kill does not. What is left must be a
//! whole image (leaks are no damage), by an oracle of our own and, now and then, by `qemu-img check`;
//! and each sector of the disk must have the contents of the last write that was flushed, or of one
//! that came later; with the journal of a process that was killed, of the last one that was answered. Then the
//! image is opened again by the driver, and the guest works on. Now and then that recovery is cut off or killed,
//! too, several times in a row, and each time the same has to be there. Or another process goes on with the image, as in
//! an upgrade, with what the first one has in its journal alone, and is cut off or killed in its turn.
//!
//! A failure prints its seed, and the same course is run again by
//! `RINGMILL_POWER_SEED=n cargo test -p block --test power`. `RINGMILL_POWER_SEEDS=n` tries more than
//! the few of CI (with `CARGO_PROFILE_DEV_OPT_LEVEL=2` five times as fast). `RINGMILL_POWER_TRACE=1` tells
//! all requests and operations, `RINGMILL_POWER_KEEP=FOLDER` keeps the image that was found damaged.

#[path = "../common/mod.rs"]
mod common;
mod course;
mod failures;
mod grown;
mod guest;
mod journal;
mod kinds;
mod left;
mod oracle;
mod recovery;

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use common::{TempFile, tmpfs};
use course::Seen;
use event_loop::sync::lock;
use kinds::Kind;

/// Courses of CI's short run, each of some dozens of cuts.
const SEEDS: u64 = 180;
/// Courses between two images that `qemu-img` sees.
const JUDGED: u64 = 20;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect(variable))
}

fn path_of(fd: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

/// Nothing but leaks.
fn qemu_img_check(kind: &Kind, image: &[u8]) {
    if !kind.is_qcow2() {
        return;
    }
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("power-left-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let file = TempFile::new(&tmpfs(), &name, 0);
    std::fs::write(&file.0, image).unwrap();
    let output = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(&file.0).output();
    let output = output.expect("qemu-img (scripts/setup-tests.sh)");
    let (out, error) = (output.stdout, output.stderr);
    let said = String::from_utf8_lossy(&[out, error].concat()).into_owned();
    assert!(matches!(output.status.code(), Some(0 | 3)), "qemu-img check: {said}");
}

fn run(seed: u64) -> Result<Seen, String> {
    let judged = seed.is_multiple_of(JUDGED);
    course::run(seed, |kind, left| {
        if judged {
            qemu_img_check(kind, left);
        }
    })
}

#[test]
fn nothing_is_lost_and_nothing_foreign_appears() {
    let seeds = match number("RINGMILL_POWER_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("RINGMILL_POWER_SEEDS").unwrap_or(SEEDS),
    };
    let (next, all) = (AtomicU64::new(seeds.start), Mutex::new(Seen::default()));
    let failures = Mutex::new(Vec::new());
    let started = Instant::now();
    let worker = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end || lock(&failures).len() >= 10 {
                return;
            }
            match run(seed) {
                Ok(seen) => lock(&all).add(seen),
                Err(error) => lock(&failures).push((seed, error)),
            }
        }
    };
    std::thread::scope(|scope| {
        (0..2).for_each(|_| _ = scope.spawn(worker));
    });
    let Seen { cuts, kills, replayed, interrupted, handed_over, requests } = *lock(&all);
    println!(
        "{cuts} power cuts and {kills} kills, {replayed} with a journal that was needed, in {requests} \
         requests; {interrupted} while an image was recovered; {handed_over} that others went on with; {:?}",
        started.elapsed()
    );
    let failures = failures.into_inner().unwrap();
    for (seed, error) in &failures {
        println!("RINGMILL_POWER_SEED={seed} cargo test -p block --test power: {error}");
    }
    assert!(failures.is_empty());
    let is_short = seeds.end - seeds.start < SEEDS;
    let all_needed = replayed > 0 && interrupted > 0 && handed_over > 0;
    assert!(is_short || all_needed, "no journal was ever needed");
}
