//! `blockdev-create`.

use block::{CreateKind, NewImage, drivers};
use control::qmp::Returns;
use options::OptionError;
use options::shape::{Shape, Union, Variant};
use options::table::{self, Context, Field, Kind, Need, put};
use options::value::Value;
use serde_json::json;

use super::super::Command;
use crate::DaemonError;
use crate::jobs::JobOptions;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "blockdev-create",
    help: "create an image, in a job",
    example: r#"{"job-id": "j0", "options": {"driver": "file", "filename": "/srv/new.img", "size": 1048576}}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { id, options }| {
        Box::pin(async move {
            let options = options.ok_or_else(|| table::missing("options"));
            let job = JobOptions { auto_dismiss: false, id, ..JobOptions::default() };
            daemon.start_create(job, options.map_err(DaemonError::from)?)?;
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    id: String,
    options: Option<Box<dyn NewImage>>,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Field {
        name: "job-id",
        kind: Kind::Text { meta: "<job-id>", set: |to, id| put(&mut to.id, id) },
        need: Need::Required,
        help: "the job's name",
    },
    Field {
        name: "options",
        kind: Kind::Nested {
            shape: || {
                Shape::Union(Union {
                    tag: "driver",
                    help: "the kind of image",
                    common: Vec::new(),
                    variants: kinds().map(variant).collect(),
                })
            },
            read: |to, value, at| put(&mut to.options, Some(read_create(value, at)?)),
        },
        need: Need::Required,
        help: "what to make",
    },
];

fn read_create(value: Value, at: &Context) -> Result<Box<dyn NewImage>, OptionError> {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let driver = match table::take(&mut object, "driver") {
        Some(value) => table::text(value, &at.full("driver"), at)?,
        None => return Err(table::missing(&at.full("driver"))),
    };
    if let Some((_, create)) = kinds().find(|(name, _)| *name == driver) {
        return create.options.read(object, at, &["driver"], &format!("driver '{driver}'"));
    }
    // QSD can open images of other drivers, but cannot create images, and has no options for creation.
    let known = drivers::all().any(|row| row.name == driver);
    match (known, object.first()) {
        (true, Some((name, _))) => Err(unexpected(at, name)),
        (true, None) => Err(OptionError::new("Driver does not support blockdev-create")),
        (false, _) => {
            Err(table::not_accepted("driver", at, &driver, kinds().map(|(name, _)| name)))
        }
    }
}

/// The drivers that create images, with their names.
fn kinds() -> impl Iterator<Item = (&'static str, &'static CreateKind)> {
    drivers::all().filter_map(|driver| Some((driver.name, driver.create?)))
}

fn variant((name, create): (&'static str, &'static CreateKind)) -> Variant {
    Variant { name, help: create.help, example: "", members: create.options.members() }
}

fn unexpected(at: &Context, name: &str) -> OptionError {
    OptionError::new(format!("Parameter '{}' is unexpected", at.full(name)))
        .hint("Images of this driver cannot be made.")
}
