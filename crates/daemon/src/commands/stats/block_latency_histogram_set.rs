//! `block-latency-histogram-set`.

use control::qmp::{QmpError, Returns};
use options::OptionError;
use options::shape::Shape;
use options::table::{self, Context, Field, Row, put};
use options::value::Value;
use stats::Kind as Operation;

use super::super::Command;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "block-latency-histogram-set",
    help: "count an export's latencies between boundaries, for query-blockstats; without boundaries, stop counting",
    example: r#"{"id": "export0", "boundaries": [100000, 1000000, 10000000]}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, arguments| {
        Box::pin(async move {
            let id = arguments.id.clone();
            let queues = daemon.exports.queues_of(&id);
            let queues = queues.ok_or_else(|| QmpError::device_not_found(&id))?;
            for (operation, boundaries) in arguments.boundaries()? {
                for queue in queues {
                    queue.count_in_bins(operation, boundaries.clone());
                }
            }
            Ok(())
        })
    },
};

/// Boundaries are in nanoseconds.
#[derive(Default)]
pub(super) struct Arguments {
    id: String,
    /// Boundaries of operations without a list of their own.
    all: Option<Vec<u64>>,
    read: Option<Vec<u64>>,
    write: Option<Vec<u64>>,
    flush: Option<Vec<u64>>,
    zone_append: bool,
}

/// Boundaries of a latency histogram: nanoseconds, in rising order. `None`: no histogram.
type Boundaries = Option<Vec<u64>>;

impl Arguments {
    /// Returns the new boundaries of each operation that changes.
    ///
    /// # Errors
    ///
    /// A list of boundaries is empty, does not rise, or begins with 0. Errors have QEMU's wording.
    fn boundaries(self) -> Result<Vec<(Operation, Boundaries)>, QmpError> {
        let Arguments { id, all, read, write, flush, zone_append } = self;
        let operations = [Operation::Read, Operation::Write, Operation::Flush];
        let given = [read, write, flush];
        if all.is_none() && !zone_append && given.iter().all(Option::is_none) {
            return Ok(operations.map(|operation| (operation, None)).to_vec());
        }
        let mut set = Vec::new();
        for (operation, own) in operations.into_iter().zip(given) {
            let Some(list) = own.or_else(|| all.clone()) else { continue };
            let rises = list.windows(2).all(|pair| pair.first() < pair.last());
            if !rises || list.first().is_none_or(|first| *first == 0) {
                let name = operation.name();
                return Err(QmpError::generic(format!("Device '{id}' set {name} boundaries fail")));
            }
            set.push((operation, Some(list)));
        }
        Ok(set)
    }
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("id", "the export's name").text("<id>", |to, id| put(&mut to.id, id)),
    Row::optional(
        "boundaries",
        "none",
        "boundaries of kinds that have none of their own, in nanoseconds, rising",
    )
    .nested(list, |to, value, at| put(&mut to.all, Some(numbers(value, at)?))),
    Row::optional("boundaries-read", "none", "boundaries of reads")
        .nested(list, |to, value, at| put(&mut to.read, Some(numbers(value, at)?))),
    Row::optional("boundaries-write", "none", "boundaries of writes")
        .nested(list, |to, value, at| put(&mut to.write, Some(numbers(value, at)?))),
    Row::optional("boundaries-zap", "none", "boundaries of zone appends, which there are none of")
        .nested(list, |to, value, at| {
            numbers(value, at)?;
            put(&mut to.zone_append, true)
        }),
    Row::optional("boundaries-flush", "none", "boundaries of flushes")
        .nested(list, |to, value, at| put(&mut to.flush, Some(numbers(value, at)?))),
];

fn list() -> Shape {
    Shape::List(Box::new(Shape::Int(0..=i64::MAX)), "")
}

fn numbers(value: Value, at: &Context) -> Result<Vec<u64>, OptionError> {
    let Value::List(list) = value else {
        return Err(table::wrong_type(at.whole(), "array"));
    };
    let number = |(place, value)| match value {
        Value::Integer(number) => Ok(number.cast_unsigned()),
        _ => {
            let name = at.whole();
            Err(OptionError::new(format!("Parameter '{name}[{place}]' expects uint64")))
        }
    };
    list.into_iter().enumerate().map(number).collect()
}
