//! Options of `luks`.

use ::options::place::Text;
use ::options::table::{Field, Row};

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Child, Draft, file_row};

pub(in crate::drivers) static LUKS: DriverKind = DriverKind {
    name: "luks",
    help: "an encrypted disk, of LUKS version 1",
    example: "luks,node-name=n,file=disk0,key-secret=sec0",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: Some(&super::create::CREATE),
    amend: Some(&super::amend::AMEND),
    library: None,
};

/// Options of `luks`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LuksOptions {
    /// `file`: the node with the encrypted sectors, named or nested.
    pub(super) file: BlockdevRef,
    /// `header`: the node with the header. `None` means `file`.
    pub(super) header: Option<BlockdevRef>,
    /// `key-secret`: the `id` of the secret with the password.
    pub(super) key_secret: Option<String>,
}

pub(super) static FIELDS: &[Field<Draft<LuksOptions>>] = &[
    file_row(&Child(|node: &mut LuksOptions| &mut node.file)),
    Row::optional(
        "header",
        "it lies before the encrypted data",
        "the node with the header, of a disk whose header lies elsewhere: by name, or \
         defined in place",
    )
    .at(&Child(|node: &mut LuksOptions| &mut node.header)),
    Row::optional(
        "key-secret",
        "none, and the disk cannot be opened",
        "the secret object with the password",
    )
    .at(&Text("<id>", |node: &mut Draft<LuksOptions>| &mut node.key_secret)),
];
