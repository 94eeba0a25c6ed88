//! A guest at work on an image, power cuts and killed processes, and what they have left.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use block::NodeRegistry;
use block::node::{BlockNode, ResizeError};
use block::options::*;
use block::request::Op;
use event_loop::ring::sim::{Faults, Sim, Unflushed};
use event_loop::{IoBufs, LoopConfig, PollParams, PollPolicy, oneshot};

use crate::common::{Rig, blockdev, bytes, file_options, filled, memory};
use crate::guest::{Change, Disk, SECTOR, Stamp, sector};
use crate::journal::Folder;
use crate::kinds::{Kind, Start};
use crate::oracle::Image;

const NO_POLLING: PollParams =
    PollParams { policy: PollPolicy::Histogram, max_ns: 0, grow: 0, shrink: 0, weight: 0 };

/// Whether all is to be told.
fn trace() -> bool {
    std::env::var_os("RINGMILL_POWER_TRACE").is_some()
}

/// splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// What a course has seen.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) cuts: usize,
    pub(crate) kills: usize,
    /// Kills of processes whose journal had something that was not in the image.
    pub(crate) replayed: usize,
    pub(crate) requests: usize,
}

impl Seen {
    pub(crate) fn add(&mut self, other: Seen) {
        self.cuts += other.cuts;
        self.kills += other.kills;
        self.replayed += other.replayed;
        self.requests += other.requests;
    }
}

/// A request under way.
struct Asked {
    op: Op,
    range: Range<usize>,
    at: u64,
}

/// How the guest and the host behave.
struct Habits {
    depth: usize,
    requests: usize,
    write_through: bool,
    /// Of many, how many requests are writes, and discards or write-zeroes.
    writes: usize,
    frees: usize,
    /// Sectors of a request, at most, as a rule.
    longest: usize,
}

/// An image, and what is on the disk in it.
struct Left {
    image: Vec<u8>,
    contents: Vec<u8>,
    /// For who opens it: as a process has left it that was killed, or a new one. `None`: there is none.
    journals: Option<Folder>,
    /// What a power cut may still take back of it. `None`: nothing.
    unflushed: Option<(Unflushed, Disk)>,
}

/// An image in use, until the process ends or the power.
struct Life<'a> {
    kind: &'static Kind,
    start: &'a Start,
    random: Random,
    journals: Option<Folder>,
    /// Operations may fail.
    may_fail: bool,
    sim: Sim,
    fd: Arc<OwnedFd>,
    node: Arc<dyn BlockNode>,
    rig: Rig,
    disk: Disk,
    /// Sectors, as the guest knows.
    size: usize,
    asked: BTreeMap<u32, Asked>,
    /// To which size, sectors, and what comes of it.
    resizing: Option<(usize, oneshot::Receiver<Result<(), ResizeError>>)>,
    stamp: Stamp,
    seen: Seen,
}

/// Runs the course of a seed: a few lives of an image, each begun with what is left of the one before: by a
/// power cut or a process that was killed. Half of them have journals. `judge` is shown an image now and then.
pub(crate) fn run(seed: u64, mut judge: impl FnMut(&Kind, &[u8])) -> Result<Seen, String> {
    let mut random = Random(seed);
    let kind = Kind::pick(random.below(usize::MAX));
    let start = kind.start();
    let image = start.image.clone();
    let contents = contents(kind, start, &image)?;
    let journals = random.one_in(2).then(Folder::new);
    let mut left = Left { image, contents, journals, unflushed: None };
    let mut seen = Seen::default();
    let mut stamp = 1 << 20;
    for number in 0..3 {
        let contents = left.contents.clone();
        let mut life = Life::begin(kind, start, random.next(), left);
        life.stamp = stamp;
        let lived = life.read_all(&contents).and_then(|()| life.go_on());
        let lived = lived.and_then(|()| life.leave(true));
        seen.add(life.seen);
        stamp = life.stamp;
        let (asked, with) = (life.asked.len(), life.journals.is_some());
        let lived = life.end().and(lived);
        left = lived.map_err(|error| {
            format!(
                "{} ({}), journals: {with}, life {number}, {asked} requests under way: {error}",
                kind.name, kind.options
            )
        })?;
        judge(kind, &left.image);
    }
    Ok(seen)
}

/// What is on the disk in an image, which has to be whole.
fn contents(kind: &Kind, start: &Start, image: &[u8]) -> Result<Vec<u8>, String> {
    match kind.is_qcow2() {
        true => Image::read(image, &start.behind),
        false => Ok(image.to_vec()),
    }
}

