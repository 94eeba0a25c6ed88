//! `blkdebug`: another node, with faults.

use std::path::PathBuf;

use crate::options::{
    BlkdebugOptions, BlockdevRef, Effect, Event, Inherited, InjectError, IoType, MILLION,
    ParentDraft, SetState, errno_from_number,
};

use crate::driver::{DriverKind, OptionTable};
use ::options::shape::Shape;
use ::options::table::{self, Choice, Field, Kind, Need, put};
use ::options::{OptionError, Value};

pub(in crate::drivers) static BLKDEBUG: DriverKind = DriverKind {
    name: "blkdebug",
    help: "another node, with injected errors, for tests",
    example: "blkdebug,node-name=n,image=disk0,inject-error.0.event=write_aio,\
              inject-error.0.errno=28,inject-error.0.once=on",
    options: &OptionTable {
        fields: FIELDS,
        start: |inherited| Draft { inherited, ..Draft::default() },
        build: |draft| {
            let image = draft.image.ok_or_else(|| table::missing("image"))?;
            Ok(BlkdebugOptions {
                config: draft.config,
                align: draft.align,
                max_transfer: draft.max_transfer,
                opt_write_zero: draft.opt_write_zero,
                max_write_zero: draft.max_write_zero,
                opt_discard: draft.opt_discard,
                max_discard: draft.max_discard,
                inject_error: draft.inject_error,
                set_state: draft.set_state,
                seed: draft.seed,
                ..BlkdebugOptions::new(image)
            }
            .into())
        },
    },
    create: None,
    library: None,
};

/// What was given.
#[derive(Default)]
struct Draft {
    inherited: Inherited,
    image: Option<BlockdevRef>,
    config: Option<PathBuf>,
    align: u64,
    max_transfer: u64,
    opt_write_zero: u64,
    max_write_zero: u64,
    opt_discard: u64,
    max_discard: u64,
    inject_error: Vec<InjectError>,
    set_state: Vec<SetState>,
    seed: u64,
}

impl ParentDraft for Draft {
    fn inherited(&self) -> Inherited {
        self.inherited
    }

    fn child(&mut self) -> &mut Option<BlockdevRef> {
        &mut self.image
    }
}

static FIELDS: &[Field<Draft>] = &[
    Field { name: "image", ..Draft::FILE },
    Field {
        name: "config",
        kind: Kind::Path(|node, path| put(&mut node.config, Some(path))),
        need: Need::Optional("none"),
        help: "file with more rules, in sections [inject-error] and [set-state] of lines \
               key = \"value\"",
    },
    bytes(
        "align",
        |node, bytes| put(&mut node.align, bytes.unsigned_abs()),
        "requests to the node below are multiples of this power of 2; 0 for what it needs",
    ),
    bytes(
        "max-transfer",
        |node, bytes| put(&mut node.max_transfer, bytes.unsigned_abs()),
        "longest read or write of the node below: longer ones are split; 0 for no limit",
    ),
    bytes(
        "opt-write-zero",
        |node, bytes| put(&mut node.opt_write_zero, bytes.unsigned_abs()),
        "zeroes that are no multiple of this are written as data; 0 for no such thing",
    ),
    bytes(
        "max-write-zero",
        |node, bytes| put(&mut node.max_write_zero, bytes.unsigned_abs()),
        "longest write of zeroes of the node below; 0 for no limit",
    ),
    bytes(
        "opt-discard",
        |node, bytes| put(&mut node.opt_discard, bytes.unsigned_abs()),
        "discards that are no multiple of this are not carried out; 0 for no such thing",
    ),
    bytes(
        "max-discard",
        |node, bytes| put(&mut node.max_discard, bytes.unsigned_abs()),
        "longest discard of the node below; 0 for no limit",
    ),
    Field {
        name: "inject-error",
        kind: Kind::Nested {
            shape: || {
                let rule = Shape::Object(table::members(INJECT_ERROR));
                Shape::List(
                    Box::new(rule),
                    "rule number <n>, from 0; the first that fits a request decides",
                )
            },
            read: |node, value, at| {
                let rules = table::read_list(INJECT_ERROR, value, at, Rule::default)?;
                node.inject_error =
                    rules.into_iter().map(Rule::finish).collect::<Result<_, _>>()?;
                Ok(())
            },
        },
        need: Need::Optional("none"),
        help: "",
    },
    Field {
        name: "set-state",
        kind: Kind::Nested {
            shape: || {
                let rule = Shape::Object(table::members(SET_STATE));
                Shape::List(Box::new(rule), "change number <n> of the state, from 0")
            },
            read: |node, value, at| {
                let start = || SetState { event: Event::None, state: 0, new_state: 0 };
                node.set_state = table::read_list(SET_STATE, value, at, start)?;
                Ok(())
            },
        },
        need: Need::Optional("none"),
        help: "",
    },
    Field {
        name: "seed",
        kind: Kind::Int {
            range: 0..=i64::MAX,
            set: |node, seed| put(&mut node.seed, seed.unsigned_abs()),
        },
        need: Need::Default("0"),
        help: "seed of random decisions: the same seed and requests give the same faults",
    },
    permissions("take-child-perms"),
    permissions("unshare-child-perms"),
];

