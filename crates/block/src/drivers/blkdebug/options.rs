//! `blkdebug`: another node, with faults.

use crate::options::{
    BlkdebugOptions, Child, Draft, Effect, Event, InjectError, IoType, MILLION, SetState,
    errno_from_number, file_row,
};

use crate::driver::{DriverKind, OptionTable};
use ::options::place::{Custom, Int, Of, OneOf, Place, write_list};
use ::options::shape::Shape;
use ::options::table::{self, Field, Row, put};
use ::options::{OptionError, Value};

pub(in crate::drivers) static BLKDEBUG: DriverKind = DriverKind {
    name: "blkdebug",
    help: "another node, with injected errors, for tests",
    example: "blkdebug,node-name=n,image=disk0,inject-error.0.event=write_aio,\
              inject-error.0.errno=28,inject-error.0.once=on",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: None,
    amend: None,
    library: None,
};

type Node = Draft<BlkdebugOptions>;

pub(super) static FIELDS: &[Field<Node>] = &[
    Field { name: "image", ..file_row(&Child(|node: &mut BlkdebugOptions| &mut node.image)) },
    Row::optional(
        "config",
        "none",
        "file with more rules, in sections [inject-error] and [set-state] of lines key = \
         \"value\"",
    )
    .at(&Of(|node: &mut Node| &mut node.config)),
    number(
        "align",
        &Of(|node: &mut Node| &mut node.align),
        "requests to the node below are multiples of this power of 2; 0 for what it needs",
    ),
    number(
        "max-transfer",
        &Of(|node: &mut Node| &mut node.max_transfer),
        "longest read or write of the node below: longer ones are split; 0 for no limit",
    ),
    number(
        "opt-write-zero",
        &Of(|node: &mut Node| &mut node.opt_write_zero),
        "zeroes that are no multiple of this are written as data; 0 for no such thing",
    ),
    number(
        "max-write-zero",
        &Of(|node: &mut Node| &mut node.max_write_zero),
        "longest write of zeroes of the node below; 0 for no limit",
    ),
    number(
        "opt-discard",
        &Of(|node: &mut Node| &mut node.opt_discard),
        "discards that are no multiple of this are not carried out; 0 for no such thing",
    ),
    number(
        "max-discard",
        &Of(|node: &mut Node| &mut node.max_discard),
        "longest discard of the node below; 0 for no limit",
    ),
    Row::optional("inject-error", "none", "").at(&Custom {
        shape: || {
            let rule = Shape::Object(table::members(INJECT_ERROR));
            Shape::List(
                Box::new(rule),
                "rule number <n>, from 0; the first that fits a request decides",
            )
        },
        read: |node: &mut Node, value, at| {
            let rules = table::read_list(INJECT_ERROR, value, at, Rule::default)?;
            node.inject_error = rules.into_iter().map(Rule::finish).collect::<Result<_, _>>()?;
            Ok(())
        },
        write: |node| Some(write_list(INJECT_ERROR, node.inject_error.iter().map(Rule::of))),
    }),
    Row::optional("set-state", "none", "").at(&Custom {
        shape: || {
            let rule = Shape::Object(table::members(SET_STATE));
            Shape::List(Box::new(rule), "change number <n> of the state, from 0")
        },
        read: |node: &mut Node, value, at| {
            let start = || SetState { event: Event::None, state: 0, new_state: 0 };
            node.set_state = table::read_list(SET_STATE, value, at, start)?;
            Ok(())
        },
        write: |node| Some(write_list(SET_STATE, node.set_state.iter().copied())),
    }),
    number(
        "seed",
        &Of(|node: &mut Node| &mut node.seed),
        "seed of random decisions: the same seed and requests give the same faults",
    ),
    permissions("take-child-perms"),
    permissions("unshare-child-perms"),
];

/// A field with a number, 0 by default.
const fn number<T>(
    name: &'static str,
    place: &'static dyn Place<T>,
    help: &'static str,
) -> Field<T> {
    Row::default(name, "0", help).at(place)
}

/// QEMU's permissions of nodes, which there are none of here.
const fn permissions(name: &'static str) -> Field<Node> {
    Field::unoffered(name, |_, value, name, _| match value {
        Value::List(list) if list.is_empty() => Ok(()),
        Value::List(_) => Err(OptionError::not_yet(format!("Parameter '{name}'"))
            .hint("Nodes have no permissions here; an image file is locked by its node.")),
        _ => Err(table::wrong_type(name, "array")),
    })
}

/// The largest sector.
const SECTOR: i64 = i64::MAX >> 9;

/// One of `inject-error`.
struct Rule {
    rule: InjectError,
    /// -1: any.
    sector: i64,
    sectors: i64,
    /// `None`: what the effect has.
    errno: Option<i64>,
}

impl Default for Rule {
    fn default() -> Self {
        Rule { rule: InjectError::new(Event::None), sector: -1, sectors: 1, errno: None }
    }
}

impl Rule {
    fn finish(self) -> Result<InjectError, OptionError> {
        let effect = self.rule.effect;
        let errno = match self.errno {
            Some(number) => errno_from_number(number).map_err(OptionError::new)?,
            None => effect.default_errno(),
        };
        let sector = u64::try_from(self.sector).ok();
        let sectors = sector.map(|sector| (sector, self.sectors.unsigned_abs()));
        Ok(InjectError { errno, sectors, ..self.rule })
    }

    /// What gives this rule.
    fn of(rule: &InjectError) -> Rule {
        let (sector, sectors) = match rule.sectors {
            Some((sector, sectors)) => (sector.cast_signed(), sectors.cast_signed()),
            None => (-1, 1),
        };
        let errno = Some(rule.errno.map_or(0, |errno| errno as i32).into());
        Rule { rule: rule.clone(), sector, sectors, errno }
    }
}

