//! Opening the remains of an image, with interruptions by a power cut or a kill.
//!
//! An image is opened on separate, real loops. So its node below has channels with a simulated ring each
//! there. A power cut or a kill is possible at each moment between two completions of such a ring, and
//! the remains at one of these moments are stored. The opening continues normally. The stored remains are
//! checked, and opened next.
//!
//! An image is closed in the same way, with the same interruptions.

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use block::node::{BlockNode, Channel, Geometry};
use block::options::BlockdevOptions;
use block::request::{Op, Request};
use block::track::Tracking;
use block::{JobFilter, NodeRegistry};
use event_loop::ring::sim::{Faults, Sim, Storage, Unflushed, elsewhere};
use event_loop::sync::lock;
use event_loop::{EventLoop, LoopConfig};
use fastrand::Rng;

use crate::power::bitmaps::HandedOver;
use crate::power::course::{NO_POLLING, Seen};
use crate::power::journal::Folder;
use crate::power::kinds::{FILE, Kind, Start, add_secret};
use crate::power::left::{Left, keep, read};
use crate::power::path_of;

/// The opened image, and the simulation for its user.
pub(crate) struct Reopened {
    pub(crate) sim: Sim,
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) options: BlockdevOptions,
    pub(crate) node: Arc<dyn BlockNode>,
    /// The nodes. `node` is an edge to one of them.
    pub(crate) registry: NodeRegistry,
    /// The image gets bitmaps.
    pub(crate) tracking: Option<Arc<Tracking>>,
    /// Those of closing the image.
    pub(crate) moments: Arc<Moments>,
    /// The remains of an interruption at a chosen moment.
    ended: Option<Ended>,
}

/// The part of a life that is interrupted, at a random moment.
pub(crate) enum Interrupt {
    /// The storage records the opening.
    Opening(Rng),
    /// Writes of the opening are found afterwards.
    Closing(Rng),
}

impl Reopened {
    pub(crate) fn new(
        kind: &Kind,
        start: &Start,
        left: &Left,
        random: &mut Rng,
        interrupt: Interrupt,
        bitmaps: bool,
    ) -> Reopened {
        let sim = Sim::new(random.u64(..), Faults::default());
        let (storage, fd) = (sim.storage(), sim.file(&left.image).unwrap());
        if let Some((unflushed, _)) = &left.unflushed {
            storage.replace(&fd, unflushed).unwrap();
        }
        let [file, disk] = kind.options(start, &fd, random);
        let journals = left.journals.clone();
        let registry = match left.is_handed_over {
            true => Folder::registry_with_journals,
            false => Folder::registry,
        };
        let mut registry = journals.as_deref().map_or_else(NodeRegistry::new, registry);
        let file = registry.open(&file).unwrap();
        let (random, records) = match interrupt {
            Interrupt::Opening(random) => (random, true),
            Interrupt::Closing(random) => (random, false),
        };
        let state = Mutex::new(RecoveryState { random, changes: false, passed: 0, ended: None });
        let moments = Moments {
            storage: storage.clone(),
            fd: fd.clone(),
            journals,
            state,
            over: AtomicBool::new(!records),
        };
        let moments = Arc::new(moments);
        let watched = Watched { file, moments: moments.clone() };
        let (node, driver, role, target) = (Arc::new(watched), "watched", "file", None);
        registry.add_filter(FILE, JobFilter { node, driver, role, target });
        add_secret(&mut registry);
        let node = registry.open(&disk).unwrap_or_else(|error| {
            panic!("what was left cannot be opened: {error:?}");
        });
        let (mut registry, tracking) = match bitmaps {
            true => tracked(registry),
            false => (registry, None),
        };
        if let Some(tracking) = tracking.as_ref().filter(|_| left.is_handed_over) {
            let image = registry.node("disk").unwrap();
            let (store, size) = (image.bitmap_store().unwrap(), image.geometry().size);
            HandedOver::take(&left.handed_over, tracking, &*store, size);
        }
        registry.own_images();
        let ended = moments.end();
        let is_changed = || std::fs::read(path_of(&fd)).unwrap() != left.image;
        assert!(
            !left.is_handed_over || !is_changed(),
            "who goes on with an image writes nothing yet"
        );
        // Writes that the ring has not seen.
        if !records {
            let opened = std::fs::read(path_of(&fd)).unwrap();
            // Opening an image with bitmaps flushes it, on a loop that the model does not see.
            let has_bitmaps = || !read(kind, start, &left.image).unwrap().bitmaps.is_empty();
            let is_flushed = bitmaps && !left.is_handed_over && has_bitmaps();
            if left.unflushed.is_some() && !is_flushed {
                storage.look(&fd);
            } else if is_flushed || opened != left.image {
                storage.restore(&fd, opened).unwrap();
            }
        }
        Reopened { sim, fd, options: disk, node, registry, tracking, moments, ended }
    }
}

/// Has the writes of the image watched.
fn tracked(mut registry: NodeRegistry) -> (NodeRegistry, Option<Arc<Tracking>>) {
    // On a loop that does nothing else.
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let tracked = event_loop.block_on(async move {
        let tracking = registry.track("disk").await.unwrap();
        (registry, Some(tracking))
    });
    tracked.unwrap()
}

