//! What a throttle node is to the rest of the daemon.

use std::path::Path;
use std::sync::Arc;

use ::options::Object;

use super::ThrottleNode;
use super::options::{FIELDS, THROTTLE, ThrottleOptions};
use crate::driver::{
    BlockDriver, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive, NotReopened,
    OpenContext,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::write_options;
use crate::permissions::ChildUse;

impl BlockDriver for ThrottleOptions {
    fn kind(&self) -> &'static DriverKind {
        &THROTTLE
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    crate::children!(file: ChildUse::Filtered);

    fn layer(&self) -> Layer {
        Layer::Filter
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        vec![("throttle-group", &self.throttle_group)]
    }

    fn needs(&self) -> Needs<'_> {
        Needs::NONE
    }

    fn hand_over(&self) -> HandOver {
        HandOver::HoldsBack
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        let group = ("throttle-group".to_owned(), self.throttle_group.as_str().into());
        Description { filename: None, options: vec![group], specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let group = node.throttle_group(&self.throttle_group)?;
        let (name, child) = (node.name().to_owned(), node.child("file")?);
        Ok(Arc::new(ThrottleNode::new(name, node.options(), group, child)?))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before = before.as_any().downcast_ref::<Self>().ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_defined_anew(&before.file, &self.file)
    }
}
