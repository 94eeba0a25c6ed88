//! Options of `snapshot-access`.

use ::options::table::Field;

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Child, Draft, file_row};

pub(in crate::drivers) static SNAPSHOT_ACCESS: DriverKind = DriverKind {
    name: "snapshot-access",
    help: "a disk as it was when the copy-before-write node above it was opened, to be read",
    example: "snapshot-access,node-name=n,file.driver=copy-before-write,file.file=disk0,file.target=disk1",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: None,
    amend: None,
    library: None,
};

/// Options of `snapshot-access`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct SnapshotAccessOptions {
    /// `file`: the copy-before-write node, named or nested.
    pub(super) file: BlockdevRef,
}

pub(super) static FIELDS: &[Field<Draft<SnapshotAccessOptions>>] = &[Field {
    help: "the copy-before-write node: by name, or defined in place",
    ..file_row(&Child(|node: &mut SnapshotAccessOptions| &mut node.file))
}];
