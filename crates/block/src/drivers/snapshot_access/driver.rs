//! What a snapshot-access node is to the rest of the daemon.

use std::path::Path;
use std::sync::Arc;

use ::options::Object;

use super::SnapshotAccessNode;
use super::options::{FIELDS, SNAPSHOT_ACCESS, SnapshotAccessOptions};
use crate::driver::{
    BlockDriver, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive, OpenContext,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::write_options;
use crate::permissions::ChildUse;

impl BlockDriver for SnapshotAccessOptions {
    fn kind(&self) -> &'static DriverKind {
        &SNAPSHOT_ACCESS
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    crate::children!(file: ChildUse::Snapshot);

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
        Err(NeverInactive)
    }

    fn describe(&self, child: Option<&str>) -> Description {
        Description { filename: child.map(str::to_owned), options: Vec::new(), specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let child = node.child("file")?;
        let Some(snapshot) = child.snapshot() else {
            return Err(OpenError::new(format!("Node '{}' keeps no snapshot", child.name()))
                .with_hint("A node with driver=copy-before-write keeps one"));
        };
        let (name, discard) = (node.name().to_owned(), node.options().discard);
        Ok(Arc::new(SnapshotAccessNode { name, _child: child, snapshot, discard }))
    }
}
