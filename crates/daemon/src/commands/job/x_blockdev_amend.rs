//! `x-blockdev-amend`.

use block::{AmendKind, Amendment, drivers};
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
    name: "x-blockdev-amend",
    help: "change the passwords of an encrypted image, in a job",
    example: r#"{"job-id": "j0", "node-name": "disk0", "options": {"driver": "luks", "state": "active", "new-secret": "sec1"}}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, Arguments { id, node, options, force }| {
        Box::pin(async move {
            let options = options.ok_or_else(|| table::missing("options"));
            let Options { driver, amendment } = options.map_err(DaemonError::from)?;
            let job = JobOptions { auto_dismiss: false, id, ..JobOptions::default() };
            daemon.start_amend(job, &node, driver, amendment, force)?;
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    id: String,
    node: String,
    options: Option<Options>,
    force: bool,
}

struct Options {
    driver: &'static str,
    amendment: Box<dyn Amendment>,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Field {
        name: "job-id",
        kind: Kind::Text { meta: "<job-id>", set: |to, id| put(&mut to.id, id) },
        need: Need::Required,
        help: "the job's name",
    },
    Field {
        name: "node-name",
        kind: Kind::Text { meta: "<node>", set: |to, node| put(&mut to.node, node) },
        need: Need::Required,
        help: "the image's node",
    },
    Field {
        name: "options",
        kind: Kind::Nested {
            shape: || {
                Shape::Union(Union {
                    tag: "driver",
                    help: "the node's driver",
                    common: Vec::new(),
                    variants: kinds().map(variant).collect(),
                })
            },
            read: |to, value, at| put(&mut to.options, Some(read_amend(value, at)?)),
        },
        need: Need::Required,
        help: "what to change",
    },
    Field {
        name: "force",
        kind: Kind::Bool(|to, force| put(&mut to.force, force)),
        need: Need::Default("off"),
        help: "erase the last password too, which loses all data, and replace passwords",
    },
];

fn read_amend(value: Value, at: &Context) -> Result<Options, OptionError> {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let driver = match table::take(&mut object, "driver") {
        Some(value) => table::text(value, &at.full("driver"), at)?,
        None => return Err(table::missing(&at.full("driver"))),
    };
    if let Some((name, amend)) = kinds().find(|(name, _)| *name == driver) {
        let amendment =
            amend.options.read(object, at, &["driver"], &format!("driver '{driver}'"))?;
        return Ok(Options { driver: name, amendment });
    }
    match drivers::all().any(|row| row.name == driver) {
        true => Err(OptionError::new("Driver does not support x-blockdev-amend")),
        false => Err(table::not_accepted("driver", at, &driver, kinds().map(|(name, _)| name))),
    }
}

/// The drivers that amend images, with their names.
fn kinds() -> impl Iterator<Item = (&'static str, &'static AmendKind)> {
    drivers::all().filter_map(|driver| Some((driver.name, driver.amend?)))
}

fn variant((name, amend): (&'static str, &'static AmendKind)) -> Variant {
    Variant { name, help: amend.help, example: "", members: amend.options.members() }
}
