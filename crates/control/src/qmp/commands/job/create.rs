//! `blockdev-create`: what its arguments are read into.

use std::path::PathBuf;

use block::options::{RbdOptions, rbd_members, read_rbd};

use super::run;
use crate::error::OptionError;
use crate::job::{CreateOptions, JobCommand, JobOptions, Preallocation};
use crate::qmp::commands::Job;
use crate::shape::{Shape, Union, Variant};
use crate::table::{self, Choice, Context, Field, Kind, Need, Reads, Table, not_yet, put};
use crate::value::Value;

/// The arguments.
pub(super) const BLOCKDEV_CREATE: &dyn Reads<Job> = &Table {
    fields: CREATE,
    build: |create: Create| {
        let job = JobOptions { auto_dismiss: false, id: create.id, ..JobOptions::default() };
        let options = create.options.ok_or_else(|| table::missing("options"))?;
        run(JobCommand::Create(job, options))
    },
};

#[derive(Default)]
struct Create {
    id: String,
    options: Option<CreateOptions>,
}

static CREATE: &[Field<Create>] = &[
    Field {
        name: "job-id",
        kind: Kind::Text { meta: "<job-id>", set: |create, id| put(&mut create.id, id) },
        need: Need::Required,
        help: "the job's name",
    },
    Field {
        name: "options",
        kind: Kind::Nested {
            shape: || {
                Shape::Union(Union {
                    tag: "driver",
                    help: "what kind of image it is",
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
            read: |create, value, at| put(&mut create.options, Some(read_create(value, at)?)),
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
            let known = block::drivers::all().any(|row| row.name == other);
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
            help: "what is done about its space beforehand",
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
