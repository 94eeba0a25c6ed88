//! Options of `copy-before-write`.

use ::options::shape::Shape;
use ::options::table::{self, Choice, Context, Field, Kind, Need, put};
use ::options::{OptionError, Value};

use crate::driver::{DriverKind, OptionTable};
use crate::job::OnCbwError;
use crate::options::{BlockdevRef, Inherited, ParentDraft, read_ref, ref_shape};

/// The default of `min-cluster-size`, bytes.
pub(super) const CLUSTER: u64 = 1 << 16;

pub(in crate::drivers) static COPY_BEFORE_WRITE: DriverKind = DriverKind {
    name: "copy-before-write",
    help: "a disk of which another node gets what is about to be overwritten",
    example: "copy-before-write,node-name=n,file=disk0,target=disk1",
    options: &OptionTable {
        fields: FIELDS,
        start: |inherited| Draft { inherited, ..Draft::default() },
        build: |draft| {
            Ok(CopyBeforeWriteOptions {
                file: draft.file.ok_or_else(|| table::missing("file"))?,
                target: draft.target.ok_or_else(|| table::missing("target"))?,
                bitmap: draft.bitmap,
                on_cbw_error: draft.on_cbw_error,
                cbw_timeout: draft.cbw_timeout,
                min_cluster_size: draft.min_cluster_size,
            }
            .into())
        },
    },
    create: None,
    library: None,
};

/// Options of `copy-before-write`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CopyBeforeWriteOptions {
    /// `file`: the disk, named or nested.
    pub(super) file: BlockdevRef,
    /// `target`: the node that gets what is about to be overwritten.
    pub(super) target: BlockdevRef,
    /// `bitmap`: only its parts are kept. `None` means all.
    pub(super) bitmap: Option<BitmapName>,
    /// `on-cbw-error`.
    pub(super) on_cbw_error: OnCbwError,
    /// `cbw-timeout`, seconds. Zero means no limit.
    pub(super) cbw_timeout: u32,
    /// `min-cluster-size`, bytes.
    pub(super) min_cluster_size: u64,
}

/// A dirty bitmap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct BitmapName {
    /// The node that has it.
    pub(super) node: String,
    /// Its name.
    pub(super) name: String,
}

/// What was given.
#[derive(Default)]
struct Draft {
    inherited: Inherited,
    file: Option<BlockdevRef>,
    target: Option<BlockdevRef>,
    bitmap: Option<BitmapName>,
    on_cbw_error: OnCbwError,
    cbw_timeout: u32,
    min_cluster_size: u64,
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
    Draft::FILE,
    Field {
        name: "target",
        kind: Kind::Nested {
            shape: ref_shape,
            read: |node, value: Value, at| {
                node.target = Some(read_ref(value, node.inherited, at)?);
                Ok(())
            },
        },
        need: Need::Required,
        help: "the node that gets what is about to be overwritten: by name, or defined in place",
    },
    Field {
        name: "bitmap",
        kind: Kind::Nested {
            shape: || Shape::Object(table::members(BITMAP)),
            read: |node, value, at| put(&mut node.bitmap, Some(read_bitmap(value, at)?)),
        },
        need: Need::Optional("all of the disk"),
        help: "a dirty bitmap: only the parts that are set in it now are kept",
    },
    Field {
        name: "on-cbw-error",
        kind: Kind::Choice(&[
            Choice {
                name: "break-guest-write",
                help: "the write fails",
                set: |node| put(&mut node.on_cbw_error, OnCbwError::BreakGuestWrite),
            },
            Choice {
                name: "break-snapshot",
                help: "the write goes on, and what the disk was before cannot be read any more",
                set: |node| put(&mut node.on_cbw_error, OnCbwError::BreakSnapshot),
            },
        ]),
        need: Need::Default("break-guest-write"),
        help: "what happens to a write when what it overwrites cannot be copied",
    },
    Field {
        name: "cbw-timeout",
        kind: Kind::Int {
            range: i64::MIN..=i64::MAX,
            set: |node, seconds| put(&mut node.cbw_timeout, table::uint32("cbw-timeout", seconds)?),
        },
        need: Need::Default("0"),
        help: "seconds after which copying before a write has failed; 0: no limit",
    },
    Field {
        name: "min-cluster-size",
        kind: Kind::Bytes(|node, bytes| put(&mut node.min_cluster_size, bytes)),
        need: Need::Default("0"),
        help: "the smallest number of bytes that are copied at once, a power of two; at least 65536, and \
               a cluster of the target, are",
    },
];

static BITMAP: &[Field<BitmapName>] = &[
    Field {
        name: "node",
        kind: Kind::Text { meta: "<node-name>", set: |bitmap, name| put(&mut bitmap.node, name) },
        need: Need::Required,
        help: "the node that has the bitmap",
    },
    Field {
        name: "name",
        kind: Kind::Text { meta: "<name>", set: |bitmap, name| put(&mut bitmap.name, name) },
        need: Need::Required,
        help: "the bitmap's name",
    },
];

fn read_bitmap(value: Value, at: &Context) -> Result<BitmapName, OptionError> {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let mut bitmap = BitmapName::default();
    table::read(BITMAP, &mut bitmap, &mut object, at)?;
    table::refuse_rest(&object, at, "a bitmap", table::names(BITMAP))?;
    Ok(bitmap)
}
