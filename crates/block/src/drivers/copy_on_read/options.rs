//! Options of `copy-on-read`.

use ::options::table::{self, Field, Kind, Need, put};

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Inherited, ParentDraft};

pub(in crate::drivers) static COPY_ON_READ: DriverKind = DriverKind {
    name: "copy-on-read",
    help: "an image that gets what is read from the images behind it",
    example: "copy-on-read,node-name=n,file=disk0,bottom=disk1",
    options: &OptionTable {
        fields: FIELDS,
        start: |inherited| Draft { inherited, file: None, bottom: None },
        build: |draft| {
            let Draft { file, bottom, .. } = draft;
            let file = file.ok_or_else(|| table::missing("file"))?;
            Ok(CopyOnReadOptions { file, bottom }.into())
        },
    },
    create: None,
    library: None,
};

/// Options of `copy-on-read`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CopyOnReadOptions {
    /// `file`: the image, named or nested.
    pub(super) file: BlockdevRef,
    /// `bottom`: the last image of the chain from which data is copied. `None` means the last of all.
    pub(super) bottom: Option<String>,
}

/// What was given.
struct Draft {
    inherited: Inherited,
    file: Option<BlockdevRef>,
    bottom: Option<String>,
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
        name: "bottom",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |node, name| put(&mut node.bottom, Some(name)),
        },
        need: Need::Optional("the last image of the chain"),
        help: "the last image of the chain from which data is copied",
    },
];
