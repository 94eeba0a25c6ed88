//! Random requests, several at a time, on one loop and on several, against a vector of bytes.

use std::sync::Arc;

use block::node::BlockNode;
use block::options::{Backing, BlockdevOptions, CacheSizes, Discard, Driver, Qcow2Options};
use block::request::Op;
use event_loop::IoBufs;
use fastrand::Rng;

use crate::common::{Rig, bytes, filled, memory};
use crate::qcow2::image::{Folder, contents, judge, open, options, qcow2, qemu_img};

/// Bytes of the disk: not a whole number of clusters.
pub(crate) const SIZE: usize = (3 << 20) + 3 * 512;

/// What the disk must hold; `None`: anything, since it was discarded.
pub(crate) type Model = Vec<Option<u8>>;

/// What a request must have done, once it is answered.
enum Expect {
    Read(Vec<Option<u8>>),
    Done,
}

/// Works on those stripes of the disk that are `part` of `parts`.
pub(crate) struct Worker {
    pub(crate) random: Rng,
    pub(crate) stripe: usize,
    pub(crate) part: usize,
    pub(crate) parts: usize,
}

impl Worker {
    /// Some of our bytes, sectors or (now and then) any.
    fn range(&mut self, size: usize) -> (usize, usize) {
        let stripes = size.div_ceil(self.stripe * self.parts);
        loop {
            let stripe = self.random.usize(..stripes) * self.parts + self.part;
            let start = stripe * self.stripe;
            // Alone, over the borders too.
            let most = if self.parts == 1 { 4 * self.stripe } else { self.stripe };
            let end = (start + most).min(size);
            if start >= end {
                continue;
            }
            let sectors = (end - start) / 512;
            let (a, b) = (self.random.usize(..sectors + 1), self.random.usize(..sectors + 1));
            let whole = self.random.usize(..3) == 0;
            let (a, b) = if whole { (0, sectors) } else { (a.min(b), a.max(b)) };
            if a < b {
                return (start + a * 512, start + b * 512);
            }
        }
    }

    /// As many batches as `more` is content with. The disk may grow meanwhile, up to the model's size.
    pub(crate) fn run(
        &mut self,
        node: Arc<dyn BlockNode>,
        model: &mut Model,
        more: impl Iterator<Item = usize>,
    ) {
        let mut rig = Rig::new(node.clone());
        for _ in more {
            let size = node.geometry().size as usize;
            let mut taken: Vec<(usize, usize)> = Vec::new();
            let mut waiting = Vec::new();
            for _ in 0..self.random.usize(..16) + 1 {
                let (from, to) = self.range(size);
                if taken.iter().any(|&(start, end)| from < end && start < to) {
                    continue;
                }
                taken.push((from, to));
                let (tag, expect) = self.submit(&mut rig, model, from, to);
                waiting.push((tag, from, to, expect));
            }
            for (tag, from, to, expect) in waiting {
                let (result, bufs) = rig.wait(tag);
                assert_eq!(result, Ok(()), "{from}..{to}");
                if let Expect::Read(expected) = expect {
                    let wrong = first_difference(&expected, &bytes(&bufs));
                    assert_eq!(wrong, None, "in {from}..{to}");
                }
            }
        }
    }

    fn submit(
        &mut self,
        rig: &mut Rig,
        model: &mut Model,
        from: usize,
        to: usize,
    ) -> (u32, Expect) {
        let (offset, len) = (from as u64, (to - from) as u64);
        let range = &mut model[from..to];
        let fua = self.random.usize(..20) == 0;
        match self.random.usize(..16) {
            0..6 => {
                let tag = rig.submit(Op::Read, offset, len, memory(to - from, 512));
                (tag, Expect::Read(range.to_vec()))
            }
            6..12 => {
                let fill = self.random.usize(..255) as u8;
                let data: Vec<u8> = (from..to).map(|i| (i >> 8) as u8 ^ i as u8 ^ fill).collect();
                range.iter_mut().zip(&data).for_each(|(m, d)| *m = Some(*d));
                (rig.submit(Op::Write { fua }, offset, len, filled(&data, 0)), Expect::Done)
            }
            12 | 13 => {
                range.fill(Some(0));
                let may_unmap = self.random.usize(..2) == 0;
                let op = Op::WriteZeroes { may_unmap, no_fallback: false, fua };
                (rig.submit(op, offset, len, IoBufs::new()), Expect::Done)
            }
            14 => {
                range.fill(None);
                (rig.submit(Op::Discard, offset, len, IoBufs::new()), Expect::Done)
            }
            _ => (rig.submit(Op::Flush, 0, 0, IoBufs::new()), Expect::Done),
        }
    }
}

pub(crate) fn first_difference(model: &[Option<u8>], found: &[u8]) -> Option<(usize, u8, u8)> {
    let differs =
        |(at, (m, f)): (usize, (&Option<u8>, &u8))| m.filter(|m| m != f).map(|m| (at, m, *f));
    model.iter().zip(found).enumerate().find_map(differs)
}

/// Has as many loops as `threads` work on an image side by side, and QEMU judge what is left.
pub(crate) fn matches(
    folder: &Folder,
    options: &BlockdevOptions,
    start: &[u8],
    seed: u64,
    threads: usize,
    stripe: usize,
) {
    let node = open(options);
    assert_eq!(node.geometry().size as usize, SIZE);
    let mut models: Vec<Model> = vec![start.iter().copied().map(Some).collect(); threads];
    std::thread::scope(|scope| {
        for (part, model) in models.iter_mut().enumerate() {
            let node = node.clone();
            let random = Rng::with_seed(seed * 31 + part as u64 + 1);
            let mut worker = Worker { random, stripe, part, parts: threads };
            scope.spawn(move || worker.run(node, model, 0..40));
        }
    });
    // Of each stripe what its owner knows.
    let model: Model = (0..SIZE).map(|at| models[at / stripe % threads][at]).collect();
    let found = contents(&node);
    assert_eq!(first_difference(&model, &found), None, "read by us");
    drop(node);
    judge(folder, "disk.qcow2", &found);
}

