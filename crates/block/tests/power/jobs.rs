//! Jobs over images with subclusters: the power is cut, or the process killed, while a part is being copied and the
//! guest writes. What the guest reads stays, the copy stays a consistent image, and at the end it is the disk.

use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use block::NodeRegistry;
use block::graph::Edge;
use block::job::{
    Backup, Bitmap, Control, CopiesTo, Mirror, MirrorTop, OnCbwError, OnError, Report, Turns,
    Worker, WorkerConfig,
};
use block::node::BlockNode;
use block::options::*;
use block::request::Op;
use event_loop::ring::sim::{Faults, Sim};
use event_loop::{IoBufs, LoopConfig, mailbox, oneshot};
use fastrand::Rng;

use crate::common::{Rig, blockdev, file_options, filled};
use crate::power::course::NO_POLLING;
use crate::power::guest::{Change, Disk, SECTOR, Stamp, sector};
use crate::power::kinds::{Extras, Kind};
use crate::power::oracle::Image;
use crate::power::{number, path_of, qemu_img_check};

/// Courses of CI's short run.
const SEEDS: u64 = 40;
/// Courses between two whose images `qemu-img` sees.
const JUDGED: u64 = 10;
/// Lives of an image at most. In the last one, the job ends.
const LIVES: usize = 3;
/// The depth of the image behind the topmost one.
const BASE: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Job {
    Backup,
    Mirror { blocking: bool },
    Stream,
    Commit,
    CommitActive,
}

impl Job {
    fn pick(random: &mut Rng) -> Job {
        match random.usize(..6) {
            0 => Job::Backup,
            1 => Job::Mirror { blocking: false },
            2 => Job::Mirror { blocking: true },
            3 => Job::Stream,
            4 => Job::Commit,
            _ => Job::CommitActive,
        }
    }

    /// Whether one image lies over the other. Else one is copied to the other.
    fn is_of_chain(self) -> bool {
        match self {
            Job::Backup | Job::Mirror { .. } => false,
            Job::Stream | Job::Commit | Job::CommitActive => true,
        }
    }

    /// Whether the guest writes meanwhile.
    fn admits_writes(self) -> bool {
        self != Job::Commit
    }
}

/// The images, and what the guest has written: `base` is the source of a copy and `top` its target, or `top` lies over
/// `base`.
struct World {
    job: Job,
    random: Rng,
    sim: Sim,
    base: Arc<OwnedFd>,
    top: Arc<OwnedFd>,
    disk: Disk,
    size: usize,
    stamp: Stamp,
}

/// A job that runs.
struct Running {
    control: Arc<Control>,
    reports: mailbox::Receiver<Report>,
    ended: oneshot::Receiver<()>,
}

fn read(image: &[u8], behind: &[u8]) -> Result<Vec<u8>, String> {
    Image::read(image, behind)
}

impl World {
    fn options(&mut self, name: &str, fd: &OwnedFd, backing: Backing) -> BlockdevOptions {
        let file = FileOptions { locking: Locking::Off, ..file_options(&path_of(fd), None) };
        let discard = Discard::Unmap;
        let file = blockdev(&format!("{name}-file"), Driver::file(file));
        let file = BlockdevRef::Inline(Box::new(BlockdevOptions { discard, ..file }));
        let driver = Driver::from(Qcow2Options {
            file,
            backing,
            discard_no_unref: self.random.usize(..4) == 0,
            ..Qcow2Options::default()
        });
        BlockdevOptions { discard, ..blockdev(name, driver) }
    }

    /// Checks what a power cut or a kill would leave now. Returns the images.
    fn check(&mut self) -> Result<[Vec<u8>; 2], String> {
        let is_cut = self.random.usize(..2) == 0;
        let left = [&self.base, &self.top].map(|fd| {
            let seed = self.random.u64(..);
            let left = if is_cut { self.sim.cut(fd, seed) } else { self.sim.killed(fd, seed) };
            left.expect("the simulation's file")
        });
        let [base, top] = &left;
        let below = read(base, &[]).map_err(|error| format!("base: {error}"))?;
        let behind = if self.job.is_of_chain() { &below[..] } else { &[] };
        let above = read(top, behind).map_err(|error| format!("top: {error}"))?;
        let disk = if self.job.is_of_chain() { &above } else { &below };
        self.disk.check_cut(disk).map_err(|error| format!("cut: {is_cut}: {error}"))?;
        Ok(left)
    }

