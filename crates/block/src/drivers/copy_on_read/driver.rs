//! What a copy-on-read node is to the rest of the daemon.

use std::sync::Arc;

use ::options::Object;

use super::node::CopyOnReadNode;
use super::options::{COPY_ON_READ, CopyOnReadOptions, FIELDS};
use crate::driver::{BlockDriver, DriverKind, Layer, OpenContext};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::write_options;
use crate::permissions::ChildUse;

impl CopyOnReadOptions {
    /// Returns the depth of the first image from which nothing is copied.
    fn end(&self, node: &OpenContext<'_>) -> Result<u32, OpenError> {
        let Some(bottom) = &self.bottom else { return Ok(u32::MAX) };
        if node.layer_of(bottom).ok_or_else(|| not_found(bottom))? == Layer::Filter {
            return Err(OpenError::new(format!("Bottom node '{bottom}' is a filter")));
        }
        let chain = node.chain_below("file");
        match chain.iter().position(|name| name == bottom).map(u32::try_from) {
            Some(Ok(index)) => Ok(index.saturating_add(2)),
            Some(Err(_)) | None => Err(OpenError::new(format!(
                "Bottom node '{bottom}' is not in the backing chain of node '{}'",
                node.name()
            ))
            .with_hint(format!("Images of the chain: {}", chain.join(", ")))),
        }
    }
}

fn not_found(bottom: &str) -> OpenError {
    OpenError::new(format!("Bottom node '{bottom}' not found"))
}

impl BlockDriver for CopyOnReadOptions {
    fn kind(&self) -> &'static DriverKind {
        &COPY_ON_READ
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    crate::children!(file: ChildUse::CopyOnRead);

    crate::plain_filter!();

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let child = node.child("file")?;
        if node.is_look() {
            // Nothing is copied. The image below is open for reading, and those behind it have no names.
            return Ok(child);
        }
        let end = self.end(node)?;
        Ok(Arc::new(CopyOnReadNode::new(node.name().to_owned(), node.options(), end, child)?))
    }
}
