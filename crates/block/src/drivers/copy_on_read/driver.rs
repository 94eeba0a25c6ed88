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
        if self.as_cache && !node.options().read_only {
            return Err(OpenError::new("as-cache=on needs read-only=on").with_hint(
                "Only what is read is stored in a cache. An overlay above the node takes writes",
            ));
        }
        if self.max_size != 0 && !self.as_cache {
            return Err(OpenError::new("max-size is for a cache").with_hint("Add as-cache=on"));
        }
        if node.is_look() {
            // Nothing is copied. The image below is open for reading, and those behind it have no names.
            return Ok(child);
        }
        let end = self.end(node)?;
        let max_size = self.as_cache.then_some(self.max_size);
        let name = node.name().to_owned();
        Ok(Arc::new(CopyOnReadNode::new(name, node.options(), (end, max_size), child)?))
    }
}
