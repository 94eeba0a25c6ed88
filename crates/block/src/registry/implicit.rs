//! Nodes that nobody has defined: those that an image's header names.

use std::path::{Path, PathBuf};

use super::{Child, NodeRegistry, Opened, child};
use crate::driver::Layer;
use crate::drivers::qcow2::{self, ImplicitBacking, Opening, Qcow2Node};
use crate::error::OpenError;
use crate::options::{
    Backing, BlockdevOptions, BlockdevRef, Discard, Driver, FileOptions, Locking, Qcow2Options,
    RawOptions,
};
use crate::permissions::ChildUse;

/// Images behind an image, at most: one may name itself, or another one that names it. Each takes some
/// stack.
const MAX_CHAIN: usize = 64;

impl NodeRegistry {
    /// Opens a qcow2 image, and before it what its header names and its options do not.
    pub(super) fn open_qcow2(
        &mut self,
        name: String,
        common: &BlockdevOptions,
        options: &Qcow2Options,
        children: &mut Vec<Child>,
        nested: &mut Vec<Opened>,
    ) -> Result<Qcow2Node, OpenError> {
        let file = child(children, "file", &name)?;
        let opening = Opening::begin(common, file)?.with_inherited(&mut self.inherited);
        let opening = opening.telling(self.damages.clone());
        let path = self.path_of(&options.file);
        if options.data_file.is_some() && !opening.has_data_file() {
            let why = "'data-file' can only be set for images with an external data file";
            return Err(OpenError::new(why));
        }
        let mut named = Vec::new();
        if options.data_file.is_none()
            && let Some(path) = opening.data_file(path.as_deref())?
        {
            named.push(("data-file", file_at(path, common, opening.read_only(), self.locking())));
        }
        if options.backing == Backing::Implicit
            && let ImplicitBacking::File(path, format) = opening.backing(path.as_deref())?
        {
            let backing = self.backing(common, path, format, nested);
            named.push(("backing", backing.map_err(|error| error.of_child("backing"))?));
        }
        for (role, node) in named {
            let edge = self.open_child(&name, &node, nested);
            let edge = edge.map_err(|error| error.of_child(role))?;
            children.push(Child { role, edge });
        }
        let data_file = child(children, "data-file", &name).ok();
        let backing = child(children, "backing", &name).ok();
        opening.finish(name, common, options, data_file, backing, self.journals.as_ref())
    }

    /// The backing file that an image names, as options.
    fn backing(
        &mut self,
        common: &BlockdevOptions,
        path: PathBuf,
        format: Option<String>,
        nested: &[Opened],
    ) -> Result<BlockdevRef, OpenError> {
        if nested.len() > MAX_CHAIN {
            let why = format!("'{}' lies behind more than {MAX_CHAIN} images", path.display());
            return Err(OpenError::new(why));
        }
        let file = file_at(path.clone(), common, true, self.locking());
        let is_qcow2 = match format.as_deref() {
            Some("qcow2") => true,
            Some("raw" | "file") => false,
            Some(other) => {
                let message = format!(
                    "Format '{other}' of backing file '{}' is not supported",
                    path.display()
                );
                return Err(OpenError::new(message).with_hint(
                    "Convert the backing file: qemu-img convert -O qcow2 <file> <file>.qcow2; then name \
                     the result in the image: qemu-img rebase -u -b <file>.qcow2 -F qcow2 <image>",
                ));
            }
            // As QEMU does it.
            None => self.probe(&file)?,
        };
        let driver = match is_qcow2 {
            true => Driver::Qcow2(Qcow2Options {
                file,
                data_file: None,
                backing: Backing::Implicit,
                pass_discard_request: None,
                discard_no_unref: false,
            }),
            false => Driver::from(RawOptions { file, offset: 0, size: None, keep_raw: false }),
        };
        Ok(in_place(driver, common, true))
    }

    /// Whether a file is an image in this format.
    fn probe(&mut self, file: &BlockdevRef) -> Result<bool, OpenError> {
        let BlockdevRef::Inline(options) = file else { return Ok(false) };
        let name = self.generate_name();
        let opened = self.open_tree(name, options, &mut Vec::new())?;
        qcow2::probe(&opened.node)
    }

    /// The path of the file that the image of the node of that name lies in, if it is all of that file.
    pub fn image_path(&self, name: &str) -> Option<PathBuf> {
        match &self.nodes.get(name)?.options.driver {
            Driver::Any(driver)
                if driver.children().first().is_some_and(|c| c.used_as == ChildUse::Window) =>
            {
                None
            }
            _ => self.path_of(&BlockdevRef::Name(name.to_owned())),
        }
    }

    /// Locking of files that images name.
    fn locking(&self) -> Locking {
        if self.looks { Locking::Off } else { Locking::Auto }
    }

    /// The path of the file that a node lies in.
    fn path_of(&self, node: &BlockdevRef) -> Option<PathBuf> {
        let options = match node {
            BlockdevRef::Inline(options) => options,
            BlockdevRef::Name(name) => &self.nodes.get(name)?.options,
        };
        match &options.driver {
            Driver::File(file) | Driver::HostDevice(file) => Some(Path::to_owned(&file.filename)),
            Driver::Qcow2(qcow2) => self.path_of(&qcow2.file),
            Driver::Any(driver) => match driver.layer() {
                Layer::Storage => driver.local_file().map(Path::to_owned),
                Layer::Window | Layer::Format => self.path_of(driver.children().first()?.node),
                Layer::Filter => None,
            },
        }
    }
}

/// A file at that path.
fn file_at(
    path: PathBuf,
    above: &BlockdevOptions,
    read_only: bool,
    locking: Locking,
) -> BlockdevRef {
    let file = FileOptions { filename: path, aio: None, locking };
    in_place(Driver::File(file), above, read_only)
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
