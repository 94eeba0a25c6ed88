//! `qcow2`: QEMU's image format.

use super::caches::CacheSizes;
use super::encrypt::{self, Encrypt};
use super::overlap::{self, OverlapCheck};
use crate::options::{BlockdevRef, Inherited, ParentDraft, read_ref, ref_shape};

use crate::driver::{DriverKind, OptionTable};
use ::options::Value;
use ::options::shape::Shape;
use ::options::table::{self, Field, Kind, Need, only_off, put};

pub(in crate::drivers) static QCOW2: DriverKind = DriverKind {
    name: "qcow2",
    help: "QEMU's image format: grows with writes, and may have a backing image",
    example: "qcow2,node-name=n,file=disk0,backing=disk1,discard=unmap",
    options: &OptionTable {
        fields: FIELDS,
        start: |inherited| Draft { inherited, ..Draft::default() },
        build: |draft| {
            Ok(Qcow2Options {
                file: draft.file.ok_or_else(|| table::missing("file"))?,
                data_file: draft.data_file,
                backing: draft.backing.unwrap_or(Backing::Implicit),
                pass_discard_request: draft.pass_discard_request,
                discard_no_unref: draft.discard_no_unref,
                unheeded: draft.unheeded,
                caches: draft.caches.checked()?,
                encrypt: draft.encrypt,
            }
            .into())
        },
    },
    create: Some(&super::create::CREATE),
    library: None,
};

/// Options of `qcow2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qcow2Options {
    /// `file`: the node that the image lies in.
    pub file: BlockdevRef,
    /// `data-file`: the node that the guest's data lies in, of an image made so. `None` means the file
    /// that the image names, if it needs one.
    pub data_file: Option<BlockdevRef>,
    /// `backing`: what lies behind the image.
    pub backing: Backing,
    /// `pass-discard-request`: whether the node below gets discards of what the guest discards. `None`
    /// means if the image itself takes them, `discard=unmap`.
    pub pass_discard_request: Option<bool>,
    /// `discard-no-unref`: clusters without data keep their place in the image.
    pub discard_no_unref: bool,
    /// Options that are accepted and change nothing.
    pub unheeded: Unheeded,
    /// Memory for tables.
    pub caches: CacheSizes,
    /// `encrypt`: the password of an encrypted image.
    pub encrypt: Option<Encrypt>,
}

/// What lies behind an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backing {
    /// The file that the image names, if it names one.
    Implicit,
    /// Nothing, whatever the image says: `backing` is null, or the empty string.
    None,
    /// That node.
    Node(BlockdevRef),
}

/// Options of QEMU that are accepted and change nothing. A node says so when it is opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unheeded {
    /// `lazy-refcounts`.
    pub lazy_refcounts: bool,
    /// `overlap-check`.
    pub overlap: Option<OverlapCheck>,
    /// `l2-cache-entry-size`, bytes.
    pub l2_entry: Option<u64>,
}

impl Unheeded {
    /// What was asked for and is not done, one sentence each.
    pub(super) fn sentences(&self) -> Vec<&'static str> {
        let Unheeded { lazy_refcounts, overlap, l2_entry } = self;
        let lazy = "lazy-refcounts=on has no effect: a flush writes reference counts with all other metadata";
        let entry = "l2-cache-entry-size has no effect: an L2 table is read as a whole";
        let lazy = lazy_refcounts.then_some(lazy);
        let entry = l2_entry.is_some().then_some(entry);
        lazy.into_iter()
            .chain(overlap.as_ref().and_then(OverlapCheck::sentence))
            .chain(entry)
            .collect()
    }
}

/// What was given.
#[derive(Default)]
struct Draft {
    inherited: Inherited,
    file: Option<BlockdevRef>,
    data_file: Option<BlockdevRef>,
    backing: Option<Backing>,
    pass_discard_request: Option<bool>,
    discard_no_unref: bool,
    unheeded: Unheeded,
    caches: CacheSizes,
    encrypt: Option<Encrypt>,
}

/// A number of bytes, of QAPI's type `int`.
const fn size(
    name: &'static str,
    need: Need,
    help: &'static str,
    set: fn(&mut Draft, i64) -> table::Set,
) -> Field<Draft> {
    Field { name, kind: Kind::Int { range: 0..=i64::MAX, set }, need, help }
}

impl ParentDraft for Draft {
    fn inherited(&self) -> Inherited {
        self.inherited
    }

