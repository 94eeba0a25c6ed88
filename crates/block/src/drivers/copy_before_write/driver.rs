//! What a copy-before-write node is to the rest of the daemon.

use std::path::Path;
use std::sync::Arc;

use ::options::Object;

use super::node::CopyBeforeWriteNode;
use super::options::{COPY_BEFORE_WRITE, CopyBeforeWriteOptions, FIELDS};
use crate::driver::{
    BlockDriver, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive, OpenContext,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::write_options;
use crate::permissions::ChildUse;

impl BlockDriver for CopyBeforeWriteOptions {
    fn kind(&self) -> &'static DriverKind {
        &COPY_BEFORE_WRITE
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    crate::children!(file: ChildUse::CopyBeforeWrite, target: ChildUse::CopyTarget);

    fn layer(&self) -> Layer {
        Layer::Filter
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    fn needs(&self) -> Needs<'_> {
        Needs::NONE
    }

    /// Only this process knows which parts are copied, until the node is released for the
    /// hand-over.
    fn hand_over(&self) -> HandOver {
        HandOver::Journal
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Err(NeverInactive)
    }

    fn describe(&self, child: Option<&str>) -> Description {
        Description { filename: child.map(str::to_owned), options: Vec::new(), specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        Ok(Arc::new(CopyBeforeWriteNode::open(self, node)?))
    }
}
