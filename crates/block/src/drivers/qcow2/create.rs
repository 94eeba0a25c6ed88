//! `blockdev-create`: creates an image in a node.

use ::options::OptionError;
use ::options::shape::Shape;
use ::options::table::{self, Choice, Field, Kind, Need, Table, not_yet, only_off, put};

use super::encrypt;
use super::layout::{CreateQcow2, create_qcow2_in};
use crate::create::{CreateContext, CreateKind, Creating, NewImage};
use crate::drivers::encryption::{NewLuks, password};

pub(super) static CREATE: CreateKind =
    CreateKind { help: "a qcow2 image in a node", options: &OPTIONS };

/// An image to be created in a node.
#[derive(Debug)]
struct NewQcow2 {
    /// The node.
    file: String,
    create: CreateQcow2,
    encrypt: Option<NewLuks>,
}

impl NewImage for NewQcow2 {
    fn nodes(&self) -> Vec<&str> {
        vec![&self.file]
    }

    fn create(self: Box<Self>, context: &CreateContext<'_>) -> Creating {
        let NewQcow2 { file, create, encrypt } = *self;
        let luks = encrypt.map(|luks| {
            let id = luks.key_secret.as_deref();
            let found = password(context.nodes.known_credentials(), id, "encrypt.key-secret");
            found.map(|password| (luks, password))
        });
        let begun = luks.transpose().and_then(|luks| {
            // The header's length is known before its contents are, which take seconds.
            let luks_len = luks.as_ref().map_or(0, |(luks, _)| luks.header_len());
            let size = create.file_size(luks_len)?;
            Ok((luks, context.grow(&file, size)))
        });
        let on_thread = context.on_thread.clone();
        Box::pin(async move {
            let (luks, grown) = begun?;
            let node = grown.await?;
            on_thread(Box::new(move || {
                let luks = luks.map(|(luks, password)| luks.make(&password)).transpose()?;
                create_qcow2_in(node, &create, luks)
            }))
            .await
        })
    }
}

struct Draft {
    file: Option<String>,
    backing_file: Option<String>,
    backing_format: Option<&'static str>,
    create: CreateQcow2,
    encrypt: Option<NewLuks>,
}

impl Default for Draft {
    fn default() -> Draft {
        let create = CreateQcow2::new(0);
        Draft { file: None, backing_file: None, backing_format: None, create, encrypt: None }
    }
}

/// A size that is stored as 32 bits. A larger one stays out of range.
fn small(size: u64) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

static OPTIONS: Table<Draft, Box<dyn NewImage>> = Table {
    fields: &[
        Field {
            name: "file",
            kind: Kind::Text {
                meta: "<node>",
                set: |image, node| put(&mut image.file, Some(node)),
            },
            need: Need::Required,
            help: "the node that it is made in, over the node's contents",
        },
        Field {
            name: "size",
            kind: Kind::Bytes(|image, size| put(&mut image.create.size, size)),
            need: Need::Required,
            help: "size of the disk",
        },
        Field {
            name: "version",
            kind: Kind::Choice(&[Choice { name: "v3", help: "version 3", set: |_| Ok(()) }]),
            need: Need::Default("v3"),
            help: "version of the format",
        },
        Field {
            name: "backing-file",
            kind: Kind::Text {
                meta: "<name>",
                set: |image, name| put(&mut image.backing_file, Some(name)),
            },
            need: Need::Optional("none"),
            help: "what the header names as backing file, relative to the image",
        },
        Field {
            name: "backing-fmt",
            kind: Kind::Choice(&[
                Choice {
                    name: "raw",
                    help: "bytes",
                    set: |image| put(&mut image.backing_format, Some("raw")),
                },
                Choice {
                    name: "qcow2",
                    help: "an image of this format",
                    set: |image| put(&mut image.backing_format, Some("qcow2")),
                },
                Choice {
                    name: "luks",
                    help: "an encrypted image",
                    set: |image| put(&mut image.backing_format, Some("luks")),
                },
            ]),
            need: Need::Optional("not named"),
            help: "format of the backing file",
        },
        Field {
            name: "cluster-size",
            kind: Kind::Bytes(|image, size| put(&mut image.create.cluster_size, small(size))),
            need: Need::Default("65536"),
            help: "bytes of a cluster: a power of two, 512 to 2 MiB",
        },
        Field {
            name: "refcount-bits",
            kind: Kind::Int {
                range: 0..=i64::MAX,
                set: |image, bits| {
                    put(&mut image.create.refcount_bits, small(bits.cast_unsigned()))
                },
            },
            need: Need::Default("16"),
            help: "bits of a reference count: a power of two, 1 to 64",
        },
        Field {
            name: "preallocation",
            kind: Kind::Choice(&[Choice { name: "off", help: "none", set: |_| Ok(()) }]),
            need: Need::Default("off"),
            help: "what is allocated beforehand",
        },
        Field {
            name: "compression-type",
            kind: Kind::Choice(&[Choice { name: "zlib", help: "deflate", set: |_| Ok(()) }]),
            need: Need::Default("zlib"),
            help: "compression of clusters that are compressed",
        },
        Field::unoffered("lazy-refcounts", only_off),
        Field {
            name: "extended-l2",
            kind: Kind::Bool(|image, on| put(&mut image.create.extended_l2, on)),
            need: Need::Default("off"),
            help: "allocate in parts of clusters: 32 subclusters each",
        },
        Field::unoffered("data-file", not_yet),
        Field::unoffered("data-file-raw", only_off),
        Field {
            name: "encrypt",
            kind: Kind::Nested {
                shape: || Shape::Union(encrypt::new_union()),
                read: |image, value, at| {
                    put(&mut image.encrypt, Some(encrypt::read_new(value, at)?))
                },
            },
            need: Need::Optional("the image is not encrypted"),
            help: "how the image's data is encrypted",
        },
    ],
    build: |image: Draft| {
        let Draft { file, backing_file, backing_format, create, encrypt } = image;
        let file = file.ok_or_else(|| table::missing("file"))?;
        let backing = match (backing_file, backing_format) {
            (Some(name), format) => Some((name, format.map(str::to_owned))),
            (None, None) => None,
            (None, Some(_)) => {
                return Err(OptionError::new("Backing format cannot be used without backing file"));
            }
        };
        let create = CreateQcow2 { backing, ..create };
        Ok(Box::new(NewQcow2 { file, create, encrypt }))
    },
};
