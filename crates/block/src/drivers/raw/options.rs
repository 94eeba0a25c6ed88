//! `raw`: a part of, or all of, another node.

use ::options::OptionError;
use ::options::place::{Checked, Of};
use ::options::table::{self, Field, Row};

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Child, Draft, file_row};

pub(in crate::drivers) static RAW: DriverKind = DriverKind {
    name: "raw",
    help: "a part of, or all of, another node",
    example: "raw,node-name=n,file=disk0,offset=1048576,size=8589934592",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: None,
    amend: None,
    library: None,
};

/// Options of `raw`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawOptions {
    /// `file`: the node below, named or nested.
    pub file: BlockdevRef,
    /// `offset` of the first byte used, in bytes.
    pub offset: u64,
    /// `size` in bytes; `None` means up to the end of the node below.
    pub size: Option<u64>,
    /// Refuse writes that would turn the disk into a qcow2 image. No option sets this field: the format
    /// was detected as raw, and the next start has to detect the same.
    pub keep_raw: bool,
}

pub(super) static FIELDS: &[Field<Draft<RawOptions>>] = &[
    file_row(&Child(|node: &mut RawOptions| &mut node.file)),
    Row::default("offset", "0", "first byte of the node below that is used")
        .at(&Of(|node: &mut Draft<RawOptions>| &mut node.offset)),
    Row::optional(
        "size",
        "up to the end of the node below",
        "number of bytes of the node below that are used, a multiple of 512",
    )
    .at(&Checked {
        meta: "",
        check: check_size,
        at: |node: &mut Draft<RawOptions>| &mut node.size,
    }),
];

fn check_size(size: &Option<u64>) -> table::Set {
    match size.is_some_and(|size| size % 512 != 0) {
        true => Err(OptionError::new("Specified size is not multiple of 512")),
        false => Ok(()),
    }
}
