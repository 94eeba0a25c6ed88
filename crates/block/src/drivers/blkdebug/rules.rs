//! When a request fails, and how: events make rules active, and those that are strike what fits them.
//!
//! This is QEMU's model. An event that some rules are for (in the state that the node is in) replaces
//! the active rules by those; they stay active until the next such event, whatever requests come. Of
//! several that fit a request, the first counts.

use std::ops::Range;

use fastrand::Rng;
use nix::errno::Errno;

use crate::options::{BlkdebugOptions, Effect, Event, InjectError, IoType, MILLION, SetState};
use crate::request::{Op, Part};

/// Bytes of a sector.
pub(super) const SECTOR: u64 = 512;

/// The state that a node begins in.
const FIRST_STATE: u32 = 1;

/// The rules of a node, and how far they have come.
pub(super) struct Rules {
    rules: Vec<Rule>,
    set_state: Vec<SetState>,
    state: u32,
    /// Rules that strike now, by their place.
    active: Vec<usize>,
    random: Rng,
}

struct Rule {
    options: InjectError,
    /// How often it may strike still; `None`: for ever.
    left: Option<u64>,
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) effect: Effect,
    pub(super) errno: Option<Errno>,
    pub(super) delay_ns: u64,
    pub(super) immediately: bool,
}

impl Rules {
    /// The rules as they are once the node is there.
    pub(super) fn new(options: &BlkdebugOptions) -> Self {
        let rule = |options: &InjectError| {
            let count = Some(options.count).filter(|count| *count > 0);
            let left = if options.once { Some(1) } else { count };
            Rule { options: options.clone(), left }
        };
        let mut rules = Rules {
            rules: options.inject_error.iter().map(rule).collect(),
            set_state: options.set_state.clone(),
            state: FIRST_STATE,
            active: Vec::new(),
            random: Rng::with_seed(options.seed),
        };
        rules.active.reserve(rules.rules.len());
        rules.fire(Event::None);
        rules
    }

    /// An event has come.
    pub(super) fn fire(&mut self, event: Event) {
        let Rules { rules, active, state, .. } = self;
        let is_meant = |rule: &Rule| {
            rule.options.event == event
                && (rule.options.state == 0 || rule.options.state == *state)
                && rule.left != Some(0)
        };
        if rules.iter().any(is_meant) {
            active.clear();
            active.extend((0..).zip(rules.iter()).filter(|(_, r)| is_meant(r)).map(|(n, _)| n));
        }
        let mut transitions = self
            .set_state
            .iter()
            .filter(|set| set.event == event && (set.state == 0 || set.state == self.state));
        // All look at the state before.
        if let Some(last) = transitions.next_back() {
            self.state = last.new_state;
        }
    }

    /// Whether something depends on that event.
    pub(super) fn listen_to(&self, event: Event) -> bool {
        self.rules.iter().any(|rule| rule.options.event == event)
            || self.set_state.iter().any(|set| set.event == event)
    }

    /// What becomes of a request for that range; `None`: what it asks for.
    pub(super) fn judge(&mut self, kind: IoType, range: &Range<u64>) -> Option<Verdict> {
        let Rules { rules, active, random, .. } = self;
        let fits = |place: &&usize| rules.get(**place).is_some_and(|rule| rule.fits(kind, range));
        let place = *active.iter().find(fits)?;
        let Rule { options, left } = rules.get_mut(place)?;
        if options.probability_ppm < MILLION
            && random.u64(..u64::from(MILLION)) >= u64::from(options.probability_ppm)
        {
            return None;
        }
        if let Some(left) = left {
            *left = left.saturating_sub(1);
        }
        let &mut InjectError { effect, errno, delay_ns, immediately, .. } = options;
        Some(Verdict { effect, errno, delay_ns, immediately })
    }

    /// A number below `end`, which is not 0.
    pub(super) fn random_below(&mut self, end: u64) -> u64 {
        self.random.u64(..end)
    }
}

impl Rule {
    fn fits(&self, kind: IoType, range: &Range<u64>) -> bool {
        let touches = |&(first, count): &(u64, u64)| {
            let begin = first.saturating_mul(SECTOR);
            let end = first.saturating_add(count).saturating_mul(SECTOR);
            range.start < end && begin < range.end
        };
        self.left != Some(0)
            && self.options.iotype.map_or(kind != IoType::BlockStatus, |own| own == kind)
            && self.options.sectors.as_ref().is_none_or(touches)
    }
}

/// What a request is to rules.
pub(super) fn kind(op: Op) -> IoType {
    match op {
        Op::Read => IoType::Read,
        Op::Write { .. } => IoType::Write,
        Op::WriteZeroes { .. } => IoType::WriteZeroes,
        Op::Discard => IoType::Discard,
        Op::Flush => IoType::Flush,
        Op::BlockStatus => IoType::BlockStatus,
    }
}

/// The events of a request that comes in, in order.
pub(super) fn events(op: Op, part: Part) -> &'static [Event] {
    match op {
        Op::Read => match part {
            Part::Data => &[Event::ReadAio],
            Part::Compressed => &[Event::ReadCompressed],
            Part::L2 => &[Event::L2Load],
            Part::RefcountTable => &[Event::ReftableLoad],
            Part::RefcountBlock => &[Event::RefblockLoad],
            Part::L1 | Part::Other => &[],
        },
        Op::Write { .. } => match part {
            Part::Data => &[Event::WriteAio, Event::Pwritev],
            Part::Compressed => &[Event::WriteCompressed, Event::Pwritev],
            Part::L1 => &[Event::L1Update, Event::Pwritev],
            Part::L2 => &[Event::L2Update, Event::Pwritev],
            Part::RefcountTable => &[Event::ReftableUpdate, Event::Pwritev],
            Part::RefcountBlock => &[Event::RefblockUpdatePart, Event::Pwritev],
            Part::Other => &[Event::Pwritev],
        },
        Op::WriteZeroes { .. } => &[Event::PwritevZero],
        Op::Flush => &[Event::FlushToOs, Event::FlushToDisk],
        Op::Discard | Op::BlockStatus => &[],
    }
}
