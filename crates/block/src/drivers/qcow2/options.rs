//! `qcow2`: QEMU's image format.

use super::caches::CacheSizes;
use super::encrypt::{self, Encrypt};
use super::header::Header;
use super::overlap::{self, OverlapCheck};
use crate::error::OpenError;
use crate::options::{
    BlockdevRef, Child, ChildValue, Draft, Inherited, file_row, read_ref, write_ref,
};

use crate::driver::{DriverKind, OptionTable};
use ::options::place::{Checked, Custom, Of, Place, Text};
use ::options::shape::Shape;
use ::options::table::{Context, Field, Kind, Need, Row, only_off};
use ::options::{OptionError, Value};

pub(in crate::drivers) static QCOW2: DriverKind = DriverKind {
    name: "qcow2",
    help: "QEMU's image format: grows with writes, and may have a backing image",
    example: "qcow2,node-name=n,file=disk0,backing=disk1,discard=unmap",
    options: &OptionTable {
        fields: FIELDS,
        start: Draft::new,
        build: |draft| {
            draft.caches.checked()?;
            draft.build()
        },
    },
    create: Some(&super::create::CREATE),
    amend: Some(&super::amend::AMEND),
    library: None,
};

/// Options of `qcow2`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Qcow2Options {
    /// `file`: the node that the image lies in.
    pub file: BlockdevRef,
    /// `data-file`: the node that the guest's data lies in, of an image made so. `None` means the file
    /// that the image names, if it needs one.
    pub data_file: Option<BlockdevRef>,
    /// `backing`: what lies behind the image.
    pub backing: Backing,
    /// `backing-changed`: a backing image on a server may have another content than the recorded one.
    pub backing_changed: bool,
    /// `pass-discard-request`: whether the node below gets discards of what the guest discards. `None`
    /// means if the image itself takes them, `discard=unmap`.
    pub pass_discard_request: Option<bool>,
    /// `pass-discard-snapshot`: whether the node below gets discards of what a deleted internal snapshot had. `None` means yes.
    pub pass_discard_snapshot: Option<bool>,
    /// `discard-no-unref`: clusters without data keep their place in the image.
    pub discard_no_unref: bool,
    /// Options that are accepted and change nothing.
    pub unheeded: Unheeded,
    /// Memory for tables.
    pub caches: CacheSizes,
    /// `encrypt`: the password of an encrypted image.
    pub encrypt: Option<Encrypt>,
    /// `snapshot`: the disk is shown as at that internal snapshot, an id or else a name.
    pub snapshot: Option<String>,
}

/// What lies behind an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Backing {
    /// The file that the image names, if it names one.
    #[default]
    Implicit,
    /// Nothing, whatever the image says: `backing` is null or, for a new node, the empty string.
    None,
    /// That node.
    Node(BlockdevRef),
}

/// Options of QEMU that are accepted and change nothing.
///
/// A node says so when it is opened.
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
    /// Checks that an image with that header could have the options. The messages are QEMU's.
    ///
    /// # Errors
    ///
    /// It could not.
    pub(super) fn check(&self, header: &Header) -> Result<(), OpenError> {
        if self.lazy_refcounts && header.version < 3 {
            return Err(OpenError::new(
                "Lazy refcounts require a qcow2 image with at least qemu 1.1 compatibility level",
            ));
        }
        match self.l2_entry {
            Some(bytes) if !bytes.is_power_of_two() || !(512..=header.cluster).contains(&bytes) => {
                Err(OpenError::new(format!(
                    "L2 cache entry size must be a power of two between 512 and the cluster size ({})",
                    header.cluster
                )))
            }
            Some(_) | None => Ok(()),
        }
    }

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

impl ChildValue for Backing {
    fn read(value: Value, inherited: Inherited, at: &Context) -> Result<Self, OptionError> {
        match value {
            Value::Null => Ok(Backing::None),
            // As in QSD, `blockdev-reopen` takes it for a name, which no node has.
            Value::Text(name) if name.is_empty() && !inherited.reopens => Ok(Backing::None),
            value => {
                let inherited = Inherited { read_only: true, auto_read_only: false, ..inherited };
                Ok(Backing::Node(read_ref(value, inherited, at)?))
            }
        }
    }

    fn write(&self) -> Option<Value> {
        match self {
            Backing::Implicit => None,
            Backing::None => Some(Value::Null),
            Backing::Node(node) => Some(write_ref(node)),
        }
    }
}

type Node = Draft<Qcow2Options>;

