//! Options of `preallocate`.

use ::options::OptionError;
use ::options::place::{Checked, Of};
use ::options::table::{Field, Row};

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Child, Draft, file_row};

pub(in crate::drivers) static PREALLOCATE: DriverKind = DriverKind {
    name: "preallocate",
    help: "a file that is made longer ahead of the writes of the format above it",
    example: "preallocate,node-name=n,file=disk0,prealloc-align=1048576,prealloc-size=134217728",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: None,
    amend: None,
    library: None,
};

/// Options of `preallocate`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PreallocateOptions {
    /// `file`: the node below, named or nested.
    pub(super) file: BlockdevRef,
    pub(super) ahead: Ahead,
}

/// How much longer a file is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ahead {
    /// `prealloc-align`: the file ends at a multiple of so many bytes. 0 counts as 1.
    pub(super) align: u64,
    /// `prealloc-size`: bytes past the end of a write, at least.
    pub(super) size: u64,
}

impl Default for Ahead {
    fn default() -> Ahead {
        Ahead { align: 1 << 20, size: 128 << 20 }
    }
}

type Node = Draft<PreallocateOptions>;

pub(super) static FIELDS: &[Field<Node>] = &[
    file_row(&Child(|node: &mut PreallocateOptions| &mut node.file)),
    Row::default(
        "prealloc-align",
        "1048576",
        "the file ends at a multiple of so many bytes, itself a multiple of 512",
    )
    .at(&Checked {
        meta: "",
        check: |bytes: &u64| match bytes % 512 {
            0 => Ok(()),
            _ => Err(OptionError::new(
                "prealloc-align parameter of preallocate filter is not aligned to 512",
            )),
        },
        at: |node: &mut Node| &mut node.ahead.align,
    }),
    Row::default(
        "prealloc-size",
        "134217728",
        "bytes past the end of a write by which the file is made longer, at least",
    )
    .at(&Of(|node: &mut Node| &mut node.ahead.size)),
];
