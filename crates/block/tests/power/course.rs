//! A guest that uses an image, with power cuts and killed processes, and checks of the remains.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use block::NodeRegistry;
use block::node::{BlockNode, ResizeError};
use block::request::Op;
use block::track::Tracking;
use event_loop::ring::sim::{Faults, Sim, Unflushed};
use event_loop::{IoBufs, LoopConfig, PollParams, oneshot};
use fastrand::Rng;

use crate::common::{Rig, bytes, filled, memory};
use crate::power::bitmaps::HandedOver;
use crate::power::compressed::Compressing;
use crate::power::guest::{Change, Disk, SECTOR, Stamp, sector};
use crate::power::journal::{Folder, is_marked};
use crate::power::kinds::{Extras, Kind, Start};
use crate::power::left::{Left, contents, keep};
use crate::power::path_of;
use crate::power::recovery::{Ended, Interrupt, Moments, Reopened, interrupted};
use crate::power::snapshots::Changing;

/// One recovery in this many is interrupted: if the journal has something that is not in the image, and if
/// not.
const INTERRUPTED: [usize; 2] = [4, 32];

pub(crate) const NO_POLLING: PollParams = PollParams::OFF;

/// Whether to print all requests and operations.
fn trace() -> bool {
    std::env::var_os("RINGMILL_POWER_TRACE").is_some()
}

/// Counts of events in a course.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) cuts: usize,
    pub(crate) kills: usize,
    /// Kills of processes whose journal had something that was not in the image.
    pub(crate) replayed: usize,
    /// Cuts and kills while an image was being recovered.
    pub(crate) interrupted: usize,
    /// Handovers of images with unwritten changes to another process.
    pub(crate) handed_over: usize,
    pub(crate) requests: usize,
    /// Cuts and kills while an image was being closed.
    pub(crate) closings: usize,
    /// Lives of encrypted images.
    pub(crate) encrypted: usize,
    /// Bitmaps in what was left that claimed to be right.
    pub(crate) right: usize,
    /// Bitmaps with bits that have survived a kill.
    pub(crate) kept: usize,
    /// Those among them that have survived the kill of a process that had taken the image over, and of one that has
    /// resized it.
    pub(crate) kept_on: usize,
    pub(crate) kept_resized: usize,
    /// Compressed clusters in what was left.
    pub(crate) compressed: usize,
    /// Snapshots that were made or deleted.
    pub(crate) snapshots: usize,
    /// Cuts and kills meanwhile.
    pub(crate) while_snapshot: usize,
}

impl Seen {
    pub(crate) fn add(&mut self, other: Seen) {
        self.cuts += other.cuts;
        self.kills += other.kills;
        self.replayed += other.replayed;
        self.interrupted += other.interrupted;
        self.handed_over += other.handed_over;
        self.requests += other.requests;
        self.closings += other.closings;
        self.encrypted += other.encrypted;
        self.right += other.right;
        self.kept += other.kept;
        self.kept_on += other.kept_on;
        self.kept_resized += other.kept_resized;
        self.compressed += other.compressed;
        self.snapshots += other.snapshots;
        self.while_snapshot += other.while_snapshot;
    }
}

/// A request in flight.
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
    /// Out of many requests, the number of writes, and of discards or write-zeroes.
    writes: usize,
    frees: usize,
    /// Usual maximum length of a request in sectors.
    longest: usize,
}

/// An image in use, until the process ends or the power is cut.
struct Life<'a> {
    kind: &'static Kind,
    start: &'a Start,
    extras: Extras,
    random: Rng,
    /// Decides about interrupted recoveries. `None` for the life after such a recovery, so that it does not affect it.
    recoveries: Option<Rng>,
    journals: Option<Arc<Folder>>,
    /// Operations may fail.
    may_fail: bool,
    sim: Sim,
    fd: Arc<OwnedFd>,
    node: Arc<dyn BlockNode>,
    registry: NodeRegistry,
    /// The image gets bitmaps.
    tracking: Option<Arc<Tracking>>,
    moments: Arc<Moments>,
    /// Decides about closing the image. `None`: nothing looks at what that leaves.
    closing: Option<Rng>,
    /// Decides when bitmaps begin anew.
    takes: Rng,
    /// Decides when snapshots are made and deleted.
    snapshots: Rng,
    is_released: bool,
    is_resized: bool,
    rig: Rig,
    disk: Disk,
    /// The size in sectors that the guest knows.
    size: usize,
    asked: BTreeMap<u32, Asked>,
    /// The new size in sectors, and the result.
    resizing: Option<(usize, oneshot::Receiver<Result<(), ResizeError>>)>,
    /// A change of the snapshots that is under way, and when it began.
    changing: Option<(u64, Changing)>,
    stamp: Stamp,
    seen: Seen,
}