/// A field with a number of bytes. 0: the default.
const fn bytes(
    name: &'static str,
    set: fn(&mut Draft, i64) -> table::Set,
    help: &'static str,
) -> Field<Draft> {
    Field { name, kind: Kind::Int { range: 0..=i64::MAX, set }, need: Need::Default("0"), help }
}

/// QEMU's permissions of nodes, which there are none of here.
const fn permissions(name: &'static str) -> Field<Draft> {
    Field::unoffered(name, |_, value, name, _| match value {
        Value::List(list) if list.is_empty() => Ok(()),
        Value::List(_) => Err(OptionError::not_yet(format!("Parameter '{name}'"))
            .hint("Nodes have no permissions here; an image file is locked by its node.")),
        _ => Err(table::wrong_type(name, "array")),
    })
}

/// One of `inject-error`.
struct Rule {
    rule: InjectError,
    sector: Option<u64>,
    sectors: u64,
    /// `None`: what the effect has.
    errno: Option<i64>,
}

impl Default for Rule {
    fn default() -> Self {
        Rule { rule: InjectError::new(Event::None), sector: None, sectors: 1, errno: None }
    }
}

impl Rule {
    fn finish(self) -> Result<InjectError, OptionError> {
        let effect = self.rule.effect;
        let errno = match self.errno {
            Some(number) => errno_from_number(number).map_err(OptionError::new)?,
            None => effect.default_errno(),
        };
        let sectors = self.sector.map(|sector| (sector, self.sectors));
        Ok(InjectError { errno, sectors, ..self.rule })
    }
}

/// The events there are, as words for a `T` that `$set` sets.
macro_rules! event {
    ($type:ty, $set:expr) => {
        Field {
            name: "event",
            kind: Kind::Choice(&[
                Choice {
                    name: "none",
                    help: "the node is opened",
                    set: |rule: &mut $type| ($set)(rule, Event::None),
                },
                Choice {
                    name: "read_aio",
                    help: "a read comes in",
                    set: |rule: &mut $type| ($set)(rule, Event::ReadAio),
                },
                Choice {
                    name: "write_aio",
                    help: "a write comes in",
                    set: |rule: &mut $type| ($set)(rule, Event::WriteAio),
                },
                Choice {
                    name: "flush_to_os",
                    help: "a flush comes in",
                    set: |rule: &mut $type| ($set)(rule, Event::FlushToOs),
                },
                Choice {
                    name: "flush_to_disk",
                    help: "the flush is carried out",
                    set: |rule: &mut $type| ($set)(rule, Event::FlushToDisk),
                },
                Choice {
                    name: "pwritev",
                    help: "the write is carried out",
                    set: |rule: &mut $type| ($set)(rule, Event::Pwritev),
                },
                Choice {
                    name: "pwritev_zero",
                    help: "a write of zeroes comes in",
                    set: |rule: &mut $type| ($set)(rule, Event::PwritevZero),
                },
                Choice {
                    name: "pwritev_done",
                    help: "a write, of zeroes too, is done",
                    set: |rule: &mut $type| ($set)(rule, Event::PwritevDone),
                },
            ]),
            need: Need::Required,
            help: "what the rule takes effect with",
        }
    };
}

/// A `state` of a `T`.
macro_rules! state {
    ($name:literal, $set:expr, $need:expr, $help:literal) => {
        Field {
            name: $name,
            kind: Kind::Int {
                range: 0..=i32::MAX as i64,
                set: |rule, state| ($set)(rule, u32::try_from(state).unwrap_or(0)),
            },
            need: $need,
            help: $help,
        }
    };
}

