//! `qcow2`: QEMU's image format.

use crate::options::{BlockdevRef, Inherited, ParentDraft, read_ref, ref_shape};

use crate::driver::{DriverKind, OptionTable};
use ::options::table::{self, Choice, Field, Kind, Need, only_off, put};
use ::options::{OptionError, Value};

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
            }
            .into())
        },
    },
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

/// What was given.
#[derive(Default)]
struct Draft {
    inherited: Inherited,
    file: Option<BlockdevRef>,
    data_file: Option<BlockdevRef>,
    backing: Option<Backing>,
    pass_discard_request: Option<bool>,
    discard_no_unref: bool,
}

/// A size or time that the driver has its own for: a hint, which nothing but speed depends on.
const fn hint(name: &'static str, help: &'static str) -> Field<Draft> {
    let kind = Kind::Int { range: 0..=i64::MAX, set: |_, _| Ok(()) };
    Field { name, kind, need: Need::Optional("its own"), help }
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
        // Leave to postpone what is written with the rest anyway.
        kind: Kind::Bool(|_, _| Ok(())),
        need: Need::Default("off"),
        help: "postpone writing reference counts; without effect, as they are always written",
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
        kind: Kind::Choice(&[
            Choice { name: "none", help: "no checks", set: |_| Ok(()) },
            Choice { name: "constant", help: "as none", set: |_| Ok(()) },
            Choice { name: "cached", help: "as none", set: |_| Ok(()) },
            Choice { name: "all", help: "as none", set: |_| Ok(()) },
        ]),
        need: Need::Default("none"),
        help: "check writes against what a damaged image may have in their way; without effect: \
               qemu-img check finds such damage",
    },
    hint("cache-size", "bytes of memory for tables; without effect"),
    hint("l2-cache-size", "bytes of memory for L2 tables; without effect: 128 tables"),
    hint("l2-cache-entry-size", "bytes read of an L2 table at once; without effect: all of it"),
    hint("refcount-cache-size", "bytes of memory for reference counts; without effect: 32 blocks"),
    hint("cache-clean-interval", "seconds after which tables are forgotten; without effect"),
    Field::unoffered("encrypt", |_, _, _, _| {
        Err(OptionError::new("Encrypted qcow2 images are not supported")
            .hint("qemu-img convert makes an image without encryption of it."))
    }),
];
