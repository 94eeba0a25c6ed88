//! Options of `copy-on-read`.

use ::options::place::{Of, Size, Text};
use ::options::table::{Field, Row};

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Child, Draft, Driver, file_row};

pub(in crate::drivers) static COPY_ON_READ: DriverKind = DriverKind {
    name: "copy-on-read",
    help: "an image that gets what is read from the images behind it",
    example: "copy-on-read,node-name=n,file=disk0,bottom=disk1",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: None,
    amend: None,
    library: None,
};

/// Options of `copy-on-read`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CopyOnReadOptions {
    /// `file`: the image, named or nested.
    pub(super) file: BlockdevRef,
    /// `bottom`: the last image of the chain from which data is copied. `None` means the last of all.
    pub(super) bottom: Option<String>,
    /// `as-cache`: the image is a cache of the image behind it, and has no data of its own.
    pub(super) as_cache: bool,
    /// `max-size`: bytes that a cache takes up at most. Zero means no limit.
    pub(super) max_size: u64,
}

impl Driver {
    /// Returns the driver `copy-on-read` above an image with others behind it.
    pub fn copy_on_read(file: BlockdevRef) -> Driver {
        Driver::from(CopyOnReadOptions { file, ..CopyOnReadOptions::default() })
    }

    /// Returns the driver `copy-on-read` above an image that is a cache of at most `max_size` bytes. 0: no limit.
    pub fn caching(file: BlockdevRef, max_size: u64) -> Driver {
        Driver::from(CopyOnReadOptions { file, bottom: None, as_cache: true, max_size })
    }
}

pub(super) static FIELDS: &[Field<Draft<CopyOnReadOptions>>] = &[
    file_row(&Child(|node: &mut CopyOnReadOptions| &mut node.file)),
    Row::optional(
        "bottom",
        "the last image of the chain",
        "the last image of the chain from which data is copied",
    )
    .at(&Text("<node-name>", |node: &mut Draft<CopyOnReadOptions>| &mut node.bottom)),
    Row::default(
        "as-cache",
        "off",
        "the image is a cache of the one behind it: a read succeeds although its data cannot be stored; needs read-only=on",
    )
    .at(&Of(|node: &mut Draft<CopyOnReadOptions>| &mut node.as_cache)),
    Row::default(
        "max-size",
        "0",
        "with as-cache=on, bytes that the image takes up at most; 0 for no limit. Then nothing more is stored",
    )
    .at(&Size(|node: &mut Draft<CopyOnReadOptions>| &mut node.max_size)),
];
