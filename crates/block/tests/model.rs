//! Random mixes of requests, several at a time, against a vector of bytes.

use crate::common;

use block::NodeRegistry;
use block::options::*;
use block::request::Op;
use common::*;
use event_loop::ring::sim::{Faults, Sim};
use event_loop::{EventLoop, IoBufs, LoopConfig};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

const SECTOR: usize = 512;

#[derive(Debug, Clone)]
enum Kind {
    Read,
    Write { fua: bool },
    Zeroes { may_unmap: bool, fua: bool },
    WrittenZeroes,
    Discard,
    Flush,
}

#[derive(Debug, Clone)]
struct Ask {
    kind: Kind,
    /// Sectors left out before it.
    gap: usize,
    sectors: usize,
    /// Bytes cut off at both ends, where requests may be any bytes.
    cut: (usize, usize),
    /// Bytes by which the memory misses a page's start.
    lead: usize,
    fill: u8,
}

fn ask() -> impl Strategy<Value = Ask> {
    let kind = prop_oneof![
        4 => Just(Kind::Read),
        4 => any::<bool>().prop_map(|fua| Kind::Write { fua }),
        1 => any::<(bool, bool)>().prop_map(|(may_unmap, fua)| Kind::Zeroes { may_unmap, fua }),
        1 => Just(Kind::WrittenZeroes),
        1 => Just(Kind::Discard),
        1 => Just(Kind::Flush),
    ];
    let sectors = prop_oneof![6 => 1usize..20, 1 => 100usize..600];
    let lead = prop_oneof![Just(0), Just(512), Just(8), 0usize..4096];
    (
        kind,
        prop_oneof![3 => Just(0), 2 => 0usize..40],
        sectors,
        (0..512usize, 0..512usize),
        lead,
        1u8..,
    )
        .prop_map(|(kind, gap, sectors, cut, lead, fill)| Ask {
            kind,
            gap,
            sectors,
            cut,
            lead,
            fill,
        })
}

/// What the image must hold; `None`: anything, since it was discarded.
struct Model {
    bytes: Vec<Option<u8>>,
    /// Discarded ranges read as zeroes to the byte (punched holes).
    discard_zeroes: bool,
}

impl Model {
    fn matches(&self, at: usize, found: &[u8]) -> bool {
        self.bytes[at..at + found.len()].iter().zip(found).all(|(m, f)| m.is_none_or(|m| m == *f))
    }
}

/// Submits each batch at once: in a section, as a guest's are, and with memory of one owner, so that
/// requests that continue each other are merged. The requests of a batch share no sector, but they
/// share blocks.
fn run(rig: &mut Rig, model: &mut Model, batches: &[Vec<Ask>], any_byte: bool) {
    let event_loop = rig.event_loop.clone();
    for batch in batches {
        let waiting = event_loop.section(|| submit(rig, model, batch, any_byte));
        for (nth, tag, from) in waiting {
            let (result, bufs) = rig.wait(tag);
            assert_eq!(result, Ok(()), "{:?} at {from}", batch[nth]);
            if matches!(batch[nth].kind, Kind::Read) {
                assert!(model.matches(from, &bytes(&bufs)), "{:?} at {from}", batch[nth]);
            }
        }
    }
}

