//! What a node of an image in a Ceph cluster is to the rest of the daemon.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use ::options::{Object, table};
use nix::errno::Errno;

use super::connections::{Connections, Opened, Secrets};
use super::node::{RbdNode, Shared};
use super::options::{FIELDS, RBD, RbdOptions};
use crate::connections::ConnectContext;
use crate::driver::{
    BlockDriver, Connecting, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive,
    NotReopened, OpenContext, Reopened,
};
use crate::error::OpenError;
use crate::node::BlockNode;

impl BlockDriver for RbdOptions {
    fn kind(&self) -> &'static DriverKind {
        &RBD
    }

    fn write(&self) -> Object {
        table::write(FIELDS, &mut self.clone())
    }

    crate::children!();

    fn layer(&self) -> Layer {
        Layer::Storage
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        let key = self.key_secret.as_deref();
        let passphrases = self.encrypt.iter().flat_map(|encrypt| encrypt.secrets());
        key.into_iter().chain(passphrases).map(|id| ("secret", id)).collect()
    }

    fn needs(&self) -> Needs<'_> {
        Needs { files: self.conf.as_deref().into_iter().collect(), ..Needs::NONE }
    }

    fn hand_over(&self) -> HandOver {
        HandOver::Flush
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        let mut options = self.write();
        options.retain(|(name, _)| name != "namespace" || !self.namespace.is_empty());
        Description { filename: None, options, specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let opened: Opened = node.connection()?;
        let common = node.options();
        let is_fixed = opened.image.get().is_some_and(|image| image.is_read_only());
        if is_fixed && !common.read_only && !common.auto_read_only {
            let error = match &self.snapshot {
                Some(_) => OpenError::new("rbd snapshots are read-only"),
                None => OpenError::os("Could not open image", Errno::EACCES),
            };
            return Err(error.with_hint("read-only=on opens it for reading"));
        }
        let services = node.services().clone();
        let opened = RbdNode::new(node.name(), common, opened, services);
        node.keep(opened.shared());
        Ok(Arc::new(opened))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before: &Self = before.as_any().downcast_ref().ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_kept(before, self)
    }

    /// The image stays open.
    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        let open = node.kept::<Shared>();
        let open = open.ok_or_else(|| OpenError::new("The node is not open"))?;
        Ok(Reopened::in_place(open.change(node.options())?))
    }

    fn connect(&self, context: &ConnectContext<'_>) -> Option<Connecting> {
        let (options, event_loop) = (self.clone(), context.event_loop.clone());
        let connections = Connections::of(context.nodes.services());
        let secrets = Secrets::of(self, context.credentials);
        Some(Box::pin(async move {
            let opened = connections?.open(&event_loop, &options, secrets?).await?;
            Ok(Box::new(opened) as Box<dyn Any + Send>)
        }))
    }
}
