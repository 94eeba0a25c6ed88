//! `blockdev-create`: creates an image in a node.

use ::options::place::OneOf;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use ::options::shape::Shape;
use ::options::table::{self, Row, Table, put};
use crypto::Secret;

use super::encrypt;
use super::layout::{CreateQcow2, Space, create_qcow2_in, plan};
use super::plan::{Features, Plan};
use crate::create::{
    CreateContext, CreateKind, Creating, Fitted, NewImage, Preallocation, both, read_node, settle,
};
use crate::drivers::encryption::{NewLuks, password};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::{BlockdevRef, ref_shape};

pub(super) static CREATE: CreateKind =
    CreateKind { help: "a qcow2 image in a node", options: &OPTIONS };

/// An image to be created in a node.
#[derive(Debug)]
struct NewQcow2 {
    /// The node.
    file: BlockdevRef,
    /// The node of the data file.
    data_file: Option<BlockdevRef>,
    create: CreateQcow2,
    features: Features,
    preallocation: Preallocation,
    encrypt: Option<NewLuks>,
}

impl NewImage for NewQcow2 {
    fn nodes(&mut self) -> Vec<&mut BlockdevRef> {
        std::iter::once(&mut self.file).chain(&mut self.data_file).collect()
    }

    fn create(self: Box<Self>, context: &CreateContext<'_>) -> Creating {
        let begun = self.begin(context);
        let on_thread = context.on_thread.clone();
        Box::pin(async move {
            let Begun { luks, plan, space, node, file, data_file } = begun?;
            let (file, data_file) = both(Some(file), data_file).await?;
            let data_node = data_file.as_ref().map(|of| of.node.clone());
            let made = on_thread(Box::new(move || {
                let luks = luks.map(|(luks, password)| luks.make(&password)).transpose()?;
                create_qcow2_in(node, data_node, &plan, luks, space)
            }))
            .await;
            settle(made, [file, data_file]).await
        })
    }
}

type Resizing = Pin<Box<dyn Future<Output = Result<Fitted, OpenError>>>>;

/// A creation whose nodes are getting their sizes.
struct Begun {
    luks: Option<(NewLuks, Arc<Secret>)>,
    plan: Plan,
    space: Space,
    /// The node of the file.
    node: Arc<dyn BlockNode>,
    file: Resizing,
    data_file: Option<Resizing>,
}

impl NewQcow2 {
    fn begin(self: Box<Self>, context: &CreateContext<'_>) -> Result<Begun, OpenError> {
        let NewQcow2 { file, data_file, create, mut features, preallocation, encrypt } = *self;
        let file = file.name();
        let data_file = data_file.as_ref().map(BlockdevRef::name);
        let node = context.node(file)?;
        let old_len = node.geometry().size;
        if let Some(name) = data_file {
            context.node(name)?;
            if name == file {
                let why = "Parameters 'file' and 'data-file' name the same node";
                return Err(OpenError::new(why));
            }
            features.data_file = Some((context.filename)(name)?);
        }
        // The header's length is known before its contents are, which take seconds.
        let luks_len = encrypt.as_ref().map_or(0, NewLuks::header_len);
        let plan = plan(&create, &features, luks_len)?;
        let luks = encrypt.map(|luks| {
            let id = luks.key_secret.as_deref();
            let found = password(context.nodes.known_credentials(), id, "encrypt.key-secret");
            found.map(|password| (luks, password))
        });
        let luks = luks.transpose()?;
        let is_reserved = matches!(preallocation, Preallocation::Falloc | Preallocation::Full);
        let Some(name) = data_file else {
            if is_reserved && old_len > plan.len() {
                let why = "Could not resize image: Failed to resize underlying file: Cannot use \
                           preallocation for shrinking files";
                return Err(OpenError::new(why));
            }
            let space = Space::of(plan.data(), old_len, preallocation);
            let file = Box::pin(context.grow(file, plan.len()));
            return Ok(Begun { luks, plan, space, node, file, data_file: None });
        };
        let (size, is_raw) = (create.size, features.is_raw);
        let old = context.node(name)?.geometry().size;
        let space = match is_raw {
            // The disk has what the data file has.
            true => Space { allocated: (old.min(size)..size, preallocation), zeroed: 0..0 },
            false => Space::of(0..size, old, preallocation),
        };
        // As QEMU does: a data file of a disk without data is as long as the disk.
        let is_cut = preallocation == Preallocation::Off && !is_raw;
        let fit = move |old: u64| if is_cut { size } else { old.max(size) };
        let file = Box::pin(context.grow(file, plan.len()));
        let data_file = Some(Box::pin(context.resize(name, fit)) as Resizing);
        Ok(Begun { luks, plan, space, node, file, data_file })
    }
}

