//! `blockdev-create`.

use std::path::PathBuf;

use block::drivers;
use block::options::{RbdOptions, rbd_members, read_rbd};
use control::qmp::Returns;
use options::OptionError;
use options::shape::{Shape, Union, Variant};
use options::table::{self, Choice, Context, Field, Kind, Need, Reads, Table, not_yet, put};
use options::value::Value;
use serde_json::json;

use super::super::Command;
use crate::DaemonError;
use crate::jobs::{CreateOptions, JobOptions, Preallocation};

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
    options: Option<CreateOptions>,
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
                    variants: vec![
                        Variant {
                            name: "file",
                            help: "a regular file",
                            example: "",
                            members: FILE.members(),
                        },
                        Variant {
                            name: "rbd",
                            help: "an image of a Ceph cluster",
                            example: "",
                            members: RBD.members(),
                        },
                    ],
                })
            },
            read: |to, value, at| put(&mut to.options, Some(read_create(value, at)?)),
        },
        need: Need::Required,
        help: "what to make",
    },
];

fn read_create(value: Value, at: &Context) -> Result<CreateOptions, OptionError> {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let driver = match table::take(&mut object, "driver") {
        Some(value) => table::text(value, &at.full("driver"), at)?,
        None => return Err(table::missing(&at.full("driver"))),
    };
    match driver.as_str() {
        "file" => FILE.read(object, at, &["driver"], "driver 'file'"),
        "rbd" => RBD.read(object, at, &["driver"], "driver 'rbd'"),
        "qcow2" => Err(OptionError::not_yet("blockdev-create with driver 'qcow2'")
            .hint("qemu-img create makes one, and blockdev-snapshot-sync one above a node.")),
        other => {
            // Those that QSD can open and cannot make have no options to be made with.
            let known = drivers::all().any(|row| row.name == other);
            match (known, object.first()) {
                (true, Some((name, _))) => Err(unexpected(at, name)),
                (true, None) => Err(OptionError::new("Driver does not support blockdev-create")),
                (false, _) => {
                    Err(table::not_accepted("driver", at, other, ["file", "rbd"].into_iter()))
                }
            }
        }
    }
}

fn unexpected(at: &Context, name: &str) -> OptionError {
    OptionError::new(format!("Parameter '{}' is unexpected", at.full(name)))
        .hint("Images of this driver cannot be made; files and rbd images can.")
}

#[derive(Default)]
struct File {
    filename: PathBuf,
    size: u64,
    preallocation: Preallocation,
}

static FILE: Table<File, CreateOptions> = Table {
    fields: &[
        Field {
            name: "filename",
            kind: Kind::Path(|file, path| put(&mut file.filename, path)),
            need: Need::Required,
            help: "where it is made; a file that is there is emptied",
        },
        Field {
            name: "size",
            kind: Kind::Bytes(|file, size| put(&mut file.size, size)),
            need: Need::Required,
            help: "size of the disk",
        },
        Field {
            name: "preallocation",
            kind: Kind::Choice(&[
                Choice {
                    name: "off",
                    help: "sparse",
                    set: |file| put(&mut file.preallocation, Preallocation::Off),
                },
                Choice {
                    name: "falloc",
                    help: "its space is reserved",
                    set: |file| put(&mut file.preallocation, Preallocation::Falloc),
                },
                Choice {
                    name: "full",
                    help: "its space is written with zeroes",
                    set: |file| put(&mut file.preallocation, Preallocation::Full),
                },
            ]),
            need: Need::Default("off"),
            help: "how its space is allocated beforehand",
        },
    ],
    build: |file: File| {
        let File { filename, size, preallocation } = file;
        Ok(CreateOptions::File { filename, size, preallocation })
    },
};

#[derive(Default)]
struct Rbd {
    location: Option<RbdOptions>,
    size: u64,
    object_size: Option<u64>,
}

static RBD: Table<Rbd, CreateOptions> = Table {
    fields: &[
        Field {
            name: "location",
            kind: Kind::Nested {
                shape: || Shape::Object(rbd_members()),
                read: |rbd, value, at| put(&mut rbd.location, Some(read_rbd(value, at)?)),
            },
            need: Need::Required,
            help: "where it is made, as of driver rbd; without a snapshot",
        },
        Field {
            name: "size",
            kind: Kind::Bytes(|rbd, size| put(&mut rbd.size, size)),
            need: Need::Required,
            help: "size of the disk",
        },
        Field {
            name: "cluster-size",
            kind: Kind::Bytes(|rbd, size| {
                if !size.is_power_of_two() {
                    return Err(OptionError::new("RBD cluster size must be a power of two"));
                }
                put(&mut rbd.object_size, Some(size))
            }),
            need: Need::Optional("Ceph's default"),
            help: "bytes of the objects that the image is kept in",
        },
        Field::unoffered("encrypt", not_yet),
    ],
    build: |rbd: Rbd| {
        let Rbd { location, size, object_size } = rbd;
        let location = location.ok_or_else(|| table::missing("location"))?;
        if location.snapshot.is_some() {
            return Err(OptionError::new("Can't create snapshots"));
        }
        Ok(CreateOptions::Rbd { location, size, object_size })
    },
};
