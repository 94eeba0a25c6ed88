//! The files that nodes lie in.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::NodeRegistry;
use crate::driver::Layer;
use crate::options::BlockdevRef;
use crate::permissions::ChildUse;

impl NodeRegistry {
    /// Returns the path of the file that is a node's image as a whole.
    ///
    /// `None` if the image is not all of a file.
    pub fn image_path(&self, name: &str) -> Option<PathBuf> {
        let children = self.nodes.get(name)?.options.driver.children();
        match children.first() {
            Some(child) if child.used_as == ChildUse::Window => None,
            _ => self.path_of(&BlockdevRef::Name(name.to_owned())),
        }
    }

    /// The path of the file that a node lies in.
    pub(super) fn path_of(&self, node: &BlockdevRef) -> Option<PathBuf> {
        let options = match node {
            BlockdevRef::Inline(options) => Cow::Borrowed(&**options),
            BlockdevRef::Name(name) => Cow::Owned(self.options(name)?),
        };
        match options.driver.layer() {
            Layer::Storage => options.driver.local_file().map(Path::to_owned),
            Layer::Window | Layer::Format => self.path_of(options.driver.children().first()?.node),
            Layer::Filter => None,
        }
    }
}
