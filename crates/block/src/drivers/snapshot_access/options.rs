//! Options of `snapshot-access`.

use ::options::table::{self, Field};

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Inherited, ParentDraft};

pub(in crate::drivers) static SNAPSHOT_ACCESS: DriverKind = DriverKind {
    name: "snapshot-access",
    help: "a disk as it was when the copy-before-write node above it was opened, to be read",
    example: "snapshot-access,node-name=n,file.driver=copy-before-write,file.file=disk0,file.target=disk1",
    options: &OptionTable {
        fields: FIELDS,
        start: |inherited| Draft { inherited, file: None },
        build: |draft| {
            let file = draft.file.ok_or_else(|| table::missing("file"))?;
            Ok(SnapshotAccessOptions { file }.into())
        },
    },
    create: None,
    library: None,
};

/// Options of `snapshot-access`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SnapshotAccessOptions {
    /// `file`: the copy-before-write node, named or nested.
    pub(super) file: BlockdevRef,
}

/// What was given.
struct Draft {
    inherited: Inherited,
    file: Option<BlockdevRef>,
}

impl ParentDraft for Draft {
    fn inherited(&self) -> Inherited {
        self.inherited
    }

    fn child(&mut self) -> &mut Option<BlockdevRef> {
        &mut self.file
    }
}

static FIELDS: &[Field<Draft>] =
    &[Field { help: "the copy-before-write node: by name, or defined in place", ..Draft::FILE }];
