//! Options of `copy-before-write`.

use ::options::place::{Members, Of, OneOf, Size, Text};
use ::options::table::{Field, Row};

use crate::driver::{DriverKind, OptionTable};
use crate::job::OnCbwError;
use crate::options::{BlockdevRef, Child, Draft, file_row};

/// The default of `min-cluster-size`, bytes.
pub(super) const CLUSTER: u64 = 1 << 16;

pub(in crate::drivers) static COPY_BEFORE_WRITE: DriverKind = DriverKind {
    name: "copy-before-write",
    help: "a disk of which another node gets what is about to be overwritten",
    example: "copy-before-write,node-name=n,file=disk0,target=disk1",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: None,
    amend: None,
    library: None,
};

/// Options of `copy-before-write`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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

type Node = Draft<CopyBeforeWriteOptions>;

pub(super) static FIELDS: &[Field<Node>] = &[
    file_row(&Child(|node: &mut CopyBeforeWriteOptions| &mut node.file)),
    Row::required(
        "target",
        "the node that gets what is about to be overwritten: by name, or defined in place",
    )
    .at(&Child(|node: &mut CopyBeforeWriteOptions| &mut node.target)),
    Row::optional(
        "bitmap",
        "all of the disk",
        "a dirty bitmap: only the parts that are set in it now are kept",
    )
    .at(&Members { at: |node: &mut Node| &mut node.bitmap, fields: BITMAP, whom: "a bitmap" }),
    Row::default(
        "on-cbw-error",
        "break-guest-write",
        "what happens to a write when what it overwrites cannot be copied",
    )
    .at(&OneOf {
        at: |node: &mut Node| &mut node.on_cbw_error,
        words: &[
            ("break-guest-write", OnCbwError::BreakGuestWrite, "the write fails"),
            (
                "break-snapshot",
                OnCbwError::BreakSnapshot,
                "the write goes on, and what the disk was before cannot be read any more",
            ),
        ],
    }),
    Row::default(
        "cbw-timeout",
        "0",
        "seconds after which copying before a write has failed; 0: no limit",
    )
    .at(&Of(|node: &mut Node| &mut node.cbw_timeout)),
    Row::default(
        "min-cluster-size",
        "0",
        "the smallest number of bytes that are copied at once, a power of two; at least \
         65536, and a cluster of the target, are",
    )
    .at(&Size(|node: &mut Node| &mut node.min_cluster_size)),
];

static BITMAP: &[Field<BitmapName>] = &[
    Row::required("node", "the node that has the bitmap")
        .at(&Text("<node-name>", |bitmap: &mut BitmapName| &mut bitmap.node)),
    Row::required("name", "the bitmap's name")
        .at(&Text("<name>", |bitmap: &mut BitmapName| &mut bitmap.name)),
];
