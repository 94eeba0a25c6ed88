//! `blockdev-create`.

use block::driver::DriverKind;
use block::{CreateKind, NewImage, drivers};
use control::qmp::Returns;
use options::OptionError;
use options::table::{self, Context, Field, Row, put};
use options::value::{Object, Value};

use super::super::Command;
use super::by_driver::{self, OfDriver};
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
            daemon.start_create(job, options.map_err(DaemonError::from)?).await
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    id: String,
    options: Option<Box<dyn NewImage>>,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("job-id", "the job's name").text("<job-id>", |to, id| put(&mut to.id, id)),
    Row::required("options", "what to make").nested(
        || by_driver::shape("the kind of image", &kinds()),
        |to, value, at| put(&mut to.options, Some(read_create(value, at)?)),
    ),
];

fn read_create(value: Value, at: &Context) -> Result<Box<dyn NewImage>, OptionError> {
    // QSD can open images of other drivers, but cannot create images, and has no options for creation.
    let unsupported = |options: &Object| match options.first() {
        Some((name, _)) => unexpected(at, name),
        None => OptionError::new("Driver does not support blockdev-create"),
    };
    Ok(by_driver::read(value, at, &kinds(), unsupported)?.1)
}

/// The drivers that create images.
fn kinds() -> Vec<OfDriver<Box<dyn NewImage>>> {
    let of = |driver: &DriverKind| {
        let CreateKind { help, options } = driver.create?;
        Some(OfDriver { name: driver.name, help, options: *options })
    };
    drivers::all().filter_map(of).collect()
}

fn unexpected(at: &Context, name: &str) -> OptionError {
    OptionError::new(format!("Parameter '{}' is unexpected", at.full(name)))
        .hint("Images of this driver cannot be made.")
}
