//! Opening an image with the files that its header names and its options do not.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;

use super::open::Children;
use super::options::{Backing, Qcow2Options};
use super::{ImplicitBacking, Opening, Qcow2Node, probe};
use crate::driver::OpenContext;
use crate::drivers::encryption::Unlocked;
use crate::error::OpenError;
use crate::options::{
    BlockdevOptions, BlockdevRef, Discard, Driver, FileOptions, Locking, RawOptions,
};
use crate::registry::MAX_CHAIN;

/// Opens an image, and before it what its header names and its options do not.
pub(super) fn open(
    options: &Qcow2Options,
    node: &mut OpenContext<'_>,
) -> Result<Qcow2Node, OpenError> {
    open_with(options, node, None)
}

/// Opens an image again that was closed for it. The messages are QEMU's.
pub(super) fn reopen(
    options: &Qcow2Options,
    node: &mut OpenContext<'_>,
) -> Result<Qcow2Node, OpenError> {
    if options.data_file.is_none() {
        node.take_child_over("data-file");
    }
    if options.backing == Backing::Implicit {
        let missing = || OpenError::new(format!("backing is missing for '{}'", node.name()));
        let opening = Opening::begin(node.options(), node.child("file")?)?;
        let path = node.path_of(&options.file);
        let is_named = !matches!(opening.backing(path.as_deref())?, ImplicitBacking::None);
        if is_named || node.had_child("backing") {
            return Err(missing().with_hint("name its node, or give null for none"));
        }
    }
    let unlocked = node.kept().filter(|_| options.encrypt.is_some());
    open_with(options, node, unlocked)
}

fn open_with(
    options: &Qcow2Options,
    node: &mut OpenContext<'_>,
    unlocked: Option<Arc<Unlocked>>,
) -> Result<Qcow2Node, OpenError> {
    let common = node.options();
    let opening = Opening::begin(common, node.child("file")?)?.with_inherited(node.inherited());
    let opening = opening.telling(node.damages()).repairing_apart(node.repairs_apart());
    let path = node.path_of(&options.file);
    if options.data_file.is_some() && !opening.has_data_file() {
        let why = "'data-file' can only be set for images with an external data file";
        return Err(OpenError::new(why));
    }
    let mut named = Vec::new();
    // A node that is opened anew has its children already.
    if options.data_file.is_none()
        && node.child("data-file").is_err()
        && let Some(data_file) = opening.data_file()?
    {
        opening.check_naming(&data_file, "data-file")?;
        check_data_file(node, &data_file, path.as_deref())?;
        named.push(("data-file", file_at(node, data_file, opening.read_only())));
    }
    if options.backing == Backing::Implicit
        && node.child("backing").is_err()
        && let ImplicitBacking::File(path, format) = opening.backing(path.as_deref())?
    {
        opening.check_naming(&path, "backing")?;
        let backing = backing(node, &path, format);
        named.push(("backing", backing.map_err(|error| error.of_child("backing"))?));
    }
    for (role, child) in named {
        node.open_child(role, &child)?;
    }
    // Options and snapshots count, too: what a running daemon builds can be opened again by its headers.
    if node.chain_below("backing").len() > MAX_CHAIN {
        let why = format!("Node '{}' has more than {MAX_CHAIN} images behind it", node.name());
        return Err(OpenError::new(why).with_hint("block-stream and block-commit shorten a chain"));
    }
    let children =
        Children { data_file: node.child("data-file").ok(), backing: node.child("backing").ok() };
    let unlocked = match (&options.encrypt, unlocked) {
        (Some(_), None) => Some(Arc::new(node.connection::<Unlocked>()?)),
        (_, unlocked) => unlocked,
    };
    if let Some(unlocked) = unlocked.as_ref().filter(|_| !node.is_look()) {
        node.keep(unlocked.clone());
    }
    let name = node.name().to_owned();
    let opened = opening.finish(name, common, options, children, unlocked, node.journals());
    opened.map_err(|error| node.noting(error))
}

/// Warns if a relative name of a data file fits another file, too: that beside the image, which earlier versions took. Fails
/// if only that file is there.
fn check_data_file(
    node: &OpenContext<'_>,
    data_file: &Path,
    image: Option<&Path>,
) -> Result<(), OpenError> {
    let Some(folder) = image.and_then(Path::parent).filter(|_| data_file.is_relative()) else {
        return Ok(());
    };
    let beside = folder.join(data_file);
    let mounts = node.own_mounts();
    let real = |path: &Path| mounts.check(path).ok().and_then(|()| path.canonicalize().ok());
    let (name, other) = (data_file.display(), beside.display());
    match (real(data_file), real(&beside)) {
        (Some(used), Some(unused)) if used != unused => {
            log::warn!(
                "qcow2 image of node '{}': its data file '{name}' is '{}', in the working directory, as in QEMU; \
                 '{other}', beside the image, is not used: name the data file by an absolute path, or by data-file",
                node.name(),
                used.display()
            );
            Ok(())
        }
        (None, Some(_)) => {
            let what = format!("Could not open '{name}'");
            Err(OpenError::os(what, Errno::ENOENT).with_hint(format!(
                "The image's data file is looked for in the working directory, as by QEMU. data-file.driver=file,\
                 data-file.filename={other} names the one beside the image"
            )))
        }
        _ => Ok(()),
    }
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
    let file = file_at(node, path.to_owned(), true);
    let is_qcow2 = match format.as_deref() {
        Some("qcow2") => true,
        Some("raw" | "file" | "host_device") => false,
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
        true => Driver::from(Qcow2Options { file, ..Qcow2Options::default() }),
        false => Driver::from(RawOptions { file, offset: 0, size: None, keep_raw: false }),
    };
    Ok(in_place(driver, common, true))
}

/// Locking of files that images name.
fn locking(node: &OpenContext<'_>) -> Locking {
    if node.is_look() { Locking::Off } else { Locking::Auto }
}

/// A file or block device at that path.
fn file_at(node: &OpenContext<'_>, path: PathBuf, read_only: bool) -> BlockdevRef {
    let file = FileOptions { filename: path, aio: None, locking: locking(node) };
    in_place(Driver::of_kind(file, &node.own_mounts()), node.options(), read_only)
}

/// A node of which the header says no more, with what it takes from the one above.
fn in_place(driver: Driver, above: &BlockdevOptions, read_only: bool) -> BlockdevRef {
    BlockdevRef::Inline(Box::new(BlockdevOptions {
        read_only,
        force_share: above.force_share && read_only,
        discard: Discard::Unmap,
        cache: above.cache,
        ..BlockdevOptions::new(None, driver)
    }))
}
