//! Opening again what was left, and ends in the middle of that: of the power, or of the process.
//!
//! Whoever opens an image does so on loops of its own, which are real. So the image lies on a node whose channels
//! there have a simulated ring each: between any two completions of it there is a moment at which the power could
//! be cut or the process be killed, and one of all these is kept. The one who opens the image goes on, as if
//! nothing had been, and what would have been left at that moment is judged, and opened the next time.

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use block::NodeRegistry;
use block::node::{BlockNode, Channel, Geometry};
use block::options::BlockdevOptions;
use block::request::{Op, Request};
use event_loop::ring::sim::{Faults, Sim, Storage, Unflushed, elsewhere};
use event_loop::sync::lock;
use event_loop::{EventLoop, LoopConfig};

use crate::course::{NO_POLLING, Random, Seen};
use crate::journal::Folder;
use crate::kinds::{FILE, Kind, Start};
use crate::left::{Left, keep};
use crate::path_of;

/// What was left, opened, and a world for its user.
pub(crate) struct Reopened {
    pub(crate) sim: Sim,
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) options: BlockdevOptions,
    pub(crate) node: Arc<dyn BlockNode>,
    /// Has the nodes themselves. `node` leads to one of them.
    pub(crate) registry: NodeRegistry,
    /// What would be left of it if it had ended in between.
    ended: Option<Ended>,
}

impl Reopened {
    /// `moments`: what has one picked, if the storage is to see how the image is opened. Else what has been
    /// written meanwhile is found afterwards.
    pub(crate) fn new(
        kind: &Kind,
        start: &Start,
        left: &Left,
        random: &mut Random,
        moments: Option<Random>,
    ) -> Reopened {
        let sim = Sim::new(random.next(), Faults::default());
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
        let moments = moments.map(|random| {
            let state = Mutex::new(State { random, changes: false, passed: 0, ended: None });
            let (storage, fd) = (storage.clone(), fd.clone());
            Arc::new(Moments { storage, fd, journals, state, over: AtomicBool::new(false) })
        });
        if let Some(moments) = &moments {
            let moments = moments.clone();
            registry.set_filter(FILE, Some(Arc::new(Watched { file, moments })));
        }
        let node = registry.open(&disk).unwrap_or_else(|error| {
            panic!("what was left cannot be opened: {error:?}");
        });
        registry.own_images();
        let ended = moments.as_ref().and_then(|moments| moments.end());
        let is_changed = || std::fs::read(path_of(&fd)).unwrap() != left.image;
        assert!(
            !left.is_handed_over || !is_changed(),
            "who goes on with an image writes nothing yet"
        );
        // What was written meanwhile the ring has not seen.
        if moments.is_none() {
            let opened = std::fs::read(path_of(&fd)).unwrap();
            if left.unflushed.is_some() {
                storage.look(&fd);
            } else if opened != left.image {
                storage.restore(&fd, opened).unwrap();
            }
        }
        Reopened { sim, fd, options: disk, node, registry, ended }
    }
}

/// Has whoever opens what was left end before it is done, a few times in a row. What is left then.
pub(crate) fn interrupted(
    kind: &Kind,
    start: &Start,
    mut left: Left,
    random: &mut Random,
    seen: &mut Seen,
) -> Result<Left, String> {
    // A journal that an image names goes with the power, and nobody makes another one before the image is open.
    let mut is_lost = !left.is_killed;
    for number in 1..=1 + random.below(3) {
        let moments = Random(random.next());
        let Reopened { ended, node, .. } = Reopened::new(kind, start, &left, random, Some(moments));
        drop(node);
        // There was nothing to be done.
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

/// What is left of an image in the middle of being opened.
struct Ended {
    image: Vec<u8>,
    /// As a process leaves them.
    journals: Option<Folder>,
    /// What a power cut may still take back. `None`: it was one.
    unflushed: Option<Unflushed>,
}

/// The moments of an opening.
struct Moments {
    storage: Storage,
    fd: Arc<OwnedFd>,
    journals: Option<Arc<Folder>>,
    state: Mutex<State>,
    /// The image is open.
    over: AtomicBool,
}

struct State {
    random: Random,
    /// Something else than a read has been asked for.
    changes: bool,
    /// Moments since then.
    passed: usize,
    /// Of one of them, each as likely as the others.
    ended: Option<Ended>,
}

impl Moments {
    /// This is one, with what that ring has under way.
    fn pass(&self, sim: &Sim) {
        let state = &mut *lock(&self.state);
        if !state.changes {
            return;
        }
        state.passed += 1;
        if !state.random.one_in(state.passed) {
            return;
        }
        let (is_cut, seed) = (state.random.one_in(3), state.random.next());
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

    /// There are no more.
    fn end(&self) -> Option<Ended> {
        self.over.store(true, Ordering::Release);
        lock(&self.state).ended.take()
    }
}

/// The node that an image lies on which is being opened.
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

    fn below(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.file.clone())
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let moments = self.moments.clone();
        if moments.over.load(Ordering::Acquire) {
            return self.file.clone().open_channel(event_loop);
        }
        let faults = Faults { latency_ns: (1_000, 20_000), ..Faults::default() };
        let seed = lock(&moments.state).random.next();
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
    /// Of whoever opens the image.
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
        // Others may come in the same turn, and are under way beside it.
        if !world.is_turning.replace(true) {
            self.event_loop.spawn(async move { world.turn() });
        }
    }

    fn in_flight(&self) -> usize {
        self.world.channel.in_flight()
    }
}

impl World {
    /// Until all is answered.
    fn turn(&self) {
        self.is_turning.set(false);
        while self.channel.in_flight() > 0 {
            // Nobody else would wake it.
            let waits = self.sim.in_flight() > 0;
            elsewhere(|| self.simulated.run_once(waits).unwrap());
            self.moments.pass(&self.sim);
        }
    }
}