impl<'a> Life<'a> {
    fn begin(kind: &'static Kind, start: &'a Start, seed: u64, left: Left) -> Life<'a> {
        let Left { image, contents, journals, unflushed } = left;
        let mut random = Random(seed);
        let faults = match random.below(3) {
            0 => Faults { clock_step_ns: 20, spurious_poll: 0, poll_fails: 0, ..Faults::rough() },
            1 => Faults {
                fail: 1,
                errnos: vec![nix::libc::EIO, nix::libc::ENOSPC],
                ..Faults::default()
            },
            _ => Faults { latency_ns: (1_000, 20_000), ..Faults::default() },
        };
        // Opening is not what is tried.
        let sim = Sim::new(random.next(), Faults::default());
        let fd = sim.file(&image).unwrap();
        if let Some((unflushed, _)) = &unflushed {
            sim.storage().go_on(&fd, unflushed).unwrap();
        }
        let options = options(kind, start, &fd, &mut random);
        let mut registry = journals.as_ref().map_or_else(NodeRegistry::new, Folder::registry);
        let node = registry.open(&options).unwrap_or_else(|error| {
            panic!("what was left cannot be opened: {error:?}");
        });
        // What was written meanwhile the ring has not seen.
        let opened = std::fs::read(path_of(&fd)).unwrap();
        if unflushed.is_some() {
            sim.storage().look(&fd);
        } else if opened != image {
            sim.storage().restore(&fd, opened).unwrap();
        }
        let event_loop =
            sim.event_loop(LoopConfig { poll: NO_POLLING, ..LoopConfig::default() }).unwrap();
        let rig = Rig::on(event_loop, node.clone());
        if trace() {
            println!("{options:?} {faults:?}");
            sim.script(|op| {
                println!("  {op:?}");
                event_loop::ring::sim::Verdict::Seeded
            });
        }
        let may_fail = faults.fail > 0;
        sim.set_faults(faults);
        let size = contents.len() / SECTOR;
        let disk = match unflushed {
            Some((_, disk)) => disk.after_kill(&contents),
            None => Disk::new(&contents),
        };
        let (asked, seen) = (BTreeMap::new(), Seen::default());
        Life {
            kind,
            start,
            random,
            journals,
            may_fail,
            sim,
            fd,
            node,
            rig,
            disk,
            size,
            asked,
            resizing: None,
            stamp: 0,
            seen,
        }
    }

    /// That the driver finds what the oracle does.
    fn read_all(&mut self, contents: &[u8]) -> Result<(), String> {
        let faults = Faults::default();
        self.sim.set_faults(faults);
        let size = self.node.geometry().size as usize;
        if size != contents.len() {
            return Err(format!("the driver finds {size} bytes, not {}", contents.len()));
        }
        let mut found = Vec::new();
        while found.len() < size {
            let len = (size - found.len()).min(1 << 20);
            let read = self.rig.read(found.len() as u64, len, 0);
            found.extend(read.map_err(|errno| format!("reading all: {errno}"))?);
        }
        self.disk.check_read(0, &found).map_err(|error| format!("opened again: {error}"))
    }

    /// Works, with a cut or a kill now and then that it does not learn of.
    fn go_on(&mut self) -> Result<(), String> {
        let largest = self.kind.cluster.max(4096) / SECTOR;
        let habits = Habits {
            depth: [1, 2, 8, 24][self.random.below(4)],
            requests: 20 + self.random.below(100),
            write_through: self.random.one_in(4),
            writes: 30 + self.random.below(40),
            frees: self.random.below(50),
            longest: [1, largest, 4 * largest, 24 * largest][self.random.below(4)],
        };
        let resizes = self.random.one_in(3);
        let every = 1 + self.random.below(8);
        while self.seen.requests < habits.requests {
            if resizes && self.resizing.is_none() && self.random.one_in(20) {
                self.resize()?;
            }
            let smaller = self.resizing.as_ref().is_some_and(|(size, _)| *size < self.size);
            while !smaller && self.asked.len() < habits.depth && !self.random.one_in(4) {
                self.ask(&habits);
            }
            self.turn()?;
            if self.random.one_in(every) {
                self.leave(false)?;
            }
        }
        Ok(())
    }

    fn ask(&mut self, habits: &Habits) {
        self.seen.requests += 1;
        let size = self.size;
        let longest = if self.random.one_in(12) { size } else { habits.longest };
        let first = self.random.below(size);
        let mut range = first..size.min(first + 1 + self.random.below(longest));
        if self.random.one_in(3) {
            // Whole clusters.
            let cluster = (self.kind.cluster / SECTOR).max(1);
            range.start -= range.start % cluster;
            range.end = range.end.next_multiple_of(cluster).min(size);
        }
        let op = self.pick(habits);
        let is_free =
            |asked: &Asked| range.end <= asked.range.start || asked.range.end <= range.start;
        if op != Op::Flush && !self.asked.values().all(is_free) {
            return;
        }
        let (offset, len) = ((range.start * SECTOR) as u64, (range.len() * SECTOR) as u64);
        let (change, bufs) = match op {
            Op::Write { .. } => {
                // Zeroes, now and then, which may be detected.
                self.stamp += 1;
                let stamp = if self.random.one_in(6) { 0 } else { self.stamp };
                let data: Vec<u8> =
                    range.clone().flat_map(|number| sector(stamp, number as u64)).collect();
                (Some(Change::Written(stamp)), filled(&data, 0))
            }
            Op::WriteZeroes { .. } => (Some(Change::Zeroed), IoBufs::new()),
            Op::Discard => (Some(Change::Discarded), IoBufs::new()),
            Op::Read => (None, memory(len as usize, 0)),
            _ => (None, IoBufs::new()),
        };
        if trace() {
            println!("{op:?} {range:?} {change:?}");
        }
        let at = self.disk.now();
        if let Some(change) = change {
            self.disk.begin(range.clone(), change);
        }
        let (tag, range) = match op {
            Op::Flush => (self.rig.submit(op, 0, 0, bufs), 0..0),
            _ => (self.rig.submit(op, offset, len, bufs), range),
        };
        self.asked.insert(tag, Asked { op, range, at });
    }

    /// Has the disk get another size. If it is to become smaller, nothing is under way meanwhile.
    fn resize(&mut self) -> Result<(), String> {
        let size = 1 + self.random.below(2 * self.kind.size / SECTOR);
        if size < self.size {
            while !self.asked.is_empty() {
                self.turn()?;
            }
        }
        if trace() {
            println!("resize to {size} sectors");
        }
        self.disk.begin_resize(size);
        let (done, result) = oneshot::channel();
        let event_loop = self.rig.event_loop.clone();
        let resized = self.node.clone().resize((size * SECTOR) as u64, &event_loop);
        event_loop.spawn(async move { done.send(resized.await) });
        self.resizing = Some((size, result));
        Ok(())
    }

    /// Whether the disk has got another size, or has failed to.
    fn look_at_resize(&mut self) -> bool {
        let Some((size, mut result)) = self.resizing.take() else { return false };
        // Not all of it comes down the ring: so that the storage takes note of it.
        self.sim.storage().unstable_sectors(&self.fd);
        match Pin::new(&mut result).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => {
                self.resizing = Some((size, result));
                return false;
            }
            Poll::Ready(Ok(Ok(()))) => {
                self.size = size;
                self.disk.resized(self.kind.is_qcow2());
            }
            Poll::Ready(_) => self.disk.resize_failed(),
        }
        true
    }

    fn pick(&mut self, habits: &Habits) -> Op {
        let fua = habits.write_through || self.random.one_in(8);
        match self.random.below(100) {
            n if n < habits.writes => Op::Write { fua },
            n if n < habits.writes + habits.frees / 2 => Op::Discard,
            n if n < habits.writes + habits.frees => {
                let may_unmap = self.random.one_in(2);
                Op::WriteZeroes { may_unmap, no_fallback: false, fua }
            }
            n if n < 92 => Op::Flush,
            _ => Op::Read,
        }
    }

    /// Turns the loop, and takes the answers there are.
    fn turn(&mut self) -> Result<(), String> {
        let mut turns = 0;
        while !self.asked.is_empty() || self.resizing.is_some() {
            // Nobody else would wake it.
            let waits = self.sim.in_flight() > 0;
            self.rig.event_loop.run_once(waits).unwrap();
            turns += 1;
            if waits || self.rig.has_answers() || self.look_at_resize() {
                break;
            }
            if turns > 100 {
                let waiting: Vec<_> = self.asked.values().map(|a| (a.op, &a.range)).collect();
                return Err(format!("nothing is under way, but not answered: {waiting:?}"));
            }
        }
        self.look_at_resize();
        let tags: Vec<u32> = self.asked.keys().copied().collect();
        for tag in tags {
            let Some((result, bufs)) = self.rig.answer(tag) else { continue };
            let Some(Asked { op, range, at }) = self.asked.remove(&tag) else { continue };
            if trace() {
                println!("{op:?} {range:?} is answered {result:?}");
            }
            if result.is_err() {
                continue;
            }
            match op {
                Op::Flush => self.disk.flushed(at),
                Op::Read => {
                    let checked = self.disk.check_read(range.start, &bytes(&bufs));
                    checked.map_err(|error| format!("a read: {error}"))?;
                }
                Op::Write { fua } | Op::WriteZeroes { fua, .. } => self.disk.answered(range, fua),
                Op::Discard | Op::BlockStatus => self.disk.answered(range, false),
            }
        }
        Ok(())
    }

    /// The end, now, of the power or of the process: what it leaves, which has to be right. `goes_on`: another
    /// life is to begin with it.
    fn leave(&mut self, goes_on: bool) -> Result<Left, String> {
        let is_cut = self.random.one_in(2);
        let seed = self.random.next();
        let image = match is_cut {
            true => self.sim.cut(&self.fd, seed).unwrap(),
            false => self.sim.killed(&self.fd, seed).unwrap(),
        };
        let left = if is_cut { self.after_cut(&image) } else { self.after_kill(&image, goes_on) };
        let left = left.map_err(|mut error| {
            let Seen { cuts, kills, .. } = self.seen;
            let what = if is_cut { "cut" } else { "kill" };
            let _ = write!(error, " ({what}, the {}.)", cuts + kills);
            if let Some(folder) = std::env::var_os("RINGMILL_POWER_KEEP") {
                let path = std::path::Path::new(&folder).join("left.img");
                std::fs::write(path, &image).unwrap();
            }
            error
        })?;
        Ok(Left { image, ..left })
    }

    /// Journals are gone, and what was not flushed may be.
    fn after_cut(&mut self, image: &[u8]) -> Result<Left, String> {
        self.seen.cuts += 1;
        let contents = contents(self.kind, self.start, image)?;
        self.disk.check_cut(&contents)?;
        let journals = self.journals.as_ref().map(|_| Folder::new());
        Ok(Left { image: Vec::new(), contents, journals, unflushed: None })
    }

    /// Nothing is lost that was answered, with the journal; without it, nothing that was flushed.
    fn after_kill(&mut self, image: &[u8], goes_on: bool) -> Result<Left, String> {
        self.seen.kills += 1;
        let mut found = contents(self.kind, self.start, image)?;
        let checked = self.disk.check_cut(&found);
        checked.map_err(|error| format!("without a journal: {error}"))?;
        let journals = self.journals.as_ref().map(Folder::left);
        let mut replayed = image.to_vec();
        let is_replayed =
            journals.as_ref().map_or(Ok(false), |journals| journals.replay(&mut replayed))?;
        if is_replayed {
            self.seen.replayed += 1;
            found = contents(self.kind, self.start, &replayed)?;
        }
        self.disk.check_kill(&found)?;
        // Who replays a journal flushes what it is about. Of a flush that has failed the next process knows nothing.
        let is_kept = goes_on && !is_replayed && !self.may_fail;
        let unflushed = is_kept.then(|| self.sim.storage());
        let unflushed = unflushed.and_then(|storage| storage.unflushed(&self.fd));
        let unflushed = unflushed.map(|unflushed| (unflushed, self.disk.clone()));
        Ok(Left { image: Vec::new(), contents: found, journals, unflushed })
    }

    /// Has the rest answered, as if nothing had been: nobody may go without an answer.
    fn end(mut self) -> Result<(), String> {
        self.sim.set_faults(Faults::default());
        while !self.asked.is_empty() || self.resizing.is_some() {
            if let Err(error) = self.turn() {
                // Its memory must not be freed.
                std::mem::forget(self);
                return Err(error);
            }
        }
        let Life { rig, node, .. } = self;
        let event_loop = rig.event_loop.clone();
        drop(rig);
        event_loop.shut_down().unwrap();
        drop(node);
        Ok(())
    }
}