impl Space {
    /// The clusters of a disk that reads as zeroes, in a file of `old` bytes so far.
    fn of(data: Range<u64>, old: u64, preallocation: Preallocation) -> Space {
        let zeroed = match preallocation {
            Preallocation::Metadata => data.start..data.end.min(old),
            // Nothing refers to the old bytes, or they are written.
            Preallocation::Off | Preallocation::Falloc | Preallocation::Full => 0..0,
        };
        Space { allocated: (data, preallocation), zeroed }
    }
}

struct Draft {
    file: Option<BlockdevRef>,
    data_file: Option<BlockdevRef>,
    backing_file: Option<String>,
    backing_format: Option<&'static str>,
    create: CreateQcow2,
    features: Features,
    preallocation: Preallocation,
    encrypt: Option<NewLuks>,
}

impl Default for Draft {
    fn default() -> Draft {
        Draft {
            file: None,
            data_file: None,
            backing_file: None,
            backing_format: None,
            create: CreateQcow2::new(0),
            features: Features::default(),
            preallocation: Preallocation::default(),
            encrypt: None,
        }
    }
}

/// A size that is stored as 32 bits. A larger one stays out of range.
fn small(size: u64) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

static OPTIONS: Table<Draft, Box<dyn NewImage>> = Table {
    fields: &[
        Row::required("file", "the node that it is made in, over the node's contents")
            .nested(ref_shape, |image, node, at| put(&mut image.file, Some(read_node(node, at)?))),
        Row::required("size", "size of the disk")
            .bytes(|image, size| put(&mut image.create.size, size)),
        Row::optional("data-file", "the image has its data", "the node that is to have the data")
            .nested(ref_shape, |image, node, at| {
                put(&mut image.data_file, Some(read_node(node, at)?))
            }),
        Row::default("data-file-raw", "off", "the data file by itself is the disk's raw image")
            .bool(|image, on| put(&mut image.features.is_raw, on)),
        Row::default("version", "v3", "version of the format").at(&OneOf {
            at: |image: &mut Draft| &mut image.features.is_v2,
            words: &[("v2", true, "version 2, for QEMU before 1.1"), ("v3", false, "version 3")],
        }),
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
        Row::default("preallocation", "off", "what is allocated beforehand").at(&OneOf {
            at: |image: &mut Draft| &mut image.preallocation,
            words: &[
                ("off", Preallocation::Off, "nothing"),
                ("metadata", Preallocation::Metadata, "all clusters have a place"),
                ("falloc", Preallocation::Falloc, "the same, and their space is reserved"),
                ("full", Preallocation::Full, "the same, and their space is written with zeroes"),
            ],
        }),
        Row::default("compression-type", "zlib", "compression of clusters that are compressed").at(
            &OneOf {
                at: |image: &mut Draft| &mut image.features.zstd,
                words: &[("zlib", false, "deflate"), ("zstd", true, "Zstandard")],
            },
        ),
        Row::default("lazy-refcounts", "off", "mark the image for lazy reference counts")
            .bool(|image, on| put(&mut image.features.lazy_refcounts, on)),
        Row::default("extended-l2", "off", "allocate in parts of clusters: 32 subclusters each")
            .bool(|image, on| put(&mut image.create.extended_l2, on)),
        Row::optional("encrypt", "the image is not encrypted", "how the image's data is encrypted")
            .nested(
                || Shape::Union(encrypt::new_union()),
                |image, value, at| put(&mut image.encrypt, Some(encrypt::read_new(value, at)?)),
            ),
    ],
    build: |image: Draft| {
        let Draft { file, data_file, backing_file, backing_format, .. } = image;
        let Draft { create, features, preallocation, encrypt, .. } = image;
        let file = file.ok_or_else(|| table::missing("file"))?;
        let features = Features {
            is_mapped: preallocation != Preallocation::Off,
            has_only_format: backing_file.is_none() && backing_format.is_some(),
            ..features
        };
        // As in QEMU, an empty name is none.
        let backing_file = backing_file.filter(|name| !name.is_empty());
        let backing = backing_file.map(|name| (name, backing_format.map(str::to_owned)));
        let create = CreateQcow2 { backing, ..create };
        Ok(Box::new(NewQcow2 { file, data_file, create, features, preallocation, encrypt }))
    },
};