    /// One request of the guest. `looks`: with power cuts meanwhile.
    fn step(&mut self, rig: &mut Rig, looks: bool) -> Result<(), String> {
        self.stamp += 1;
        let sectors = self.size / SECTOR;
        let first = self.random.usize(..sectors);
        let longest = [1, 8, 32, 100][self.random.usize(..4)];
        let range = first..(first + 1 + self.random.usize(..longest)).min(sectors);
        let fua = self.random.usize(..8) == 0;
        let (op, change) = match self.random.usize(..9) {
            0 => (Op::Flush, None),
            1 => (Op::Discard, Some(Change::Discarded)),
            2 | 3 => {
                let may_unmap = self.random.usize(..2) == 0;
                (Op::WriteZeroes { may_unmap, no_fallback: false, fua }, Some(Change::Zeroed))
            }
            _ => (Op::Write { fua }, Some(Change::Written(self.stamp))),
        };
        let bufs = match change {
            Some(Change::Written(stamp)) => {
                let sectors = range.clone().flat_map(|number| sector(stamp, number as u64));
                filled(&sectors.collect::<Vec<u8>>(), 0)
            }
            _ => IoBufs::new(),
        };
        let at = self.disk.now();
        let (offset, len) = match change {
            Some(change) => {
                self.disk.begin(range.clone(), change);
                ((range.start * SECTOR) as u64, (range.len() * SECTOR) as u64)
            }
            None => (0, 0),
        };
        let tag = rig.submit(op, offset, len, bufs);
        self.turn_until(rig, looks, |rig| rig.answer(tag).map(|(result, _)| result))?
            .map_err(|errno| format!("{op:?} of {range:?}: {errno}"))?;
        match change {
            Some(_) => self.disk.answered(range, fua && op != Op::Discard),
            None => self.disk.flushed(at),
        }
        Ok(())
    }

    fn flush(&mut self, rig: &mut Rig) -> Result<(), String> {
        let at = self.disk.now();
        rig.op(Op::Flush, 0, 0).map_err(|errno| format!("flush: {errno}"))?;
        self.disk.flushed(at);
        Ok(())
    }

    /// Turns the loop until there is something.
    fn turn_until<T>(
        &mut self,
        rig: &mut Rig,
        looks: bool,
        mut found: impl FnMut(&mut Rig) -> Option<T>,
    ) -> Result<T, String> {
        loop {
            if let Some(found) = found(rig) {
                return Ok(found);
            }
            rig.event_loop.run_once(true).map_err(|error| error.to_string())?;
            if looks && self.random.usize(..3) == 0 {
                self.check()?;
            }
        }
    }

    /// What the guest reads.
    fn contents(&self, rig: &mut Rig) -> Result<Vec<u8>, String> {
        let found = rig.read(0, self.size, 0).map_err(|errno| format!("read: {errno}"))?;
        self.disk.check_read(0, &found)?;
        Ok(found)
    }
}

