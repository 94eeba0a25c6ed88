//! Options of `compress`.

use ::options::table::Field;

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Child, Draft, file_row};

pub(in crate::drivers) static COMPRESS: DriverKind = DriverKind {
    name: "compress",
    help: "a qcow2 image that stores what is written compressed",
    example: "compress,node-name=n,file=disk0",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: None,
    amend: None,
    library: None,
};

/// Options of `compress`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CompressOptions {
    /// `file`: the image, named or nested.
    pub(super) file: BlockdevRef,
}

pub(super) static FIELDS: &[Field<Draft<CompressOptions>>] =
    &[file_row(&Child(|node: &mut CompressOptions| &mut node.file))];