/// Runs the course of a seed: a few lives of an image. Each begins with the remains of the previous one, after a
/// power cut or a kill. Half of the courses have journals. `judge` is sometimes called with an image.
pub(crate) fn run(seed: u64, mut judge: impl FnMut(&Kind, &[u8], bool)) -> Result<Seen, String> {
    let mut random = Rng::with_seed(seed);
    let kind = Kind::pick(random.usize(..usize::MAX));
    // Independent of the course.
    let extras = kind.extras(&mut Rng::with_seed(seed ^ 0x0bad_5eed));
    let start = kind.start(extras);
    let image = start.image.clone();
    let contents = contents(kind, start, &image)?;
    let journals = random.bool().then(|| Arc::new(Folder::new()));
    let mut left = Left { image, luks: extras.luks, ..Left::with(contents, journals) };
    let mut recoveries = Rng::with_seed(!seed);
    let mut seen = Seen::default();
    let mut stamp = 1 << 20;
    for number in 0..3 {
        let recoveries = Some(Rng::with_seed(recoveries.u64(..)));
        let (lived, journals) = (random.u64(..), left.journals.is_some());
        let life = Life::begin(kind, start, extras, lived, recoveries, left);
        let lived = life.live(&mut stamp, &mut seen);
        left = lived.map_err(|error| {
            let Kind { name, options, .. } = kind;
            format!("{name} ({options}), {extras:?}, journals: {journals}, life {number}, {error}")
        })?;
        judge(kind, &left.image, extras.luks);
        seen.encrypted += usize::from(extras.luks);
    }
    Ok(seen)
}

