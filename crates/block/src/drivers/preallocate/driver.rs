//! What a preallocate node is to the rest of the daemon.

use std::sync::Arc;

use ::options::Object;

use super::node::{PreallocateNode, Room};
use super::options::{FIELDS, PREALLOCATE, PreallocateOptions};
use crate::driver::{BlockDriver, DriverKind, NotReopened, OpenContext, Reopened};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::write_options;
use crate::permissions::ChildUse;

impl BlockDriver for PreallocateOptions {
    fn kind(&self) -> &'static DriverKind {
        &PREALLOCATE
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    crate::children!(file: ChildUse::Preallocated);

    crate::plain_filter!();

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let child = node.child("file")?;
        let room = Arc::new(Room::new(node.name().to_owned(), child, self.ahead));
        node.keep(room.clone());
        Ok(Arc::new(PreallocateNode::new(node.name().to_owned(), node.options(), room)?))
    }

    /// Only the child stays the same.
    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before = before.as_any().downcast_ref::<PreallocateOptions>();
        let before = before.ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_same(&[("file", before.file != self.file)])
    }

    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        let Some(room) = node.kept::<Room>() else {
            return Ok(Reopened::anew(self.open(node)?));
        };
        let node = PreallocateNode::new(node.name().to_owned(), node.options(), room.clone())?;
        let before = room.set(self.ahead);
        let restore = move || {
            room.set(before);
        };
        Ok(Reopened { restore: Some(Box::new(restore)), ..Reopened::anew(Arc::new(node)) })
    }
}
