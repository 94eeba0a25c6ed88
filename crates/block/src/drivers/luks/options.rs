//! Options of `luks`.

use ::options::table::{self, Field, Kind, Need, put};

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Inherited, ParentDraft, read_ref, ref_shape};

pub(in crate::drivers) static LUKS: DriverKind = DriverKind {
    name: "luks",
    help: "an encrypted disk, of LUKS version 1",
    example: "luks,node-name=n,file=disk0,key-secret=sec0",
    options: &OptionTable {
        fields: FIELDS,
        start: |inherited| Draft { inherited, file: None, header: None, key_secret: None },
        build: |draft| {
            let Draft { file, header, key_secret, .. } = draft;
            let file = file.ok_or_else(|| table::missing("file"))?;
            Ok(LuksOptions { file, header, key_secret }.into())
        },
    },
    create: Some(&super::create::CREATE),
    library: None,
};

/// Options of `luks`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LuksOptions {
    /// `file`: the node with the encrypted sectors, named or nested.
    pub(super) file: BlockdevRef,
    /// `header`: the node with the header. `None` means `file`.
    pub(super) header: Option<BlockdevRef>,
    /// `key-secret`: the `id` of the secret with the password.
    pub(super) key_secret: Option<String>,
}

/// What was given.
struct Draft {
    inherited: Inherited,
    file: Option<BlockdevRef>,
    header: Option<BlockdevRef>,
    key_secret: Option<String>,
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
        name: "header",
        kind: Kind::Nested {
            shape: ref_shape,
            read: |node, value, at| {
                let header = read_ref(value, node.inherited, at)?;
                put(&mut node.header, Some(header))
            },
        },
        need: Need::Optional("it lies before the encrypted data"),
        help: "the node with the header, of a disk whose header lies elsewhere: by name, or defined in place",
    },
    Field {
        name: "key-secret",
        kind: Kind::Text { meta: "<id>", set: |node, id| put(&mut node.key_secret, Some(id)) },
        need: Need::Optional("none, and the disk cannot be opened"),
        help: "the secret object with the password",
    },
];