/// The events there are.
const EVENTS: &[(&str, Event, &str)] = &[
    ("none", Event::None, "the node is opened"),
    ("read_aio", Event::ReadAio, "a read of data comes in"),
    ("read_compressed", Event::ReadCompressed, "a read of a compressed qcow2 cluster comes in"),
    ("write_aio", Event::WriteAio, "a write of data comes in"),
    ("write_compressed", Event::WriteCompressed, "a write of compressed qcow2 clusters comes in"),
    ("l1_update", Event::L1Update, "a write to a qcow2 image's L1 table comes in"),
    ("l2_load", Event::L2Load, "a read of an L2 table comes in"),
    ("l2_update", Event::L2Update, "a write to L2 tables comes in"),
    ("reftable_load", Event::ReftableLoad, "a read of the refcount table comes in"),
    ("reftable_update", Event::ReftableUpdate, "a write to the refcount table comes in"),
    ("refblock_load", Event::RefblockLoad, "a read of a refcount block comes in"),
    ("refblock_update_part", Event::RefblockUpdatePart, "a write to refcount blocks comes in"),
    ("flush_to_os", Event::FlushToOs, "a flush comes in"),
    ("flush_to_disk", Event::FlushToDisk, "the flush is carried out"),
    ("pwritev", Event::Pwritev, "the write is carried out"),
    ("pwritev_zero", Event::PwritevZero, "a write of zeroes comes in"),
    ("pwritev_done", Event::PwritevDone, "a write, of zeroes too, is done"),
];

const fn event<T>(place: &'static dyn Place<T>) -> Field<T> {
    let help = "what the rule takes effect with";
    Row::required("event", help).at(place)
}

/// The largest state.
const STATE: i64 = i32::MAX as i64;
/// The state in which a rule strikes.
const IN_STATE: &str = "state in which the event has to come; 0 for any";

static INJECT_ERROR: &[Field<Rule>] = &[
    event(&OneOf { at: |rule: &mut Rule| &mut rule.rule.event, words: EVENTS }),
    number(
        "state",
        &Int { min: 0, max: STATE, at: |rule: &mut Rule| &mut rule.rule.state },
        IN_STATE,
    ),
    Row::optional("iotype", "all but block-status", "requests that the rule concerns").at(&OneOf {
        at: |rule: &mut Rule| &mut rule.rule.iotype,
        words: &[
            ("read", IoType::Read, "reads"),
            ("write", IoType::Write, "writes"),
            ("write-zeroes", IoType::WriteZeroes, "writes of zeroes"),
            ("discard", IoType::Discard, "discards"),
            ("flush", IoType::Flush, "flushes"),
            ("block-status", IoType::BlockStatus, "questions for what is stored where"),
        ],
    }),
    Row::optional(
        "errno",
        "5, EIO; with effect lost, 0",
        "number of the error that the request is answered with; 0 for success",
    )
    .at(&Custom {
        shape: || Shape::Int(i32::MIN.into()..=i32::MAX.into()),
        read: |rule: &mut Rule, value, at| {
            let range = i32::MIN.into()..=i32::MAX.into();
            put(&mut rule.errno, Some(table::integer(value, at.whole(), at, &range)?))
        },
        write: |rule| rule.errno.map(Value::Integer),
    }),
    number(
        "delay-ns",
        &Of(|rule: &mut Rule| &mut rule.rule.delay_ns),
        "how long the request takes before that, in nanoseconds",
    ),
    Row::default("sector", "-1", "sector of 512 bytes that a request has to touch; -1 for any")
        .at(&Int { min: -1, max: SECTOR, at: |rule: &mut Rule| &mut rule.sector }),
    Row::default("sectors", "1", "how many sectors there are from sector on").at(&Int {
        min: 1,
        max: SECTOR,
        at: |rule: &mut Rule| &mut rule.sectors,
    }),
    Row::default("once", "off", "the rule is over when it has struck")
        .at(&Of(|rule: &mut Rule| &mut rule.rule.once)),
    number(
        "count",
        &Of(|rule: &mut Rule| &mut rule.rule.count),
        "the rule is over when it has struck so often; 0 for never",
    ),
    Row::default(
        "probability-ppm",
        "1000000",
        "of a million requests that the rule fits, those that it strikes",
    )
    .at(&Int {
        min: 0,
        max: MILLION as i64,
        at: |rule: &mut Rule| &mut rule.rule.probability_ppm,
    }),
    Row::default("effect", "error", "what happens to the request before it is answered").at(
        &OneOf {
            at: |rule: &mut Rule| &mut rule.rule.effect,
            words: &[
                ("error", Effect::Error, "it fails and is not carried out, unless errno is 0"),
                ("lost", Effect::Lost, "it is not carried out, and said to be"),
                ("short", Effect::Short, "only its first sectors are carried out"),
                ("torn", Effect::Torn, "only some of its sectors are carried out, anywhere in it"),
            ],
        },
    ),
    Row::default(
        "immediately",
        "off",
        "answer from within the submission, if nothing is to be done, instead of later",
    )
    .at(&Of(|rule: &mut Rule| &mut rule.rule.immediately)),
];

static SET_STATE: &[Field<SetState>] = &[
    event(&OneOf { at: |rule: &mut SetState| &mut rule.event, words: EVENTS }),
    number(
        "state",
        &Int { min: 0, max: STATE, at: |rule: &mut SetState| &mut rule.state },
        IN_STATE,
    ),
    Row::required("new_state", "state from then on; the first is 1").at(&Int {
        min: 0,
        max: STATE,
        at: |rule: &mut SetState| &mut rule.new_state,
    }),
];
