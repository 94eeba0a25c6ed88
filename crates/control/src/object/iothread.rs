//! `iothread`: a thread that runs an event loop.

use std::path::Path;

use event_loop::{PollGoal, PollPolicy};

use super::{ObjectOptions, ObjectType, Property, TypeRow, check_id};
use crate::error::OptionError;
use crate::place::OneOf;
use crate::rows::ThreadDraft;
use crate::shape::Shape;
use crate::table::{self, Context, Field, Kind, Need, Row, Table, put};
use crate::value::{Dialect, Value};

/// `iothread`: a thread that runs an event loop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IothreadOptions {
    /// `id`: its name.
    pub id: String,
    /// `poll-policy`, ringmill only: how the busy-polling time is chosen.
    pub poll_policy: PollPolicy,
    /// `poll-goal`, ringmill only: what a measured time optimises.
    pub poll_goal: PollGoal,
    /// `poll-max-ns`: the maximum busy-polling time before a sleep, nanoseconds. 0: no polling. `None`: derived from the
    /// measured cost of a sleep, and QEMU's 32768 for its policies.
    pub poll_max_ns: Option<u64>,
    /// `poll-grow`: what the window is multiplied by when it was too short. 0: the default.
    pub poll_grow: u64,
    /// `poll-shrink`: what the window is divided by when it was too long. 0: the default.
    pub poll_shrink: u64,
    /// `poll-weight`: how slowly the window follows the latest interval, as a shift; at most 63.
    /// 0: the default.
    pub poll_weight: u32,
    /// `aio-max-batch`: maximum requests per submission. 0: the loop decides.
    pub aio_max_batch: u64,
    /// `thread-pool-min`: threads kept for blocking work; at most 1024.
    pub thread_pool_min: u32,
    /// `thread-pool-max`: most threads for blocking work; at least 1 and `thread_pool_min`.
    pub thread_pool_max: u32,
    /// `cpu-affinity`: CPUs of the thread and its pool, each at most 1023. Empty: all CPUs of the daemon. Ringmill only,
    /// named after the option of QEMU's `thread-context`.
    pub cpu_affinity: Vec<usize>,
}

impl Default for IothreadOptions {
    fn default() -> Self {
        Self {
            id: String::new(),
            poll_policy: PollPolicy::default(),
            poll_goal: PollGoal::default(),
            poll_max_ns: None,
            poll_grow: 0,
            poll_shrink: 0,
            poll_weight: 0,
            aio_max_batch: 0,
            thread_pool_min: 0,
            thread_pool_max: 64,
            cpu_affinity: Vec::new(),
        }
    }
}

impl ThreadDraft for IothreadOptions {
    fn poll_max_ns(&mut self) -> &mut Option<u64> {
        &mut self.poll_max_ns
    }
}

impl IothreadOptions {
    /// Returns its visible properties while it runs.
    ///
    /// `poll_max_ns` is the present maximum of the polling time.
    pub fn properties(&self, poll_max_ns: u64) -> Vec<Property> {
        let int = |name, value: u64| {
            let value = Value::Integer(i64::try_from(value).unwrap_or(i64::MAX));
            Property { name, kind: "int", value }
        };
        let mut written = table::write(FIELDS, &mut self.clone());
        let mut word = |name, kind| {
            let value = table::take(&mut written, name).unwrap_or(Value::Null);
            Property { name, kind, value }
        };
        vec![
            word("poll-policy", "PollPolicy"),
            word("poll-goal", "PollGoal"),
            int("poll-max-ns", poll_max_ns),
            int("poll-grow", self.poll_grow),
            int("poll-shrink", self.poll_shrink),
            int("poll-weight", self.poll_weight.into()),
            int("aio-max-batch", self.aio_max_batch),
            int("thread-pool-min", self.thread_pool_min.into()),
            int("thread-pool-max", self.thread_pool_max.into()),
        ]
    }

    /// Returns the options with one property changed, for `qom-set`.
    ///
    /// # Errors
    ///
    /// The property does not exist, or the value is invalid.
    pub fn with_property(&self, name: &str, value: Value) -> Result<Self, OptionError> {
        let field = FIELDS.iter().find(|field| field.name == name);
        let shown = self.properties(0).iter().any(|property| property.name == name);
        let Some(field) = field.filter(|_| shown) else {
            return Err(OptionError::new(format!("Property 'iothread.{name}' not found")));
        };
        let mut changed = self.clone();
        field.set(&mut changed, value, &Context::new(Dialect::Json))?;
        changed.check()?;
        Ok(changed)
    }

    fn check(&self) -> table::Set {
        if self.thread_pool_max == 0 || self.thread_pool_min > self.thread_pool_max {
            return Err(bad_pool());
        }
        if self.thread_pool_min > MAX_KEPT_THREADS {
            return Err(too_many_kept(self.thread_pool_min));
        }
        Ok(())
    }
}

const ANY: std::ops::RangeInclusive<i64> = 0..=i64::MAX;

impl ObjectType for IothreadOptions {
    fn id(&self) -> &str {
        &self.id
    }

    fn type_name(&self) -> &'static str {
        "iothread"
    }

    fn path(&self) -> Option<&Path> {
        None
    }
}

pub(super) static IOTHREAD: TypeRow = TypeRow {
    name: "iothread",
    help: "a thread with an event loop, which serves exports",
    example: "iothread,id=o,poll-max-ns=0,cpu-affinity=0-3",
    parent: "event-loop-base",
    table: &Table {
        fields: FIELDS,
        build: |iothread| {
            iothread.check()?;
            Ok(ObjectOptions::Iothread(iothread))
        },
    },
};