static INJECT_ERROR: &[Field<Rule>] = &[
    event!(Rule, |rule: &mut Rule, event| put(&mut rule.rule.event, event)),
    state!(
        "state",
        |rule: &mut Rule, state| put(&mut rule.rule.state, state),
        Need::Default("0"),
        "state in which the event has to come; 0 for any"
    ),
    Field {
        name: "iotype",
        kind: Kind::Choice(&[
            Choice { name: "read", help: "reads", set: |rule| rule.iotype(IoType::Read) },
            Choice { name: "write", help: "writes", set: |rule| rule.iotype(IoType::Write) },
            Choice {
                name: "write-zeroes",
                help: "writes of zeroes",
                set: |rule| rule.iotype(IoType::WriteZeroes),
            },
            Choice { name: "discard", help: "discards", set: |rule| rule.iotype(IoType::Discard) },
            Choice { name: "flush", help: "flushes", set: |rule| rule.iotype(IoType::Flush) },
            Choice {
                name: "block-status",
                help: "questions for what is stored where",
                set: |rule| rule.iotype(IoType::BlockStatus),
            },
        ]),
        need: Need::Optional("all but block-status"),
        help: "requests that the rule concerns",
    },
    Field {
        name: "errno",
        kind: Kind::Int {
            range: i32::MIN as i64..=i32::MAX as i64,
            set: |rule, errno| put(&mut rule.errno, Some(errno)),
        },
        need: Need::Optional("5, EIO; with effect lost, 0"),
        help: "number of the error that the request is answered with; 0 for success",
    },
    Field {
        name: "delay-ns",
        kind: Kind::Int {
            range: 0..=i64::MAX,
            set: |rule, ns| put(&mut rule.rule.delay_ns, ns.unsigned_abs()),
        },
        need: Need::Default("0"),
        help: "how long the request takes before that, in nanoseconds",
    },
    Field {
        name: "sector",
        kind: Kind::Int {
            range: -1..=i64::MAX >> 9,
            set: |rule, sector| put(&mut rule.sector, u64::try_from(sector).ok()),
        },
        need: Need::Default("-1"),
        help: "sector of 512 bytes that a request has to touch; -1 for any",
    },
    Field {
        name: "sectors",
        kind: Kind::Int {
            range: 1..=i64::MAX >> 9,
            set: |rule, sectors| put(&mut rule.sectors, sectors.unsigned_abs()),
        },
        need: Need::Default("1"),
        help: "how many sectors there are from sector on",
    },
    Field {
        name: "once",
        kind: Kind::Bool(|rule, on| put(&mut rule.rule.once, on)),
        need: Need::Default("off"),
        help: "the rule is over when it has struck",
    },
    Field {
        name: "count",
        kind: Kind::Int {
            range: 0..=i64::MAX,
            set: |rule, count| put(&mut rule.rule.count, count.unsigned_abs()),
        },
        need: Need::Default("0"),
        help: "the rule is over when it has struck so often; 0 for never",
    },
    Field {
        name: "probability-ppm",
        kind: Kind::Int {
            range: 0..=MILLION as i64,
            set: |rule, ppm| put(&mut rule.rule.probability_ppm, u32::try_from(ppm).unwrap_or(0)),
        },
        need: Need::Default("1000000"),
        help: "of a million requests that the rule fits, those that it strikes",
    },
    Field {
        name: "effect",
        kind: Kind::Choice(&[
            Choice {
                name: "error",
                help: "it fails and is not carried out, unless errno is 0",
                set: |rule| put(&mut rule.rule.effect, Effect::Error),
            },
            Choice {
                name: "lost",
                help: "it is not carried out, and said to be",
                set: |rule| put(&mut rule.rule.effect, Effect::Lost),
            },
            Choice {
                name: "short",
                help: "only its first sectors are carried out",
                set: |rule| put(&mut rule.rule.effect, Effect::Short),
            },
            Choice {
                name: "torn",
                help: "only some of its sectors are carried out, anywhere in it",
                set: |rule| put(&mut rule.rule.effect, Effect::Torn),
            },
        ]),
        need: Need::Default("error"),
        help: "what happens to the request before it is answered",
    },
    Field {
        name: "immediately",
        kind: Kind::Bool(|rule, on| put(&mut rule.rule.immediately, on)),
        need: Need::Default("off"),
        help: "answer from within the submission, if nothing is to be done, instead of later",
    },
];

impl Rule {
    fn iotype(&mut self, iotype: IoType) -> table::Set {
        put(&mut self.rule.iotype, Some(iotype))
    }
}

static SET_STATE: &[Field<SetState>] = &[
    event!(SetState, |rule: &mut SetState, event| put(&mut rule.event, event)),
    state!(
        "state",
        |rule: &mut SetState, state| put(&mut rule.state, state),
        Need::Default("0"),
        "state in which the event has to come; 0 for any"
    ),
    state!(
        "new_state",
        |rule: &mut SetState, state| put(&mut rule.new_state, state),
        Need::Required,
        "state from then on; the first is 1"
    ),
];
