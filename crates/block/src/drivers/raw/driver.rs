//! What a raw node is to the rest of the daemon.

use std::path::Path;
use std::sync::Arc;

use ::options::Object;

use super::RawNode;
use super::options::{FIELDS, RAW, RawOptions};
use crate::driver::{
    BlockDriver, ChildOption, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive,
    NotReopened, OpenContext, Reopened, set_child,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::{BlockdevRef, write_options};
use crate::permissions::ChildUse;

impl RawOptions {
    fn is_whole(&self) -> bool {
        self.offset == 0 && self.size.is_none()
    }

    fn node(&self, node: &OpenContext<'_>) -> Result<RawNode, OpenError> {
        RawNode::new(node.name().to_owned(), node.options(), self, node.child("file")?)
    }
}

impl BlockDriver for RawOptions {
    fn kind(&self) -> &'static DriverKind {
        &RAW
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    fn children(&self) -> Vec<ChildOption<'_>> {
        let used_as = match self.is_whole() {
            true => ChildUse::Filtered,
            false => ChildUse::Window,
        };
        vec![ChildOption { role: "file", used_as, node: &self.file }]
    }

    fn set_child(&mut self, role: &str, child: BlockdevRef) -> bool {
        set_child(&mut [("file", &mut self.file)], role, child)
    }

    fn layer(&self) -> Layer {
        Layer::Window
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    fn needs(&self) -> Needs<'_> {
        Needs::NONE
    }

    fn hand_over(&self) -> HandOver {
        HandOver::AtOnce
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    fn describe(&self, child: Option<&str>) -> Description {
        let offset = (self.offset > 0).then(|| ("offset".to_owned(), self.offset.into()));
        let size = self.size.map(|size| ("size".to_owned(), size.into()));
        Description {
            filename: child.filter(|_| self.is_whole()).map(str::to_owned),
            options: offset.into_iter().chain(size).collect(),
            specific: None,
        }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let raw = self.node(node)?;
        if !node.is_look() {
            warn_of_foreign_format(&raw);
        }
        Ok(Arc::new(raw))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before = before.as_any().downcast_ref::<Self>().ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_defined_anew(&before.file, &self.file)
    }

    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        Ok(Reopened::anew(Arc::new(self.node(node)?)))
    }
}

/// Warns of a raw image with another format's signature, which is usually opened by mistake.
fn warn_of_foreign_format(node: &RawNode) {
    if let Some(format) = node.foreign_format() {
        let (name, format) = (node.name(), format.name());
        log::warn!(
            "node '{name}': its image has the header of a {format} image and is opened as raw: reads give, and \
             writes destroy, what {format} keeps there"
        );
    }
}