/// Submits a batch: each request's place in it, tag and first byte.
fn submit(
    rig: &mut Rig,
    model: &mut Model,
    batch: &[Ask],
    any_byte: bool,
) -> Vec<(usize, u32, usize)> {
    let mut arena = Arena::new(batch.len() * (600 * SECTOR + 2 * 4096));
    let mut at = 0;
    let mut waiting = Vec::new();
    for (nth, ask) in batch.iter().enumerate() {
        let room = model.bytes.len() / SECTOR - at;
        let first = at + ask.gap.min(room);
        let sectors = ask.sectors.min(model.bytes.len() / SECTOR - first);
        at = first + sectors;
        let (mut from, mut to) = (first * SECTOR, at * SECTOR);
        if any_byte && sectors >= 2 {
            (from, to) = (from + ask.cut.0, to - ask.cut.1);
        }
        let (offset, len) = (from as u64, (to - from) as u64);
        let data: Vec<u8> = (from..to).map(|i| (i as u8) ^ ask.fill ^ (i >> 8) as u8).collect();
        let range = &mut model.bytes[from..to];
        let tag = match ask.kind {
            Kind::Read => rig.submit(Op::Read, offset, len, arena.take(to - from, ask.lead)),
            Kind::Write { fua } => {
                range.iter_mut().zip(&data).for_each(|(m, d)| *m = Some(*d));
                rig.submit(Op::Write { fua }, offset, len, arena.filled(&data, ask.lead))
            }
            Kind::WrittenZeroes => {
                range.fill(Some(0));
                let memory = arena.take(to - from, ask.lead);
                rig.submit(Op::Write { fua: false }, offset, len, memory)
            }
            Kind::Zeroes { may_unmap, fua } => {
                range.fill(Some(0));
                let op = Op::WriteZeroes { may_unmap, no_fallback: false, fua };
                rig.submit(op, offset, len, IoBufs::new())
            }
            Kind::Discard => {
                range.fill(model.discard_zeroes.then_some(0));
                rig.submit(Op::Discard, offset, len, IoBufs::new())
            }
            Kind::Flush => rig.submit(Op::Flush, 0, 0, IoBufs::new()),
        };
        waiting.push((nth, tag, from));
    }
    waiting
}

fn for_random_batches(cases: u32, check: impl Fn(Vec<Vec<Ask>>)) {
    let config =
        Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let batches = prop::collection::vec(prop::collection::vec(ask(), 1..24), 1..6);
    TestRunner::new_with_rng(config, rng)
        .run(&batches, |batches| {
            check(batches);
            Ok(())
        })
        .unwrap();
}

fn files_match(dir: std::path::PathBuf, name: &str, aio: Aio, direct: bool) {
    files_match_on(dir, name, aio, direct, || EventLoop::new(LoopConfig::default()).unwrap());
}

fn files_match_on(
    dir: std::path::PathBuf,
    name: &str,
    aio: Aio,
    direct: bool,
    event_loop: impl Fn() -> EventLoop,
) {
    // A whole number of blocks; one with a part of a block, and one with a part of a sector.
    for len in [400 * 1024, 400 * 1024 + 1536, 400 * 1024 + 1000] {
        for (detect_zeroes, any_byte) in
            [(DetectZeroes::Off, false), (DetectZeroes::Unmap, false), (DetectZeroes::On, true)]
        {
            let image = TempFile::new(&dir, name, len);
            for_random_batches(12, |batches| {
                let start = pattern(len);
                std::fs::write(&image.0, &start).unwrap();
                let mut options = blockdev("disk", file(&image.0, Some(aio)));
                options.cache.direct = direct;
                options.discard = Discard::Unmap;
                options.detect_zeroes = detect_zeroes;
                let node = NodeRegistry::new().open(&options).unwrap();
                let size = node.geometry().size as usize;
                assert_eq!(size, len.next_multiple_of(SECTOR));
                let mut bytes: Vec<_> = start.into_iter().map(Some).collect();
                bytes.resize(size, Some(0));
                let mut model = Model { bytes, discard_zeroes: true };
                let mut rig = Rig::on(event_loop(), node);
                run(&mut rig, &mut model, &batches, any_byte);
                assert!(model.matches(0, &rig.read(0, size, 0).unwrap()), "all of it, read by us");
                drop(rig);
                let mut found = image.contents();
                assert!(found.len() >= len && found.len() <= size, "{} bytes", found.len());
                found.resize(size, 0);
                assert!(model.matches(0, &found), "all of it, read from the file");
            });
        }
    }
}

#[test]
fn uring_buffered() {
    files_match(disk(), "model-ub", Aio::IoUring, false);
}

#[test]
fn uring_direct() {
    files_match(disk(), "model-ud", Aio::IoUring, true);
}

#[test]
fn native_direct() {
    files_match(disk(), "model-nd", Aio::Native, true);
}

#[test]
fn threads_buffered() {
    files_match(disk(), "model-tb", Aio::Threads, false);
}

#[test]
fn threads_direct() {
    files_match(disk(), "model-td", Aio::Threads, true);
}

/// Memory file systems say nothing of alignment, so blocks are taken to be 4096 bytes there, and
/// sectors are read, modified and written.
#[test]
fn large_blocks() {
    files_match(tmpfs(), "model-large", Aio::IoUring, true);
    files_match(tmpfs(), "model-large-threads", Aio::Threads, true);
    files_match(tmpfs(), "model-large-native", Aio::Native, true);
}