impl<'a> Life<'a> {
    /// Without `recoveries`, the storage records how the image is opened.
    fn begin(
        kind: &'static Kind,
        start: &'a Start,
        extras: Extras,
        seed: u64,
        recoveries: Option<Rng>,
        left: Left,
    ) -> Life<'a> {
        let mut random = Rng::with_seed(seed);
        let faults = match random.usize(..3) {
            0 => Faults { clock_step_ns: 20, spurious_poll: 0, poll_fails: 0, ..Faults::rough() },
            1 => Faults {
                fail: 1,
                errnos: vec![nix::libc::EIO, nix::libc::ENOSPC],
                ..Faults::default()
            },
            _ => Faults { latency_ns: (1_000, 20_000), ..Faults::default() },
        };
        let mut closing =
            recoveries.as_ref().map(|random| Rng::with_seed(random.get_seed() ^ 0x0c10_5ed0));
        let interrupt = match &mut closing {
            None => Interrupt::Opening(Rng::with_seed(!seed)),
            Some(random) => Interrupt::Closing(Rng::with_seed(random.u64(..))),
        };
        let reopened = Reopened::new(kind, start, &left, &mut random, interrupt, extras.bitmaps);
        let Reopened { sim, fd, options, node, registry, tracking, moments, .. } = reopened;
        let event_loop =
            sim.event_loop(LoopConfig { poll: NO_POLLING, ..LoopConfig::default() }).unwrap();
        let mut rig = Rig::on(event_loop, node.clone());
        if extras.compressed {
            rig.channel = Rc::new(Compressing { below: rig.channel, requests: Cell::new(0) });
        }
        if trace() {
            println!("{options:?} {faults:?}");
            sim.script(|op| {
                println!("  {op:?}");
                event_loop::ring::sim::Verdict::Seeded
            });
        }
        let may_fail = faults.fail > 0;
        sim.set_faults(faults);
        let size = left.contents.len() / SECTOR;
        // Replaying a journal flushes the image; continuing with a journal does not.
        let mut disk =
            if left.replayed && !left.is_handed_over { left.stable_disk() } else { left.disk() };
        if let (Some(tracking), Some(random)) = (&tracking, &mut closing)
            && (!disk.bitmaps.any_right() || random.usize(..3) == 0)
        {
            let store = registry.node("disk").unwrap().bitmap_store().unwrap();
            disk.bitmaps.add(tracking, &*store, &left.contents, random);
            if random.usize(..2) == 0 {
                let secured = store.secure(&rig.event_loop);
                // Without success, as without this.
                let _ = rig.event_loop.block_on(secured).unwrap();
            }
        }
        let (asked, seen) = (BTreeMap::new(), Seen::default());
        Life {
            kind,
            start,
            extras,
            random,
            recoveries,
            journals: left.journals,
            may_fail,
            sim,
            fd,
            node,
            registry,
            tracking,
            moments,
            closing,
            takes: Rng::with_seed(!seed ^ 0x7a4e),
            snapshots: Rng::with_seed(!seed ^ 0x5a45),
            is_released: false,
            is_resized: false,
            rig,
            disk,
            size,
            asked,
            resizing: None,
            changing: None,
            stamp: 0,
            seen,
        }
    }

    /// What the image has besides, for the life after this one.
    fn extras(&self) -> Extras {
        Extras { bitmaps: self.tracking.is_some(), ..self.extras }
    }

    /// Runs the life to its end, with numbers of writes that no other life uses.
    fn live(mut self, stamp: &mut Stamp, seen: &mut Seen) -> Result<Left, String> {
        self.stamp = *stamp;
        let lived = self.read_all().and_then(|()| self.go_on()).and_then(|()| self.leave());
        // After the end has been chosen: the handover does not change the course.
        let lived = lived.and_then(|left| self.hand_over().map(|()| left));
        seen.add(self.seen);
        *stamp = self.stamp;
        let asked = self.asked.len();
        let (kind, start, has_bitmaps) = (self.kind, self.start, self.tracking.is_some());
        let ended = match self.closing.take() {
            Some(mut random) => {
                self.close(&mut random, seen).map(|left| left.map(|left| (left, random)))
            }
            None => self.end().map(|()| None),
        };
        let lived = ended.and_then(|ended| Ok((lived?, ended)));
        let (left, closed) =
            lived.map_err(|error| format!("{asked} requests under way: {error}"))?;
        // Bitmaps are right only in an image that was closed.
        let Some((closed, mut random)) = closed.filter(|_| has_bitmaps) else { return Ok(left) };
        match random.usize(..3) {
            0 => Ok(left),
            1 => interrupted(kind, start, closed, &mut random, seen, has_bitmaps),
            _ => Ok(closed),
        }
    }

    /// Checks that reads return what the oracle has, and that enough is stable.
    fn read_all(&mut self) -> Result<(), String> {
        let faults = Faults::default();
        self.sim.set_faults(faults);
        let (size, expected) = (self.node.geometry().size as usize, self.size * SECTOR);
        if size != expected {
            return Err(format!("the driver finds {size} bytes, not {expected}"));
        }
        let mut found = Vec::new();
        while found.len() < size {
            let len = (size - found.len()).min(1 << 20);
            let read = self.rig.read(found.len() as u64, len, 0);
            found.extend(read.map_err(|errno| format!("reading all: {errno}"))?);
        }
        self.disk.check_read(0, &found).map_err(|error| format!("opened again: {error}"))?;
        let stable = contents(self.kind, self.start, &self.sim.durable(&self.fd).unwrap())?;
        self.disk.check_cut(&stable).map_err(|error| format!("opened again, and cut: {error}"))
    }

    /// Makes requests, sometimes with a cut or kill that leaves this life running.
    fn go_on(&mut self) -> Result<(), String> {
        let largest = self.kind.cluster.max(4096) / SECTOR;
        let habits = Habits {
            depth: [1, 2, 8, 24][self.random.usize(..4)],
            requests: match self.recoveries {
                Some(_) => 20 + self.random.usize(..100),
                None => 4 + self.random.usize(..12),
            },
            write_through: self.random.usize(..4) == 0,
            writes: 30 + self.random.usize(..40),
            frees: self.random.usize(..50),
            longest: [1, largest, 4 * largest, 24 * largest][self.random.usize(..4)],
        };
        let resizes = self.random.usize(..3) == 0;
        let every = 1 + self.random.usize(..8);
        while self.seen.requests < habits.requests {
            if resizes
                && self.resizing.is_none()
                && self.changing.is_none()
                && self.random.usize(..20) == 0
            {
                self.resize()?;
            }
            let smaller = self.resizing.as_ref().is_some_and(|(size, _)| *size < self.size);
            while !smaller
                && self.changing.is_none()
                && self.asked.len() < habits.depth
                && self.random.usize(..4) > 0
            {
                self.ask(&habits);
            }
            self.turn()?;
            self.take_bits();
            self.change_snapshots();
            if self.random.usize(..every) == 0 {
                let left = self.end_now()?;
                self.recover(left)?;
            }
        }
        Ok(())
    }

    /// Sometimes begins a bitmap anew while no request is in flight.
    fn take_bits(&mut self) {
        let is_idle = self.asked.is_empty() && self.resizing.is_none() && self.changing.is_none();
        let Some(tracking) = self.tracking.clone().filter(|_| is_idle) else { return };
        if self.takes.usize(..4) > 0 {
            return;
        }
        if let Ok(contents) = self.rig.read(0, self.size * SECTOR, 0) {
            self.disk.bitmaps.take(&tracking, &contents, &mut self.takes);
        }
    }

    /// Sometimes begins to make or delete a snapshot while no request is in flight.
    fn change_snapshots(&mut self) {
        let is_idle = self.asked.is_empty() && self.resizing.is_none() && self.changing.is_none();
        if !self.extras.snapshots || !is_idle || self.snapshots.usize(..5) > 0 {
            return;
        }
        if let Ok(contents) = self.rig.read(0, self.size * SECTOR, 0) {
            let (at, event_loop) = (self.disk.now(), self.rig.event_loop.clone());
            let Life { disk, node, snapshots, .. } = self;
            let begun = disk.snapshots.begin(node, &event_loop, &contents, snapshots);
            self.changing = begun.map(|changing| (at, changing));
        }
    }

    /// Whether a change of the snapshots has ended.
    fn look_at_change(&mut self) -> bool {
        let Some((at, mut changing)) = self.changing.take() else { return false };
        // As for a resize.
        self.sim.storage().unstable_sectors(&self.fd);
        match changing.is_over(&mut self.disk.snapshots) {
            None => {
                self.changing = Some((at, changing));
                return false;
            }
            Some(true) => {
                self.seen.snapshots += 1;
                // The change has flushed all that was written before it.
                self.disk.flushed(at);
            }
            Some(false) => {}
        }
        true
    }

    fn ask(&mut self, habits: &Habits) {
        self.seen.requests += 1;
        let size = self.size;
        let longest = if self.random.usize(..12) == 0 { size } else { habits.longest };
        let first = self.random.usize(..size);
        let mut range = first..size.min(first + 1 + self.random.usize(..longest));
        if self.random.usize(..3) == 0 {
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
                // Sometimes zeroes, which may be detected.
                self.stamp += 1;
                let stamp = if self.random.usize(..6) == 0 { 0 } else { self.stamp };
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
        if let Some(Change::Written(_) | Change::Zeroed) = change {
            self.disk.bitmaps.written(&range);
        }
        if let Some(change) = change {
            self.disk.begin(range.clone(), change);
        }
        let (tag, range) = match op {
            Op::Flush => (self.rig.submit(op, 0, 0, bufs), 0..0),
            _ => (self.rig.submit(op, offset, len, bufs), range),
        };
        self.asked.insert(tag, Asked { op, range, at });
    }

    /// Starts a resize. If the disk shrinks, no request is in flight meanwhile.
    fn resize(&mut self) -> Result<(), String> {
        let size = 1 + self.random.usize(..2 * self.kind.size / SECTOR);
        if size < self.size {
            while !self.asked.is_empty() {
                self.turn()?;
            }
        }
        if trace() {
            println!("resize to {size} sectors");
        }
        self.disk.begin_resize(size);
        // As the daemon has it: bitmaps are larger before the disk is.
        if size > self.size {
            self.resize_bitmaps(size);
        }
        let (done, result) = oneshot::channel();
        let event_loop = self.rig.event_loop.clone();
        let resized = self.node.clone().resize((size * SECTOR) as u64, &event_loop);
        event_loop.spawn(async move { done.send(resized.await) });
        self.resizing = Some((size, result));
        Ok(())
    }

    /// Whether a resize has ended, with success or failure.
    fn look_at_resize(&mut self) -> bool {
        let Some((size, mut result)) = self.resizing.take() else { return false };
        // Lets the storage record writes that did not pass the ring.
        self.sim.storage().unstable_sectors(&self.fd);
        match Pin::new(&mut result).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => {
                self.resizing = Some((size, result));
                return false;
            }
            Poll::Ready(Ok(Ok(()))) => {
                (self.size, self.is_resized) = (size, true);
                self.disk.resized(self.kind.is_qcow2());
            }
            Poll::Ready(_) => self.disk.resize_failed(),
        }
        self.resize_bitmaps(self.node.geometry().size as usize / SECTOR);
        self.disk.bitmaps.resized(self.node.geometry().size as usize / SECTOR);
        true
    }

    fn resize_bitmaps(&self, size: usize) {
        let tracking = self.tracking.iter();
        tracking.for_each(|tracking| tracking.resize_bitmaps((size * SECTOR) as u64));
    }

    fn pick(&mut self, habits: &Habits) -> Op {
        let fua = habits.write_through || self.random.usize(..8) == 0;
        match self.random.usize(..100) {
            n if n < habits.writes => Op::Write { fua },
            n if n < habits.writes + habits.frees / 2 => Op::Discard,
            n if n < habits.writes + habits.frees => {
                let may_unmap = self.random.usize(..2) == 0;
                Op::WriteZeroes { may_unmap, no_fallback: false, fua }
            }
            n if n < 92 => Op::Flush,
            _ => Op::Read,
        }
    }

    /// Turns the loop, and processes the answers.
    fn turn(&mut self) -> Result<(), String> {
        let mut turns = 0;
        while !self.asked.is_empty() || self.resizing.is_some() || self.changing.is_some() {
            // No other event would wake the loop.
            let waits = self.sim.in_flight() > 0;
            self.rig.event_loop.run_once(waits).unwrap();
            turns += 1;
            if waits || self.rig.has_answers() || self.look_at_resize() || self.look_at_change() {
                break;
            }
            if turns > 100 {
                let waiting: Vec<_> = self.asked.values().map(|a| (a.op, &a.range)).collect();
                return Err(format!("nothing is under way, but not answered: {waiting:?}"));
            }
        }
        self.look_at_resize();
        self.look_at_change();
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

    /// Ends the life now, by a power cut or a kill, and checks the remains.
    fn end_now(&mut self) -> Result<Left, String> {
        let is_cut = self.random.usize(..2) == 0;
        let seed = self.random.u64(..);
        let mut image = match is_cut {
            true => self.sim.cut(&self.fd, seed).unwrap(),
            false => self.sim.killed(&self.fd, seed).unwrap(),
        };
        self.disk.snapshots.unmark(&mut image);
        if trace() {
            println!("{} here", if is_cut { "cut" } else { "killed" });
        }
        let Life { kind, start, disk, journals, .. } = self;
        let journals = journals.as_deref();
        let (what, left) = match is_cut {
            true => ("cut", Left::by_cut(kind, start, &image, disk, journals)),
            false => {
                let journals = journals.map(Folder::left);
                ("kill", Left::by_kill(kind, start, &image, disk, journals))
            }
        };
        self.seen.while_snapshot += usize::from(self.changing.is_some());
        self.seen.cuts += usize::from(is_cut);
        self.seen.kills += usize::from(!is_cut);
        let left = left.map_err(|mut error| {
            let Seen { cuts, kills, .. } = self.seen;
            let _ = write!(error, " ({what}, the {}.)", cuts + kills);
            keep(&image);
            error
        })?;
        self.seen.replayed += usize::from(left.replayed);
        self.seen.right += left.right;
        self.seen.kept += left.kept;
        self.seen.kept_resized += left.kept * usize::from(self.is_resized);
        self.seen.compressed += left.compressed;
        Ok(Left { image, ..left })
    }

    /// Data that a power cut may still lose after the process has ended. The next process does not learn of a failed
    /// flush.
    fn unflushed(&self) -> Option<(Unflushed, Disk)> {
        let storage = (!self.may_fail).then(|| self.sim.storage())?;
        Some((storage.unflushed(&self.fd)?, self.disk.clone()))
    }

    /// Ends the life for the next one.
    fn leave(&mut self) -> Result<Left, String> {
        let mut left = self.end_now()?;
        if left.is_killed && !left.replayed {
            left.unflushed = self.unflushed();
        }
        Ok(left)
    }

    /// Sometimes interrupts a recovery of the remains, and continues with the result.
    fn recover(&mut self, mut left: Left) -> Result<(), String> {
        let Some(random) = &mut self.recoveries else { return Ok(()) };
        let [replayed, other] = INTERRUPTED;
        let every = if left.replayed { replayed } else { other };
        if !is_marked(&left.image) || random.usize(..every) > 0 {
            return Ok(());
        }
        let mut random = Rng::with_seed(random.u64(..));
        if left.is_killed {
            left.unflushed = self.unflushed();
        }
        let (kind, start) = (self.kind, self.start);
        let extras = self.extras();
        let left = interrupted(kind, start, left, &mut random, &mut self.seen, extras.bitmaps)?;
        let (mut stamp, mut seen) = (self.stamp, Seen::default());
        let life = Life::begin(kind, start, extras, random.u64(..), None, left);
        let lived = life.live(&mut stamp, &mut seen);
        lived.map_err(|error| format!("after a recovery that was interrupted, {error}"))?;
        // Requests of interrupted recoveries do not count.
        self.seen.add(Seen { requests: 0, ..seen });
        Ok(())
    }

    /// Hands the image over to another process, as in an upgrade, until that one ends. This process then continues.
    fn hand_over(&mut self) -> Result<(), String> {
        let is_first = self.recoveries.is_some();
        if !is_first || self.may_fail || self.journals.is_none() || !self.kind.is_qcow2() {
            return Ok(());
        }
        self.answer_all()?;
        // Writes released clusters, which are all that a handover would write.
        let tag = self.rig.submit(Op::Flush, 0, 0, IoBufs::new());
        self.asked.insert(tag, Asked { op: Op::Flush, range: 0..0, at: self.disk.now() });
        self.answer_all()?;
        let (depth, longest) = (8, self.kind.cluster.max(4096) / SECTOR);
        let writes =
            Habits { depth, requests: depth, write_through: false, writes: 100, frees: 0, longest };
        (0..1 + self.random.usize(..depth)).for_each(|_| self.ask(&writes));
        self.answer_all()?;
        let before = std::fs::read(path_of(&self.fd)).unwrap();
        // The next process closes the image.
        self.is_released = true;
        // Through the registry, as in the daemon: `node` is an edge, which cannot do this.
        let (event_loop, released) =
            (self.rig.event_loop.clone(), self.registry.release_for_handover());
        let released = event_loop.block_on(released).unwrap();
        released.map_err(|(name, error)| format!("let go of {name}: {error}"))?;
        let seed = self.random.u64(..);
        let image = self.sim.killed(&self.fd, seed).unwrap();
        // An unchanged image, or one with changes that no ring has seen: clusters released since the flush.
        if !is_marked(&image) || image != before {
            return Ok(());
        }
        let (kind, start) = (self.kind, self.start);
        let journals = self.journals.as_deref().map(Folder::left);
        let left = Left::by_kill(kind, start, &image, &self.disk, journals)
            .inspect_err(|_| keep(&image))
            .map_err(|error| format!("{error} (let go)"))?;
        self.seen.handed_over += usize::from(left.replayed);
        if left.right > 0 {
            return Err("a bitmap claims to be right while it is handed over".to_owned());
        }
        let unflushed = self.unflushed();
        let bitmaps = self.disk.bitmaps.clone();
        let handed_over = self.tracking.as_deref().map_or_else(Vec::new, HandedOver::all);
        let left = Left { image, is_handed_over: true, unflushed, bitmaps, handed_over, ..left };
        let (mut stamp, mut seen) = (self.stamp, Seen::default());
        let life = Life::begin(kind, start, self.extras(), seed, None, left);
        let lived = life.live(&mut stamp, &mut seen);
        lived.map_err(|error| format!("handed over, {error}"))?;
        let kept_on = seen.kept;
        self.seen.add(Seen { requests: 0, kept_on, ..seen });
        // As if the other process had refused: this one goes on.
        self.registry.retake_images();
        let image = self.sim.killed(&self.fd, seed).unwrap();
        let journals = self.journals.as_deref().map(Folder::left);
        let left = Left::by_kill(kind, start, &image, &self.disk, journals)
            .map_err(|error| format!("{error} (refused)"))?;
        match left.right {
            right if right == self.disk.bitmaps.expected() => Ok(()),
            right => Err(format!("{right} bitmaps are right after a refusal")),
        }
    }

    fn answer_all(&mut self) -> Result<(), String> {
        while !self.asked.is_empty() || self.resizing.is_some() || self.changing.is_some() {
            self.turn()?;
        }
        Ok(())
    }

    /// Answers the other requests normally: every request has to be answered.
    fn end(mut self) -> Result<(), String> {
        self.sim.set_faults(Faults::default());
        if let Err(error) = self.answer_all() {
            // Its memory must not be freed.
            std::mem::forget(self);
            return Err(error);
        }
        let Life { rig, node, registry, .. } = self;
        let event_loop = rig.event_loop.clone();
        drop(rig);
        event_loop.shut_down().unwrap();
        drop((node, registry));
        Ok(())
    }

    /// The same, and looks at what closing the image leaves: after a power cut or a kill meanwhile, or afterwards.
    fn close(mut self, random: &mut Rng, seen: &mut Seen) -> Result<Option<Left>, String> {
        if !self.kind.is_qcow2() || self.is_released {
            return self.end().map(|()| None);
        }
        self.sim.set_faults(Faults::default());
        if let Err(error) = self.answer_all() {
            std::mem::forget(self);
            return Err(error);
        }
        let (kind, start, may_fail) = (self.kind, self.start, self.may_fail);
        let (mut disk, journals) = (self.disk.clone(), self.journals.clone());
        let (moments, sim, fd) = (self.moments.clone(), self.sim.clone(), self.fd.clone());
        moments.begin();
        self.end()?;
        let ended = moments.end();
        let mut image = sim.cut(&fd, random.u64(..)).unwrap();
        disk.snapshots.unmark(&mut image);
        let before = disk.clone();
        if !may_fail {
            // Closing an image flushes it.
            let now = disk.now();
            disk.flushed(now);
        }
        let closed = Left::by_cut(kind, start, &image, &disk, journals.as_deref());
        let closed = closed.and_then(|left| {
            // After a failed operation, bitmaps may not get there.
            if !may_fail {
                let expected = disk.bitmaps.expected();
                if left.right != expected {
                    return Err(format!("{} bitmaps are right, not {expected}", left.right));
                }
            }
            Ok(Left { image: image.clone(), ..left })
        });
        let closed = closed.inspect_err(|_| keep(&image));
        let closed = closed.map_err(|error| format!("{error} (closed)"))?;
        seen.right += closed.right;
        let Some(Ended { mut image, journals: kept, unflushed }) = ended else {
            return Ok(Some(closed));
        };
        before.snapshots.unmark(&mut image);
        seen.closings += 1;
        let left = match unflushed {
            Some(_) => Left::by_kill(kind, start, &image, &before, kept),
            None => Left::by_cut(kind, start, &image, &before, journals.as_deref()),
        };
        let what = if unflushed.is_some() { "killed" } else { "cut" };
        let left = left.inspect_err(|_| keep(&image));
        let left = left.map_err(|error| format!("{error} ({what} while it was closed)"))?;
        (seen.right, seen.kept) = (seen.right + left.right, seen.kept + left.kept);
        if random.usize(..3) == 0 {
            return Ok(Some(closed));
        }
        // The next process does not learn of a failed flush, and recovering a journal flushes.
        let unflushed = unflushed.filter(|_| !may_fail && !left.replayed);
        let unflushed = unflushed.map(|unflushed| (unflushed, before));
        Ok(Some(Left { image, unflushed, ..left }))
    }
}
