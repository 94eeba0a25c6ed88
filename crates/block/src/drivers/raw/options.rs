//! `raw`: a part of, or all of, another node.

use crate::options::{BlockdevRef, Inherited, ParentDraft};

use crate::driver::{DriverKind, OptionTable};
use ::options::OptionError;
use ::options::table::{self, Field, Kind, Need, put};

pub(in crate::drivers) static RAW: DriverKind = DriverKind {
    name: "raw",
    help: "a part of, or all of, another node",
    example: "raw,node-name=n,file=disk0,offset=1048576,size=8589934592",
    options: &OptionTable {
        fields: FIELDS,
        start: |inherited| Draft { inherited, file: None, offset: 0, size: None },
        build: |draft| {
            let Draft { file, offset, size, .. } = draft;
            let file = file.ok_or_else(|| table::missing("file"))?;
            Ok(RawOptions { file, offset, size, keep_raw: false }.into())
        },
    },
    create: None,
    library: None,
};

/// Options of `raw`.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// What was given.
struct Draft {
    inherited: Inherited,
    file: Option<BlockdevRef>,
    offset: u64,
    size: Option<u64>,
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
        name: "offset",
        kind: Kind::Int {
            range: 0..=i64::MAX,
            set: |node, bytes| put(&mut node.offset, bytes.unsigned_abs()),
        },
        need: Need::Default("0"),
        help: "first byte of the node below that is used",
    },
    Field {
        name: "size",
        kind: Kind::Int {
            range: 0..=i64::MAX,
            set: |node, bytes| {
                if bytes % 512 != 0 {
                    return Err(OptionError::new("Specified size is not multiple of 512"));
                }
                put(&mut node.size, Some(bytes.unsigned_abs()))
            },
        },
        need: Need::Optional("up to the end of the node below"),
        help: "number of bytes of the node below that are used, a multiple of 512",
    },
];