/// Transfers cut anywhere, completions in any order, calls that have to be made again.
#[test]
fn rough_ring() {
    let seed = std::cell::Cell::new(0);
    let again = vec![nix::libc::EINTR, nix::libc::EAGAIN];
    let faults = Faults { fail: 20, errnos: again, scribble: true, ..Faults::rough() };
    files_match_on(tmpfs(), "model-rough", Aio::IoUring, false, || {
        seed.set(seed.get() + 1);
        Sim::new(seed.get(), faults.clone()).event_loop(LoopConfig::default()).unwrap()
    });
    // Whole blocks only, in any order: where blocks are large, requests wait for each other.
    let faults = Faults { short: 0, ..faults };
    files_match_on(tmpfs(), "model-rough-large", Aio::IoUring, true, || {
        seed.set(seed.get() + 1);
        Sim::new(seed.get(), faults.clone()).event_loop(LoopConfig::default()).unwrap()
    });
}

#[test]
fn device_with_large_blocks() {
    let size = 400 * 1024;
    let Some(zram) = zram::Zram::new(size as u64) else { return };
    for (aio, direct) in [
        (Aio::IoUring, true),
        (Aio::IoUring, false),
        (Aio::Threads, true),
        (Aio::Threads, false),
        (Aio::Native, true),
    ] {
        for any_byte in [false, true] {
            for_random_batches(12, |batches| {
                let start = pattern(size);
                std::fs::write(zram.path(), &start).unwrap();
                let driver = Driver::host_device(file_options(zram.path(), Some(aio)));
                let mut options = blockdev("disk", driver);
                options.cache.direct = direct;
                options.discard = Discard::Unmap;
                let node = NodeRegistry::new().open(&options).unwrap();
                let geometry = node.geometry();
                assert_eq!(geometry.size, size as u64);
                assert_eq!(geometry.request_alignment, if direct { 4096 } else { 1 });
                let bytes = start.into_iter().map(Some).collect();
                let mut model = Model { bytes, discard_zeroes: false };
                let mut rig = Rig::new(node);
                run(&mut rig, &mut model, &batches, any_byte);
                assert!(model.matches(0, &rig.read(0, size, 0).unwrap()));
            });
        }
    }
}

fn nbd_matches(server: &common::nbd::NbdServer, size: usize, any_byte: bool) {
    for_random_batches(12, |batches| {
        let mut options = server.node();
        options.discard = Discard::Unmap;
        let node = NodeRegistry::new().open(&options).unwrap();
        assert_eq!(node.geometry().size, size as u64);
        let mut rig = Rig::new(node);
        let start = pattern(size);
        rig.write(0, &start, 0).unwrap();
        let bytes = start.into_iter().map(Some).collect();
        let mut model = Model { bytes, discard_zeroes: false };
        run(&mut rig, &mut model, &batches, any_byte);
        assert!(model.matches(0, &rig.read(0, size, 0).unwrap()));
        // Gives the connection up: the server takes few at a time.
        let event_loop = rig.event_loop.clone();
        drop(rig);
        event_loop.shut_down().unwrap();
    });
}

#[test]
fn nbd() {
    use common::nbd::NbdServer;
    let image = TempFile::new(&disk(), "model-nbd", 400 << 10);
    for any_byte in [false, true] {
        nbd_matches(&NbdServer::qemu(&image.0, &["--discard=unmap"]), 400 << 10, any_byte);
    }
    // Simple replies; replies in any order, in small pieces.
    nbd_matches(&NbdServer::nbdkit(&["--no-sr", "memory", "400k"]), 400 << 10, false);
    let small = ["blocksize-maximum=8k", "blocksize-error-policy=error"];
    let small = [&["--filter=blocksize-policy", "memory", "400k"], &small[..]].concat();
    nbd_matches(&NbdServer::nbdkit(&small), 400 << 10, false);
    // Large blocks, which are read, modified and written.
    let large = ["--filter=blocksize-policy", "memory", "400k", "blocksize-minimum=4k"];
    let large = [&large[..], &["blocksize-error-policy=error"]].concat();
    for any_byte in [false, true] {
        nbd_matches(&NbdServer::nbdkit(&large), 400 << 10, any_byte);
    }
}