/// Begins a job. Returns it with the node that the guest writes to.
fn begin(
    job: Job,
    size: u64,
    nodes: [&Arc<dyn BlockNode>; 2],
    random: &mut Rng,
    rig: &Rig,
) -> (Running, Arc<dyn BlockNode>) {
    let [base, top] = nodes;
    let cluster = [4096, 16 << 10, 64 << 10][random.usize(..3)];
    let (source, target) = match job {
        Job::Backup | Job::Mirror { .. } => (base, top),
        Job::Stream => (top, top),
        Job::Commit | Job::CommitActive => (top, base),
    };
    let edge = |node: &Arc<dyn BlockNode>| Edge::new(node.clone());
    let (sender, reports) = mailbox::channel();
    let control = Arc::new(Control::new(0));
    let config = WorkerConfig {
        source: edge(source),
        target: edge(target),
        control: control.clone(),
        reports: sender,
        on_source_error: OnError::Report,
        on_target_error: OnError::Report,
        // Few copies at once: there is a middle.
        buf_size: 1 << 20,
    };
    let mut worker = Worker::new(config, &rig.event_loop).expect("a worker");
    let (done, ended) = oneshot::channel();
    let dirty = |set| Arc::new(Bitmap::new(size, cluster, set));
    let mut users: Arc<dyn BlockNode> = source.clone();
    match job {
        Job::Backup | Job::Stream | Job::Commit => {
            let backup = match job {
                Job::Backup => Backup::new(size, cluster, OnCbwError::BreakGuestWrite),
                Job::Stream => Backup::stream(size, cluster, u32::MAX),
                Job::Commit | Job::CommitActive | Job::Mirror { .. } => {
                    Backup::commit(size, cluster, BASE)
                }
            };
            let backup = backup.with_max_chunk(cluster);
            if job != Job::Commit {
                users = Arc::new(backup.filter("filter".into(), edge(source), edge(target)));
            }
            rig.event_loop.spawn(async move {
                backup.run(&mut worker, false).await;
                drop(worker);
                done.send(());
            });
        }
        Job::Mirror { blocking } => {
            let (dirty, turns) = (dirty(true), Arc::new(Turns::default()));
            if blocking {
                turns.set_blocking();
            }
            let top = MirrorTop::new("filter".into(), edge(source), dirty.clone());
            let turns_too = turns.clone();
            let to = CopiesTo { target: edge(target), turns: turns_too, whole: false, zero: None };
            users = Arc::new(top.copying_to(to));
            rig.event_loop.spawn(async move {
                let mut mirror = Mirror::new(worker, dirty, turns);
                mirror.run().await;
                assert!(mirror.finish().await.is_ok());
                done.send(());
            });
        }
        Job::CommitActive => {
            let dirty = dirty(false);
            users = Arc::new(MirrorTop::new("filter".into(), edge(source), dirty.clone()));
            rig.event_loop.spawn(async move {
                let mut mirror = Mirror::new(worker, dirty, Arc::default());
                mirror.find(BASE).await;
                mirror.run().await;
                assert!(mirror.finish().await.is_ok());
                done.send(());
            });
        }
    }
    (Running { control, reports, ended }, users)
}

