//! Images that another program has not closed, and their repair.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use event_loop::oneshot;

use super::check::{CheckFailure, check_node};
use super::engine::Repair;
use crate::error::OpenError;
use crate::node::BlockNode;

/// Findings of a repair that are logged. The others are counted.
const MOST_LINES: u64 = 100;

/// A qcow2 image that has to be repaired before it can be opened for writing.
///
/// Holds the node of the image's file, and its lock.
#[derive(Clone)]
pub struct DirtyImage {
    name: String,
    file: Arc<dyn BlockNode>,
}

impl fmt::Debug for DirtyImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DirtyImage").field(&self.name).finish()
    }
}

impl PartialEq for DirtyImage {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && Arc::ptr_eq(&self.file, &other.file)
    }
}

impl Eq for DirtyImage {}

/// Ends a repair whose future is dropped.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl DirtyImage {
    pub(super) fn new(name: &str, file: Arc<dyn BlockNode>) -> DirtyImage {
        DirtyImage { name: name.to_owned(), file }
    }

    /// Returns the name of the node with the image's file.
    pub fn file(&self) -> &str {
        self.file.name()
    }

    /// Repairs the image on a thread of its own. The file's node is released before the end.
    ///
    /// Dropping the future stops the repair at its next access to the file. The image stays dirty.
    ///
    /// # Errors
    ///
    /// The image cannot be read or written, or errors are left.
    pub fn repair(self) -> impl Future<Output = Result<(), OpenError>> {
        let stop = StopOnDrop(Arc::new(AtomicBool::new(false)));
        let (end, ended) = oneshot::channel();
        let is_stopped = stop.0.clone();
        let work = move || {
            let DirtyImage { name, file } = self;
            end.send(repair(&name, file, &is_stopped));
        };
        let begun = thread::Builder::new().name("qcow2-repair".into()).spawn(work);
        async move {
            let _stop = stop;
            begun.map_err(|error| OpenError::io("Could not repair a qcow2 image", &error))?;
            ended.await.unwrap_or_else(|_| {
                Err(OpenError::new("Could not repair a qcow2 image: its thread ended"))
            })
        }
    }
}

/// Repairs an image as QEMU does: its reference counts may be wrong.
pub(super) fn repair(
    name: &str,
    file: Arc<dyn BlockNode>,
    stop: &AtomicBool,
) -> Result<(), OpenError> {
    log::warn!(
        "qcow2 image of node '{name}' was not closed cleanly: its reference counts are repaired"
    );
    let mut lines = 0;
    let tell = |finding: fmt::Arguments<'_>| {
        lines += 1;
        if lines <= MOST_LINES {
            log::info!("node '{name}': {finding}");
        }
    };
    let checked = check_node(name, file, Repair::All, None, stop, tell);
    if lines > MOST_LINES {
        log::info!("node '{name}': {} more findings", lines - MOST_LINES);
    }
    let error = match checked {
        Ok(checked) if checked.corruptions == 0 && checked.check_errors == 0 => return Ok(()),
        Ok(checked) => io::Error::other(format!(
            "{} errors of the metadata cannot be repaired",
            checked.corruptions + checked.check_errors
        )),
        Err(CheckFailure::Open(error)) => return Err(error),
        Err(CheckFailure::NoChecks) => io::ErrorKind::InvalidData.into(),
        Err(CheckFailure::Io(error)) => error,
    };
    let message = format!("Could not repair dirty qcow2 image of node '{name}'");
    Err(OpenError::io(message, &error).with_hint("read-only=on opens the image for reading"))
}
