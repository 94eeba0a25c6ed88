//! `x-blockdev-amend`.

use block::driver::DriverKind;
use block::{AmendKind, Amendment, drivers};
use control::qmp::Returns;
use options::OptionError;
use options::table::{self, Context, Field, Row, put};
use options::value::{Object, Value};

use super::super::Command;
use super::by_driver::{self, OfDriver};
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
            daemon.start_amend(job, &node, driver, amendment, force)
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
    Row::required("job-id", "the job's name").text("<job-id>", |to, id| put(&mut to.id, id)),
    Row::required("node-name", "the image's node")
        .text("<node>", |to, node| put(&mut to.node, node)),
    Row::required("options", "what to change").nested(
        || by_driver::shape("the node's driver", &kinds()),
        |to, value, at| put(&mut to.options, Some(read_amend(value, at)?)),
    ),
    Row::default(
        "force",
        "off",
        "erase the last password too, which loses all data, and replace passwords",
    )
    .bool(|to, force| put(&mut to.force, force)),
];

fn read_amend(value: Value, at: &Context) -> Result<Options, OptionError> {
    let unsupported = |_: &Object| OptionError::new("Driver does not support x-blockdev-amend");
    let (driver, amendment) = by_driver::read(value, at, &kinds(), unsupported)?;
    Ok(Options { driver, amendment })
}

/// The drivers that amend images.
fn kinds() -> Vec<OfDriver<Box<dyn Amendment>>> {
    let of = |driver: &DriverKind| {
        let AmendKind { help, options } = driver.amend?;
        Some(OfDriver { name: driver.name, help, options: *options })
    };
    drivers::all().filter_map(of).collect()
}