/// A life of the images. Returns what is left, and whether the job has ended.
fn live(world: &mut World, number: usize) -> Result<([Vec<u8>; 2], bool), String> {
    let config = LoopConfig { poll: NO_POLLING, ..LoopConfig::default() };
    let event_loop = world.sim.event_loop(config).expect("a loop");
    let mut registry = NodeRegistry::new();
    let open = |error: block::OpenError| error.to_string();
    let options = world.options("base", &world.base.clone(), Backing::None);
    let base = registry.open(&options).map_err(open)?;
    let mut rig = Rig::on(event_loop.clone(), base.clone());
    // What an overlay has already hides what is behind it.
    if number == 0 || !world.job.is_of_chain() {
        for _ in 0..world.random.usize(..20) {
            world.step(&mut rig, false)?;
        }
        world.flush(&mut rig)?;
    }
    let backing = match world.job.is_of_chain() {
        true => Backing::Node(BlockdevRef::Name("base".into())),
        false => Backing::None,
    };
    let options = world.options("top", &world.top.clone(), backing);
    let top = registry.open(&options).map_err(open)?;
    if world.job.is_of_chain() {
        rig = Rig::on(event_loop.clone(), top.clone());
        for _ in 0..world.random.usize(..20) {
            world.step(&mut rig, false)?;
        }
        world.flush(&mut rig)?;
    }
    let before = world.contents(&mut rig)?;

    let nodes = [&base, &top];
    let (mut running, users) = begin(world.job, world.size as u64, nodes, &mut world.random, &rig);
    rig = Rig::on(event_loop.clone(), users);
    let ends_early = number + 1 < LIVES && world.random.usize(..2) == 0;
    let steps = if world.job.admits_writes() { world.random.usize(..16) } else { 0 };
    for _ in 0..steps {
        world.step(&mut rig, true)?;
    }
    if ends_early {
        // In the middle of the job, or after it.
        for _ in 0..world.random.usize(..60) {
            if world.sim.in_flight() > 0 {
                rig.event_loop.run_once(true).map_err(|error| error.to_string())?;
            }
        }
        return Ok((world.check()?, false));
    }
    if let Job::Mirror { .. } | Job::CommitActive = world.job {
        let mut is_ready = || {
            let report = pin!(running.reports.receive());
            match report.poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(report) => Some(report),
                Poll::Pending => None,
            }
        };
        let report = world.turn_until(&mut rig, true, |_| is_ready())?;
        if !matches!(report, Some(Report::Ready)) {
            return Err("the mirror does not become ready".into());
        }
        for _ in 0..world.random.usize(..6) {
            world.step(&mut rig, true)?;
        }
        running.control.complete();
    }
    let ended = &mut running.ended;
    world.turn_until(&mut rig, true, |_| {
        let ended = Pin::new(&mut *ended);
        let polled = ended.poll(&mut Context::from_waker(Waker::noop()));
        polled.is_ready().then_some(())
    })?;
    world.flush(&mut rig)?;
    let after = world.contents(&mut rig)?;
    let left = world.check()?;
    let [base, top] = &left;
    let (copy, expected) = match world.job {
        Job::Backup => (read(top, &[])?, before),
        Job::Mirror { .. } | Job::Stream => (read(top, &[])?, after),
        Job::Commit | Job::CommitActive => (read(base, &[])?, after),
    };
    match (0..).zip(copy.chunks(SECTOR).zip(expected.chunks(SECTOR))).find(|(_, (a, b))| a != b) {
        Some((number, _)) => Err(format!("sector {number} of the copy differs")),
        None if copy.len() == expected.len() => Ok((left, true)),
        None => Err("the copy has another size".into()),
    }
}

fn course(seed: u64) -> Result<Job, String> {
    let mut random = Rng::with_seed(seed);
    let job = Job::pick(&mut random);
    let kind = Kind::named("qcow2, subclusters");
    let extras = Extras { luks: false, bitmaps: false, compressed: false, snapshots: false };
    let image = &kind.start(extras).image;
    let mut images = [image.clone(), image.clone()];
    let (mut contents, mut stamp) = (vec![0; kind.size], 1 << 20);
    for number in 0..LIVES {
        let faults = Faults { latency_ns: (1_000, 20_000), ..Faults::default() };
        let sim = Sim::new(random.u64(..), faults);
        if !job.is_of_chain() {
            images[1].clone_from(image);
        }
        let [base, top] = images.each_ref().map(|image| sim.file(image).expect("a file"));
        let disk = Disk::new(&contents, false);
        let random = Rng::with_seed(random.u64(..));
        let size = kind.size;
        let mut world = World { job, random, sim, base, top, disk, size, stamp };
        let lived = live(&mut world, number);
        let (left, ended) = lived.map_err(|error| format!("{job:?}, life {number}: {error}"))?;
        stamp = world.stamp;
        images = left;
        if seed.is_multiple_of(JUDGED) {
            images.iter().for_each(|image| qemu_img_check(kind, image, false));
        }
        if ended {
            return Ok(job);
        }
        let below = read(&images[0], &[])?;
        contents = if job.is_of_chain() { read(&images[1], &below)? } else { below };
    }
    Err("the last life has not ended the job".into())
}

#[test]
fn jobs_over_subclusters_keep_the_disk() {
    let seeds = match number("RINGMILL_POWER_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("RINGMILL_POWER_SEEDS").unwrap_or(SEEDS),
    };
    for seed in seeds {
        if let Err(error) = course(seed) {
            panic!("RINGMILL_POWER_SEED={seed}: {error}");
        }
    }
}