/// A number of bytes, of QAPI's type `int`.
const fn size(
    name: &'static str,
    need: Need,
    help: &'static str,
    place: &'static dyn Place<Node>,
) -> Field<Node> {
    Field { name, kind: Kind::At(place), need, help }
}

pub(super) static FIELDS: &[Field<Node>] = &[
    Field {
        help: "the node that the image lies in: by name, or defined in place",
        ..file_row(&Child(|node: &mut Qcow2Options| &mut node.file))
    },
    Row::optional(
        "backing",
        "what the image names, if it names something",
        "name of the backing node; empty, or null in JSON, for none",
    )
    .at(&Child(|node: &mut Qcow2Options| &mut node.backing)),
    Row::default(
        "backing-changed",
        "off",
        "accept a backing image on a web server whose content is not the one that the image was made for",
    )
    .at(&Of(|node: &mut Node| &mut node.backing_changed)),
    Row::optional(
        "data-file",
        "what the image names, if it needs one",
        "the node that the guest's data lies in, of an image made with data_file=…",
    )
    .at(&Child(|node: &mut Qcow2Options| &mut node.data_file)),
    Row::default(
        "lazy-refcounts",
        "off",
        "postpone writing reference counts; without effect: a flush writes all metadata, \
         and the journal spares the wait before",
    )
    .at(&Of(|node: &mut Node| &mut node.unheeded.lazy_refcounts)),
    Row::optional(
        "pass-discard-request",
        "on with discard=unmap",
        "pass the guest's discards on to the node below",
    )
    .at(&Of(|node: &mut Node| &mut node.pass_discard_request)),
    Row::optional(
        "pass-discard-snapshot",
        "on",
        "discard below what becomes free when a snapshot inside is deleted",
    )
    .at(&Of(|node: &mut Node| &mut node.pass_discard_snapshot)),
    Field::unoffered("pass-discard-other", only_off),
    Row::default(
        "discard-no-unref",
        "off",
        "clusters that are discarded keep their place in the image",
    )
    .at(&Of(|node: &mut Node| &mut node.discard_no_unref)),
    Row::optional(
        "overlap-check",
        "`cached`",
        "refuse writes that would destroy metadata of a damaged image; without effect: all \
         metadata but snapshots' L2 tables is always protected",
    )
    .at(&Custom {
        shape: overlap::shape,
        read: |node: &mut Node, value, at| {
            node.unheeded.overlap = Some(overlap::read(value, at)?);
            Ok(())
        },
        write: |node| node.unheeded.overlap.as_ref().map(OverlapCheck::write),
    }),
    size(
        "cache-size",
        Need::Optional("the sum of both"),
        "bytes of memory for tables of both kinds",
        &Of(|node: &mut Node| &mut node.caches.total),
    ),
    size(
        "l2-cache-size",
        Need::Optional("32 MiB"),
        "bytes of memory for L2 tables; 2 tables at least",
        &Of(|node: &mut Node| &mut node.caches.l2),
    ),
    size(
        "l2-cache-entry-size",
        Need::Optional("a whole table"),
        "bytes read of an L2 table at once; without effect: a table is read as a whole",
        &Of(|node: &mut Node| &mut node.unheeded.l2_entry),
    ),
    size(
        "refcount-cache-size",
        Need::Optional("4 MiB"),
        "bytes of memory for refcount blocks; 8 blocks at least",
        &Of(|node: &mut Node| &mut node.caches.refcounts),
    ),
    Row::default(
        "cache-clean-interval",
        "0",
        "seconds after which tables that were not used meanwhile leave the memory; 0: they \
         stay",
    )
    .at(&Checked {
        meta: "",
        check: |seconds: &u64| match u32::try_from(*seconds) {
            Ok(_) => Ok(()),
            Err(_) => Err(OptionError::new("Cache clean interval too big")),
        },
        at: |node: &mut Node| &mut node.caches.clean_interval,
    }),
    Row::optional("encrypt", "the image is not encrypted", "how the image's data is encrypted").at(
        &Custom {
            shape: || Shape::Union(encrypt::union()),
            read: |node: &mut Node, value, at| {
                node.encrypt = Some(encrypt::read(value, at)?);
                Ok(())
            },
            write: |node| node.encrypt.as_ref().map(Encrypt::write),
        },
    ),
    Row::optional(
        "snapshot",
        "the disk as it is",
        "show the disk at an internal snapshot, for reading: its id, or else its name",
    )
    .at(&Text("<id or name>", |node: &mut Node| &mut node.snapshot)),
];
