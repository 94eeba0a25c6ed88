//! State of an image's files: writes in flight, metadata that is not written yet.

use std::sync::Arc;

use event_loop::IoBufs;
use nix::errno::Errno;

use super::context::{Channels, Transfer};
use super::metadata::Metadata;
use super::writes::{Ticket, Writes};
use crate::request::Op;

/// State that an image's requests share, besides its tables.
#[derive(Debug)]
pub(super) struct Shared {
    /// Writes to the files that may outlive their tasks.
    writes: Arc<Writes>,
    /// Changed metadata. A read-only image has none, unless another process has left some.
    pub(super) metadata: Option<Metadata>,
}

impl Shared {
    pub(super) fn new(metadata: Option<Metadata>) -> Arc<Shared> {
        Arc::new(Shared { writes: Arc::default(), metadata })
    }

    /// Records the beginning of a write to one of the files.
    pub(super) fn begin_write(&self) -> Ticket {
        self.writes.begin()
    }

    /// A write that has no ticket has ended.
    #[inline]
    pub(super) fn ended_write(&self) {
        self.writes.ended();
    }

    /// Whether the guest's data may not be on stable storage.
    pub(super) fn is_unflushed(&self) -> bool {
        self.writes.are_unflushed()
    }

    /// Flushes the nodes of the image's files.
    pub(super) async fn sync(&self, channels: &Channels) -> Result<(), Errno> {
        self.writes.begin_flush();
        // A failed flush is to be repeated.
        sync(channels).await.inspect_err(|_| self.writes.ended())
    }

    /// Waits for all writes that have begun.
    pub(super) async fn settle_writes(&self) {
        self.writes.settle().await;
    }
}

/// Flushes the nodes of the image's files.
pub(super) async fn sync(channels: &Channels) -> Result<(), Errno> {
    let flush = |channel| Transfer::start(channel, Op::Flush, 0, 0, IoBufs::new());
    let file = flush(&channels.file);
    let data_file = channels.data_file.as_ref().map(flush);
    let file = file.await.0;
    let data_file = match data_file {
        Some(transfer) => transfer.await.0,
        None => Ok(()),
    };
    file.and(data_file)
}
