//! Power cuts and killed processes: data that was reported durable is there after a power cut, answered
//! writes are there after a kill, and no foreign data ever appears.
//!
//! A guest uses an image through the production drivers, over the simulated ring. Between any two
//! completions the power may be cut. The ring's [storage](event_loop::ring::sim::Storage) then keeps
//! any part of the unflushed data, sector by sector. Or the process is killed, which
//! keeps everything that has completed. Half of the courses have journals of qcow2 images, in memory: they survive a
//! kill, and not a power cut. The remains must be a
//! consistent image (leaks are allowed), checked by an oracle of our own and sometimes by `qemu-img check`.
//! Each sector of the disk must have the contents of the last flushed write, or of a later
//! one; with the journal of a killed process, of the last answered one. Then the
//! driver opens the image again, and the guest continues. Sometimes that recovery is interrupted by a cut or kill,
//! several times in a row, with the same checks each time. Or another process takes the image over, as in
//! an upgrade, with unwritten changes only in the journal, and is interrupted in its turn.
//!
//! Internal snapshots are made and deleted meanwhile: what a cut or a kill leaves has the snapshots from before the change
//! or those from after it, each with its contents.
//!
//! A failure prints its seed. `RINGMILL_POWER_SEED=n cargo test -p ringmill-block --test power` repeats that course.
//! `RINGMILL_POWER_SEEDS=n` tries more than
//! the few of CI (with `CARGO_PROFILE_DEV_OPT_LEVEL=2` five times as fast). `RINGMILL_POWER_TRACE=1` prints
//! all requests and operations, `RINGMILL_POWER_KEEP=FOLDER` stores a damaged image.

mod bitmaps;
use crate::common;
mod compressed;
mod course;
mod failures;
mod full;
mod grown;
mod guest;
mod jobs;
mod journal;
mod kinds;
mod left;
mod oracle;
mod raw_data;
mod recovery;
mod snapshots;

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use common::{TempFile, tmpfs};
use course::Seen;
use event_loop::ring::sim::without_threads;
use event_loop::sync::lock;
use kinds::Kind;

/// Courses of CI's short run, each of some dozens of cuts.
const SEEDS: u64 = 40;
/// Courses between two images that `qemu-img` sees.
const JUDGED: u64 = 20;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect(variable))
}

fn path_of(fd: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

/// Checks that the image has no errors other than leaks.
fn qemu_img_check(kind: &Kind, image: &[u8], is_encrypted: bool) {
    if !kind.is_qcow2() {
        return;
    }
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("power-left-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let file = TempFile::new(&tmpfs(), &name, 0);
    std::fs::write(&file.0, image).unwrap();
    let key = if is_encrypted { ",encrypt.key-secret=s" } else { "" };
    let options = format!("driver=qcow2{key},file.filename={}", file.0.display());
    let args = ["check", "--object", &kinds::secret_object(), "--image-opts", &options];
    let output = Command::new("qemu-img").args(args).output();
    let output = output.expect("qemu-img (scripts/setup-tests.sh)");
    let (out, error) = (output.stdout, output.stderr);
    let said = String::from_utf8_lossy(&[out, error].concat()).into_owned();
    assert!(matches!(output.status.code(), Some(0 | 3)), "qemu-img check: {said}");
}

fn run(seed: u64) -> Result<Seen, String> {
    let judged = seed.is_multiple_of(JUDGED);
    course::run(seed, |kind, left, is_encrypted| {
        if judged {
            qemu_img_check(kind, left, is_encrypted);
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
        // What is compressed is so at once.
        without_threads();
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
    let all = *lock(&all);
    let Seen { cuts, kills, replayed, interrupted, handed_over, requests, .. } = all;
    let Seen { closings, encrypted, right, kept, kept_on, kept_resized, compressed, .. } = all;
    let Seen { snapshots, while_snapshot, .. } = all;
    println!(
        "{cuts} power cuts and {kills} kills, {replayed} with a journal that was needed, in {requests} \
         requests; {interrupted} while an image was recovered; {handed_over} that others went on with; {closings} while an image was \
         closed; {encrypted} lives of encrypted images; {right} bitmaps that claimed to be right, {kept} of them only because they \
         survived a kill, {kept_on} after a handover, {kept_resized} after a resize; {compressed} compressed clusters; {snapshots} snapshots, \
         {while_snapshot} cuts and kills while one was made or deleted; {:?}",
        started.elapsed()
    );
    let failures = failures.into_inner().unwrap();
    for (seed, error) in &failures {
        println!("RINGMILL_POWER_SEED={seed} cargo test -p ringmill-block --test power: {error}");
    }
    assert!(failures.is_empty());
    let is_short = seeds.end - seeds.start < SEEDS;
    let all_needed = replayed > 0 && interrupted > 0 && handed_over > 0;
    assert!(is_short || all_needed, "no journal was ever needed");
    assert!(is_short || closings > 0 && encrypted > 0, "no image was closed, or none encrypted");
    assert!(is_short || right > kept && kept > 0, "no bitmap was ever right, or survived a kill");
    let all_kept = kept_on > 0 && kept_resized > 0;
    assert!(is_short || all_kept, "no bitmap survived a kill after a handover, or a resize");
    assert!(is_short || compressed > 0, "no cluster was ever compressed");
    let all_snapshots = snapshots > 0 && while_snapshot > 0;
    assert!(is_short || all_snapshots, "no snapshot was ever made, or none interrupted");
}