/// Interrupts the opening of the remains a few times. Returns the last remains.
pub(crate) fn interrupted(
    kind: &Kind,
    start: &Start,
    mut left: Left,
    random: &mut Rng,
    seen: &mut Seen,
    bitmaps: bool,
) -> Result<Left, String> {
    // A power cut loses a journal, and there is no new one before the image is open.
    let mut is_lost = !left.is_killed;
    for number in 1..=1 + random.usize(..3) {
        let moments = Interrupt::Opening(Rng::with_seed(random.u64(..)));
        let Reopened { ended, node, .. } =
            Reopened::new(kind, start, &left, random, moments, bitmaps);
        drop(node);
        // Nothing had to be recovered.
        let Some(Ended { image, journals, unflushed }) = ended else { break };
        let (disk, is_killed) = (left.disk(), unflushed.is_some());
        is_lost |= !is_killed;
        let judged = match is_killed {
            true if is_lost => Left::by_kill(kind, start, &image, &disk, None)
                .map(|left| Left { journals: journals.map(Arc::new), ..left }),
            true => Left::by_kill(kind, start, &image, &disk, journals),
            false => Left::by_cut(kind, start, &image, &disk, left.journals.as_deref()),
        };
        let judged = judged.map_err(|error| {
            keep(&image);
            let what = if is_killed { "killed" } else { "cut" };
            format!("{error} ({what} while it was recovered, for the {number}. time)")
        })?;
        seen.interrupted += 1;
        let replayed = judged.replayed || is_killed && left.replayed;
        let unflushed = unflushed.map(|unflushed| (unflushed, disk));
        left = Left { image, replayed, unflushed, ..judged };
    }
    Ok(left)
}

/// The remains of an interrupted opening.
pub(crate) struct Ended {
    pub(crate) image: Vec<u8>,
    /// The journals of the process.
    pub(crate) journals: Option<Folder>,
    /// Data that a power cut may still lose. `None`: it was a power cut.
    pub(crate) unflushed: Option<Unflushed>,
}

/// The moments of an opening, or of closing an image.
pub(crate) struct Moments {
    storage: Storage,
    fd: Arc<OwnedFd>,
    journals: Option<Arc<Folder>>,
    state: Mutex<RecoveryState>,
    /// Nothing is to be interrupted: the image is in use.
    over: AtomicBool,
}

struct RecoveryState {
    random: Rng,
    /// A request other than a read has been made.
    changes: bool,
    /// Number of moments since then.
    passed: usize,
    /// The remains of one of them, chosen with equal probability.
    ended: Option<Ended>,
}

impl Moments {
    /// A moment, with the operations that this ring has in flight.
    fn pass(&self, sim: &Sim) {
        let state = &mut *lock(&self.state);
        if !state.changes {
            return;
        }
        state.passed += 1;
        if state.random.usize(..state.passed) > 0 {
            return;
        }
        let (is_cut, seed) = (state.random.usize(..3) == 0, state.random.u64(..));
        state.ended = Some(match is_cut {
            true => {
                let image = sim.cut(&self.fd, seed).unwrap();
                Ended { image, journals: None, unflushed: None }
            }
            false => Ended {
                image: sim.killed(&self.fd, seed).unwrap(),
                journals: self.journals.as_ref().map(|journals| journals.left()),
                unflushed: self.storage.unflushed(&self.fd),
            },
        });
    }

    /// Begins: the image is going to be closed.
    pub(crate) fn begin(&self) {
        lock(&self.state).changes = false;
        self.over.store(false, Ordering::Release);
    }

    /// The end of the moments.
    pub(crate) fn end(&self) -> Option<Ended> {
        self.over.store(true, Ordering::Release);
        lock(&self.state).ended.take()
    }
}

/// The node below an image that is being opened.
struct Watched {
    file: Arc<dyn BlockNode>,
    moments: Arc<Moments>,
}

impl BlockNode for Watched {
    fn name(&self) -> &str {
        self.file.name()
    }

    fn geometry(&self) -> Geometry {
        self.file.geometry()
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.file.clone())
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let moments = self.moments.clone();
        if moments.over.load(Ordering::Acquire) {
            return self.file.clone().open_channel(event_loop);
        }
        let faults = Faults { latency_ns: (1_000, 20_000), ..Faults::default() };
        let seed = lock(&moments.state).random.u64(..);
        let sim = Sim::with_storage(seed, faults, moments.storage.clone());
        let config = LoopConfig { poll: NO_POLLING, ..LoopConfig::default() };
        let simulated = sim.event_loop(config).map_err(|error| error.error)?;
        let channel = self.file.clone().open_channel(&simulated)?;
        let world = World { channel, simulated, sim, moments, is_turning: Cell::new(false) };
        Ok(Rc::new(WatchedChannel { world: Rc::new(world), event_loop: event_loop.clone() }))
    }
}

struct WatchedChannel {
    world: Rc<World>,
    /// The loop on which the image is opened.
    event_loop: EventLoop,
}

struct World {
    channel: Rc<dyn Channel>,
    simulated: EventLoop,
    sim: Sim,
    moments: Arc<Moments>,
    is_turning: Cell<bool>,
}

impl Channel for WatchedChannel {
    fn submit(&self, request: Request) {
        let world = self.world.clone();
        lock(&world.moments.state).changes |= request.op != Op::Read;
        world.channel.submit(request);
        // Further requests may come in the same turn, and are in flight beside this one.
        if !world.is_turning.replace(true) {
            self.event_loop.spawn(async move { world.turn() });
        }
    }

    fn in_flight(&self) -> usize {
        self.world.channel.in_flight()
    }
}

impl World {
    /// Turns until everything is answered.
    fn turn(&self) {
        self.is_turning.set(false);
        while self.channel.in_flight() > 0 {
            // No other event would wake the loop.
            let waits = self.sim.in_flight() > 0;
            elsewhere(|| self.simulated.run_once(waits).unwrap());
            self.moments.pass(&self.sim);
        }
    }
}
