//! Opening an image with the files that its header names and its options do not.

use std::path::{Path, PathBuf};

use super::open::Children;
use super::options::{Backing, Qcow2Options};
use super::{ImplicitBacking, Opening, Qcow2Node, probe};
use crate::driver::OpenContext;
use crate::error::OpenError;
use crate::options::{
    BlockdevOptions, BlockdevRef, Discard, Driver, FileOptions, Locking, RawOptions,
};

/// Images behind an image, at most: one may name itself, or another one that names it. Each takes some
/// stack.
const MAX_CHAIN: usize = 64;

/// Opens an image, and before it what its header names and its options do not.
pub(super) fn open(
    options: &Qcow2Options,
    node: &mut OpenContext<'_>,
) -> Result<Qcow2Node, OpenError> {
    let common = node.options();
    let opening = Opening::begin(common, node.child("file")?)?.with_inherited(node.inherited());
    let opening = opening.telling(node.damages());
    let path = node.path_of(&options.file);
    if options.data_file.is_some() && !opening.has_data_file() {
        let why = "'data-file' can only be set for images with an external data file";
        return Err(OpenError::new(why));
    }
    let mut named = Vec::new();
    if options.data_file.is_none()
        && let Some(path) = opening.data_file(path.as_deref())?
    {
        named.push(("data-file", file_at(path, common, opening.read_only(), locking(node))));
    }
    // A node that is opened anew has its child already.
    if options.backing == Backing::Implicit
        && node.child("backing").is_err()
        && let ImplicitBacking::File(path, format) = opening.backing(path.as_deref())?
    {
        let backing = backing(node, &path, format);
        named.push(("backing", backing.map_err(|error| error.of_child("backing"))?));
    }
    for (role, child) in named {
        node.open_child(role, &child)?;
    }
    let children =
        Children { data_file: node.child("data-file").ok(), backing: node.child("backing").ok() };
    let unlocked = match options.encrypt {
        Some(_) => Some(node.connection()?),
        None => None,
    };
    opening.finish(node.name().to_owned(), common, options, children, unlocked, node.journals())
}

/// Returns the backing file that an image names, as options.
fn backing(
    node: &mut OpenContext<'_>,
    path: &Path,
    format: Option<String>,
) -> Result<BlockdevRef, OpenError> {
    if node.opened_below() > MAX_CHAIN {
        let why = format!("'{}' lies behind more than {MAX_CHAIN} images", path.display());
        return Err(OpenError::new(why));
    }
    let common = node.options();
    let file = file_at(path.to_owned(), common, true, locking(node));
    let is_qcow2 = match format.as_deref() {
        Some("qcow2") => true,
        Some("raw" | "file") => false,
        Some(other) => {
            let message =
                format!("Format '{other}' of backing file '{}' is not supported", path.display());
            return Err(OpenError::new(message).with_hint(
                "Convert the backing file: qemu-img convert -O qcow2 <file> <file>.qcow2; then name \
                 the result in the image: qemu-img rebase -u -b <file>.qcow2 -F qcow2 <image>",
            ));
        }
        // As QEMU does it.
        None => probe(&node.open_aside(&file)?)?,
    };
    let driver = match is_qcow2 {
        true => Driver::from(Qcow2Options {
            file,
            data_file: None,
            backing: Backing::Implicit,
            pass_discard_request: None,
            discard_no_unref: false,
            unheeded: Default::default(),
            caches: Default::default(),
            encrypt: None,
        }),
        false => Driver::from(RawOptions { file, offset: 0, size: None, keep_raw: false }),
    };
    Ok(in_place(driver, common, true))
}

/// Locking of files that images name.
fn locking(node: &OpenContext<'_>) -> Locking {
    if node.is_look() { Locking::Off } else { Locking::Auto }
}

/// A file at that path.
fn file_at(
    path: PathBuf,
    above: &BlockdevOptions,
    read_only: bool,
    locking: Locking,
) -> BlockdevRef {
    let file = FileOptions { filename: path, aio: None, locking };
    in_place(Driver::file(file), above, read_only)
}

/// A node of which the header says no more, with what it takes from the one above.
fn in_place(driver: Driver, above: &BlockdevOptions, read_only: bool) -> BlockdevRef {
    BlockdevRef::Inline(Box::new(BlockdevOptions {
        read_only,
        discard: Discard::Unmap,
        cache: above.cache,
        ..BlockdevOptions::new(None, driver)
    }))
}