/// What qemu-img is told of each kind of image.
pub(crate) const KINDS: [(&str, &str); 7] = [
    ("64k", "cluster_size=64k"),
    ("512", "cluster_size=512"),
    ("2M", "cluster_size=2M"),
    ("v2", "compat=0.10,cluster_size=4k"),
    ("refcounts", "cluster_size=4k,refcount_bits=1,lazy_refcounts=on"),
    ("extended-16k", "cluster_size=16k,extended_l2=on"),
    ("extended-2M", "cluster_size=2M,extended_l2=on"),
];

#[test]
fn alone() {
    for (name, kind) in KINDS {
        let folder = Folder::new(&format!("alone-{name}"));
        for seed in 1..4 {
            let size = SIZE.to_string();
            qemu_img(&folder, &["create", "-q", "-f", "qcow2", "-o", kind, "disk.qcow2", &size]);
            let options = options(&folder.path("disk.qcow2"));
            matches(&folder, &options, &vec![0; SIZE], seed, 1, 65536);
        }
    }
}

/// Stripes smaller than clusters, and as large: the loops share clusters, and give them to each other.
#[test]
fn on_several_loops() {
    for (name, kind) in KINDS {
        let folder = Folder::new(&format!("several-{name}"));
        for (seed, stripe) in [(1, 4096), (2, 65536), (3, 512)] {
            let size = SIZE.to_string();
            qemu_img(&folder, &["create", "-q", "-f", "qcow2", "-o", kind, "disk.qcow2", &size]);
            let options = options(&folder.path("disk.qcow2"));
            matches(&folder, &options, &vec![0; SIZE], seed, 3, stripe);
        }
    }
}

/// Tables that do not fit in memory are read again and again.
#[test]
fn with_the_smallest_caches() {
    let folder = Folder::new("caches");
    let path = folder.path("disk.qcow2");
    for (seed, threads) in [(1, 1), (2, 3)] {
        let size = SIZE.to_string();
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "disk.qcow2", &size];
        qemu_img(&folder, &create);
        let caches = CacheSizes { l2: Some(0), refcounts: Some(0), ..CacheSizes::default() };
        let qcow2 = Qcow2Options { caches, ..qcow2(&path, Backing::Implicit) };
        let options = BlockdevOptions { driver: Driver::from(qcow2), ..options(&path) };
        matches(&folder, &options, &vec![0; SIZE], seed, threads, 4096);
    }
}

/// On top of an image that is on top of a raw file, both shorter than the disk.
#[test]
fn on_a_chain() {
    for (name, direct, form) in [
        ("plain", false, "compat=1.1"),
        ("direct", true, "compat=1.1"),
        ("v2", false, "compat=0.10"),
        ("extended", false, "extended_l2=on"),
        ("extended-direct", true, "extended_l2=on,cluster_size=256k"),
    ] {
        let folder = Folder::new(&format!("chain-{name}"));
        let base: Vec<u8> = (0..1_500_160).map(|i| (i / 512) as u8 | 1).collect();
        std::fs::write(folder.path("base.raw"), &base).unwrap();
        let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw"];
        qemu_img(&folder, &[&create[..], &["middle.qcow2", "2M"]].concat());
        crate::qcow2::image::qemu_io(&folder, "middle.qcow2", "write -P 7 1M 700k");
        let mut start = base.clone();
        start.resize(SIZE, 0);
        start[1 << 20..(1 << 20) + 700 * 1024].fill(7);
        for (seed, threads) in [(1, 1), (2, 3)] {
            let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "middle.qcow2", "-o"];
            let size = SIZE.to_string();
            qemu_img(&folder, &[&create[..], &[form, "disk.qcow2", &size]].concat());
            let mut options = crate::qcow2::image::options(&folder.path("disk.qcow2"));
            options.cache.direct = direct;
            matches(&folder, &options, &start, seed, threads, 8192);
        }
        assert!(std::fs::read(folder.path("base.raw")).unwrap() == base);
        crate::qcow2::image::check(&folder, "middle.qcow2");
    }
}

/// Compressed clusters are read, and overwritten.
#[test]
fn compressed() {
    let folder = Folder::new("compressed");
    let start: Vec<u8> = (0..SIZE).map(|i| (i / 700) as u8).collect();
    std::fs::write(folder.path("start.raw"), &start).unwrap();
    for (seed, threads, kind) in [
        (1, 1, "cluster_size=64k"),
        (2, 3, "cluster_size=4k"),
        (3, 3, "cluster_size=64k,compression_type=zstd"),
        (4, 1, "cluster_size=2M,compression_type=zstd"),
        (5, 3, "cluster_size=16k,extended_l2=on"),
    ] {
        let args = ["convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", kind];
        qemu_img(&folder, &[&args[..], &["start.raw", "disk.qcow2"]].concat());
        let mut options = options(&folder.path("disk.qcow2"));
        let node = open(&BlockdevOptions { read_only: true, ..options.clone() });
        assert!(contents(&node) == start);
        drop(node);
        options.discard = Discard::Unmap;
        matches(&folder, &options, &start, seed, threads, 16384);
    }
}