fn path_of(fd: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

/// `discard` and `detect-zeroes`.
fn freeing(random: &mut Random) -> (Discard, DetectZeroes) {
    match random.below(8) {
        0 => (Discard::Ignore, DetectZeroes::On),
        1 => (Discard::Unmap, DetectZeroes::On),
        2 | 3 => (Discard::Unmap, DetectZeroes::Unmap),
        _ => (Discard::Unmap, DetectZeroes::Off),
    }
}

fn options(kind: &Kind, start: &Start, fd: &OwnedFd, random: &mut Random) -> BlockdevOptions {
    let (discard, detect_zeroes) = freeing(random);
    let locking = Locking::Off;
    let file = Driver::File(FileOptions { locking, ..file_options(&path_of(fd), None) });
    let mut file = BlockdevOptions { discard, detect_zeroes, ..blockdev("file", file) };
    file.cache.direct = kind.direct;
    let file = BlockdevRef::Inline(Box::new(file));
    let driver = match kind.is_qcow2() {
        false => Driver::Raw(RawOptions { file, offset: 0, size: None }),
        true => Driver::Qcow2(Qcow2Options {
            file,
            data_file: None,
            backing: match &start.behind_file {
                None => Backing::None,
                Some(file) => Backing::Node(BlockdevRef::Inline(Box::new(BlockdevOptions {
                    read_only: true,
                    ..blockdev(
                        "behind",
                        Driver::File(FileOptions { locking, ..file_options(&path_of(file), None) }),
                    )
                }))),
            },
            pass_discard_request: [None, Some(true), Some(false)][random.below(3)],
            discard_no_unref: random.one_in(4),
        }),
    };
    let (discard, detect_zeroes) = freeing(random);
    BlockdevOptions { discard, detect_zeroes, ..blockdev("disk", driver) }
}
