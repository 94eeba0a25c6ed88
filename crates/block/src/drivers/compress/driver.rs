//! What a compress node is to the rest of the daemon.

use std::sync::Arc;

use ::options::Object;

use super::node::CompressNode;
use super::options::{COMPRESS, CompressOptions, FIELDS};
use crate::driver::{BlockDriver, DriverKind, NotReopened, OpenContext};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::write_options;
use crate::permissions::ChildUse;

impl BlockDriver for CompressOptions {
    fn kind(&self) -> &'static DriverKind {
        &COMPRESS
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    crate::children!(file: ChildUse::Filtered);

    crate::plain_filter!();

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let child = node.child("file")?;
        if !child.compresses() {
            let driver = node.driver_of("file").unwrap_or_default();
            let error = format!("Compression is not supported for underlying format: {driver}");
            return Err(OpenError::new(error).with_hint(
                "compressed clusters are for qcow2 images that are written, without encryption and without a data file",
            ));
        }
        let mut options = node.options().clone();
        // As QSD has it: users that write are refused instead.
        options.read_only |= child.geometry().read_only;
        Ok(Arc::new(CompressNode::new(node.name().to_owned(), &options, child)?))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before = before.as_any().downcast_ref::<Self>().ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_defined_anew(&before.file, &self.file)
    }
}