static FIELDS: &[Field<IothreadOptions>] = &[
    Row::required("id", "name of the I/O thread, for exports to refer to")
        .text("<id>", |iothread, id| put(&mut iothread.id, check_id(id)?)),
    Row::default(
        "poll-policy",
        "measured",
        "how the time to busy-poll is chosen (ringmill's own option); poll-grow and \
         poll-shrink are for weighted and stepped",
    )
    .at(&OneOf {
        at: |iothread: &mut IothreadOptions| &mut iothread.poll_policy,
        words: &PollPolicy::ALL,
    }),
    Row::default(
        "poll-goal",
        "balanced",
        "what the measured policy weighs (ringmill's own option)",
    )
    .at(&OneOf {
        at: |iothread: &mut IothreadOptions| &mut iothread.poll_goal,
        words: &[
            ("latency", PollGoal::Latency, "a microsecond of latency is worth four of CPU time"),
            (
                "balanced",
                PollGoal::Balanced,
                "a microsecond of latency is worth half of one of CPU time",
            ),
            ("cpu", PollGoal::Cpu, "poll only where that saves CPU time"),
        ],
    }),
    IothreadOptions::POLL_MAX_NS,
    Row::default(
        "poll-grow",
        "0",
        "factor by which a poll window that was too short grows; 0 means 2",
    )
    .int(ANY, |o, n| unsigned(n, &mut o.poll_grow)),
    Row::default(
        "poll-shrink",
        "0",
        "divisor by which a poll window that was too long shrinks; 0 means 2",
    )
    .int(ANY, |o, n| unsigned(n, &mut o.poll_shrink)),
    Field {
        name: "poll-weight",
        // The weight is a shift of a 64-bit number.
        kind: Kind::Int { range: 0..=63, set: |o, n| unsigned(n, &mut o.poll_weight) },
        need: Need::Default("0"),
        help: "how slowly the poll window follows the latest interval (1 fast, 4 slow); 0 means 3",
    },
    Row::default(
        "aio-max-batch",
        "0",
        "most requests handed to the kernel at once; 0 lets the loop decide",
    )
    .int(ANY, |o, n| unsigned(n, &mut o.aio_max_batch)),
    Row::default("thread-pool-min", "0", "threads kept ready for blocking work; at most 1024")
        .int(ANY, |o, n| pool(n, &mut o.thread_pool_min)),
    Row::default(
        "thread-pool-max",
        "64",
        "most threads for blocking work; there are never more than 1024",
    )
    .int(ANY, |o, n| pool(n, &mut o.thread_pool_max)),
    Row::optional(
        "cpu-affinity",
        "all that the daemon may run on",
        "CPUs the thread and its pool may run on: a number, or a range such as 0-3",
    )
    .nested(
        || {
            let cpus =
                || Shape::Either(vec![Shape::Int(0..=MAX_CPU as i64), Shape::Text("<cpus>")]);
            let list = Shape::List(Box::new(cpus()), "range number <n> of CPUs, from 0");
            Shape::Either(vec![Shape::Int(0..=MAX_CPU as i64), Shape::Text("<cpus>"), list])
        },
        cpu_affinity,
    ),
];

/// The highest CPU number in the usual set of sched_setaffinity(2).
const MAX_CPU: usize = 1023;

/// `cpu-affinity=0-3`, or a list of such.
fn cpu_affinity(iothread: &mut IothreadOptions, value: Value, at: &Context) -> table::Set {
    let name = at.whole();
    let wrong = || {
        OptionError::new(format!("Parameter '{name}' expects a CPU or a range of CPUs")).hint(
            format!(
                "For example {name}=2, {name}=0-3, or a list {name}.0=0-3,{name}.1=8; CPUs are \
                 numbered from 0 to {MAX_CPU}."
            ),
        )
    };
    let items = match value {
        Value::List(items) if items.is_empty() => return Err(wrong()),
        Value::List(items) => items,
        one => vec![one],
    };
    for item in items {
        let cpus = match item {
            Value::Integer(cpu) => usize::try_from(cpu).ok().map(|cpu| cpu..=cpu),
            Value::Text(text) => cpu_range(&text),
            _ => None,
        };
        let cpus = cpus.filter(|cpus| cpus.start() <= cpus.end() && *cpus.end() <= MAX_CPU);
        iothread.cpu_affinity.extend(cpus.ok_or_else(wrong)?);
    }
    Ok(())
}

fn cpu_range(text: &str) -> Option<std::ops::RangeInclusive<usize>> {
    let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => text.parse().ok(),
        false => None,
    };
    match text.split_once('-') {
        Some((first, last)) => Some(number(first)?..=number(last)?),
        None => number(text).map(|cpu| cpu..=cpu),
    }
}

/// Stores a number whose range the table has checked.
fn unsigned<N: TryFrom<i64>>(number: i64, into: &mut N) -> table::Set {
    *into = N::try_from(number).map_err(|_| OptionError::new("number out of range"))?;
    Ok(())
}

/// Maximum number of threads that a pool may keep, as in the event loop. QEMU's limit is that of an int.
const MAX_KEPT_THREADS: u32 = 1024;

fn pool(number: i64, into: &mut u32) -> table::Set {
    *into = u32::try_from(number)
        .ok()
        .filter(|threads| i32::try_from(*threads).is_ok())
        .ok_or_else(bad_pool)?;
    Ok(())
}

fn bad_pool() -> OptionError {
    OptionError::new("bad thread-pool-min/thread-pool-max values").hint(
        "thread-pool-max must be at least 1, at least thread-pool-min, and at most 2147483647.",
    )
}

fn too_many_kept(threads: u32) -> OptionError {
    OptionError::new(format!("thread-pool-min={threads} is more threads than a pool can have"))
        .hint(format!("Threads kept ready are at most {MAX_KEPT_THREADS}."))
}
