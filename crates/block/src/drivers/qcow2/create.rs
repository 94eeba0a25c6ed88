//! `blockdev-create`: creates an image in a node.

use ::options::OptionError;
use ::options::place::OneOf;
use ::options::shape::Shape;
use ::options::table::{self, Choice, Field, Row, Table, not_yet, only_off, put};

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
        Row::required("file", "the node that it is made in, over the node's contents")
            .text("<node>", |image, node| put(&mut image.file, Some(node))),
        Row::required("size", "size of the disk")
            .bytes(|image, size| put(&mut image.create.size, size)),
        Row::default("version", "v3", "version of the format").choice(&[Choice::new(
            "v3",
            "version 3",
            |_| Ok(()),
        )]),
        Row::optional(
            "backing-file",
            "none",
            "what the header names as backing file, relative to the image",
        )
        .text("<name>", |image, name| put(&mut image.backing_file, Some(name))),
        Row::optional("backing-fmt", "not named", "format of the backing file").at(&OneOf {
            at: |image: &mut Draft| &mut image.backing_format,
            words: &[
                ("raw", "raw", "bytes"),
                ("qcow2", "qcow2", "an image of this format"),
                ("luks", "luks", "an encrypted image"),
            ],
        }),
        Row::default("cluster-size", "65536", "bytes of a cluster: a power of two, 512 to 2 MiB")
            .bytes(|image, size| put(&mut image.create.cluster_size, small(size))),
        Row::default("refcount-bits", "16", "bits of a reference count: a power of two, 1 to 64")
            .int(0..=i64::MAX, |image, bits| {
                put(&mut image.create.refcount_bits, small(bits.cast_unsigned()))
            }),
        Row::default("preallocation", "off", "what is allocated beforehand")
            .choice(&[Choice::new("off", "none", |_| Ok(()))]),
        Row::default("compression-type", "zlib", "compression of clusters that are compressed")
            .choice(&[Choice::new("zlib", "deflate", |_| Ok(()))]),
        Field::unoffered("lazy-refcounts", only_off),
        Row::default("extended-l2", "off", "allocate in parts of clusters: 32 subclusters each")
            .bool(|image, on| put(&mut image.create.extended_l2, on)),
        Field::unoffered("data-file", not_yet),
        Field::unoffered("data-file-raw", only_off),
        Row::optional("encrypt", "the image is not encrypted", "how the image's data is encrypted")
            .nested(
                || Shape::Union(encrypt::new_union()),
                |image, value, at| put(&mut image.encrypt, Some(encrypt::read_new(value, at)?)),
            ),
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