    fn child(&mut self) -> &mut Option<BlockdevRef> {
        &mut self.file
    }
}

static FIELDS: &[Field<Draft>] = &[
    Field { help: "the node that the image lies in: by name, or defined in place", ..Draft::FILE },
    Field {
        name: "backing",
        kind: Kind::Nested {
            shape: ref_shape,
            read: |node, value, at| {
                let inherited = Inherited { read_only: true, ..node.inherited };
                node.backing = Some(match value {
                    Value::Null => Backing::None,
                    Value::Text(name) if name.is_empty() => Backing::None,
                    value => Backing::Node(read_ref(value, inherited, at)?),
                });
                Ok(())
            },
        },
        need: Need::Optional("what the image names, if it names something"),
        help: "name of the backing node; empty, or null in JSON, for none",
    },
    Field {
        name: "data-file",
        kind: Kind::Nested {
            shape: ref_shape,
            read: |node, value, at| {
                node.data_file = Some(read_ref(value, node.inherited, at)?);
                Ok(())
            },
        },
        need: Need::Optional("what the image names, if it needs one"),
        help: "the node that the guest's data lies in, of an image made with data_file=…",
    },
    Field {
        name: "lazy-refcounts",
        kind: Kind::Bool(|node, on| put(&mut node.unheeded.lazy_refcounts, on)),
        need: Need::Default("off"),
        help: "postpone writing reference counts; without effect: a flush writes all metadata, and the journal spares \
               the wait before",
    },
    Field {
        name: "pass-discard-request",
        kind: Kind::Bool(|node, on| put(&mut node.pass_discard_request, Some(on))),
        need: Need::Optional("on with discard=unmap"),
        help: "pass the guest's discards on to the node below",
    },
    Field {
        name: "pass-discard-snapshot",
        // Snapshots inside images are not deleted here.
        kind: Kind::Bool(|_, _| Ok(())),
        need: Need::Default("on"),
        help: "discard below when a snapshot inside is deleted; without effect, as none is",
    },
    Field::unoffered("pass-discard-other", only_off),
    Field {
        name: "discard-no-unref",
        kind: Kind::Bool(|node, on| put(&mut node.discard_no_unref, on)),
        need: Need::Default("off"),
        help: "clusters that are discarded keep their place in the image",
    },
    Field {
        name: "overlap-check",
        kind: Kind::Nested {
            shape: overlap::shape,
            read: |node, value, at| {
                put(&mut node.unheeded.overlap, Some(overlap::read(value, at)?))
            },
        },
        need: Need::Optional("`cached`"),
        help: "refuse writes that would destroy metadata of a damaged image; without effect: all metadata but \
               snapshots' L2 tables is always protected",
    },
    size(
        "cache-size",
        Need::Optional("the sum of both"),
        "bytes of memory for tables of both kinds",
        |node, size| put(&mut node.caches.total, Some(size.cast_unsigned())),
    ),
    size(
        "l2-cache-size",
        Need::Optional("32 MiB"),
        "bytes of memory for L2 tables; 2 tables at least",
        |node, size| put(&mut node.caches.l2, Some(size.cast_unsigned())),
    ),
    size(
        "l2-cache-entry-size",
        Need::Optional("a whole table"),
        "bytes read of an L2 table at once; without effect: a table is read as a whole",
        |node, size| put(&mut node.unheeded.l2_entry, Some(size.cast_unsigned())),
    ),
    size(
        "refcount-cache-size",
        Need::Optional("4 MiB"),
        "bytes of memory for refcount blocks; 8 blocks at least",
        |node, size| put(&mut node.caches.refcounts, Some(size.cast_unsigned())),
    ),
    Field {
        name: "cache-clean-interval",
        kind: Kind::Int {
            range: 0..=i64::MAX,
            set: |node, seconds| {
                let name = "cache-clean-interval";
                put(&mut node.caches.clean_interval, table::uint32(name, seconds)?.into())
            },
        },
        need: Need::Default("0"),
        help: "seconds after which tables that were not used meanwhile leave the memory; 0: they stay",
    },
    Field {
        name: "encrypt",
        kind: Kind::Nested {
            shape: || Shape::Union(encrypt::union()),
            read: |node, value, at| {
                node.encrypt = Some(encrypt::read(value, at)?);
                Ok(())
            },
        },
        need: Need::Optional("the image is not encrypted"),
        help: "how the image's data is encrypted",
    },
];
