//! Damaged metadata that is found while an image is in use: reported once, and marked in the image's
//! header.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::mailbox;
use event_loop::sync::lock;
use nix::errno::Errno;

use super::context::Channels;
use super::engine::Owner;
use super::image::Image;
use super::marker;
use super::storage;

/// Damage in the metadata of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Name of the image's node.
    pub node_name: String,
    /// What is damaged.
    pub message: String,
    /// The part of the image's file that a write was prevented to, bytes. `None`: no write was prevented.
    pub place: Option<Range<u64>>,
    /// The image is open for writing: all further requests fail, and the header is marked as
    /// corrupt.
    pub is_fatal: bool,
}

/// Where damage is reported.
pub(crate) type Damages = Arc<mailbox::Sender<Damage>>;

/// Damage that was found in one image.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The report, until it is sent: its text, and the place in the file.
    report: Mutex<Option<(String, Option<Range<u64>>)>>,
    /// Damage was found. Later damage is not reported.
    is_damaged: AtomicBool,
    /// The file may lead to other tables than those in memory.
    is_cut_off: AtomicBool,
}

impl Found {
    /// Whether the metadata is known to be damaged.
    pub(super) fn is_damaged(&self) -> bool {
        self.is_damaged.load(Ordering::Acquire)
    }

    /// Whether the tables in memory must not be used any more: the file may lead to others, in clusters that these tables
    /// have as free.
    pub(super) fn is_cut_off(&self) -> bool {
        self.is_cut_off.load(Ordering::Acquire)
    }

    /// Takes the report. `None`: there is no damage, or the report was taken before.
    fn take(&self) -> Option<(String, Option<Range<u64>>)> {
        lock(&self.report).take()
    }
}

impl Image {
    /// Records that metadata is damaged, and returns the errno that a request completes with for that.
    /// `place`: the bytes of the file that a write was prevented to.
    pub(super) fn damaged(&self, why: String, place: Option<Range<u64>>) -> Errno {
        if !self.damage.is_damaged.swap(true, Ordering::AcqRel) {
            *lock(&self.damage.report) = Some((why, place));
        }
        Errno::EIO
    }

    /// As [`damaged`](Self::damaged), where the file may lead to other tables than those in memory. From now on, calls of
    /// the engine fail, no metadata is written out, and no reserved cluster becomes free.
    pub(super) fn cut_off(&self, why: String) {
        self.damage.is_cut_off.store(true, Ordering::Release);
        self.damaged(why, None);
    }

    /// As [`damaged`](Self::damaged), for a prevented write to clusters that hold metadata. In QEMU's words.
    pub(super) fn overlapped(&self, clusters: Range<u64>, owner: Owner) -> Errno {
        let why = format!("Preventing invalid write on metadata (overlaps with {owner})");
        self.damaged(why, Some(clusters.start * self.cluster..clusters.end * self.cluster))
    }

    /// Reports damage that was found, once per image. An image that is open for writing is marked as corrupt first.
    /// `at`: the offset of the request that has found it, bytes of the disk. `None`: a change of the snapshots has.
    pub(super) async fn tell_damage(
        &self,
        channels: &Channels,
        node_name: &str,
        at: Option<u64>,
        damages: Option<&Damages>,
    ) {
        let Some((message, place)) = self.damage.take() else { return };
        let is_fatal = self.shared.metadata.is_some() && !self.read_only;
        let consequence = match is_fatal {
            false => "requests that need the damaged part fail".to_owned(),
            true => {
                let marked = match self.mark_corrupt(channels).await {
                    Ok(()) => "the image is marked as corrupt".to_owned(),
                    Err(errno) => format!("marking the image as corrupt failed ({})", errno.desc()),
                };
                format!("{marked}, and all further requests fail")
            }
        };
        let finder = match at {
            Some(at) => format!("a request at byte {at}"),
            None => "a change of its snapshots".to_owned(),
        };
        log::error!(
            "node '{node_name}': the metadata of its qcow2 image is damaged: {message}, found by {finder}: \
             {consequence} (Input/output error); ringmill check shows what is damaged"
        );
        if let Some(damages) = damages {
            // Without a receiver, the log line is the only report.
            let _ =
                damages.send(Damage { node_name: node_name.to_owned(), message, place, is_fatal });
        }
    }

    /// Marks the image as corrupt in its header. Metadata of completed requests is written first.
    async fn mark_corrupt(&self, channels: &Channels) -> Result<(), Errno> {
        if self.version < 3 {
            return Err(Errno::EOPNOTSUPP);
        }
        self.shared.metadata.iter().for_each(|metadata| metadata.set_corrupt());
        // A failed flush does not prevent the mark.
        let _ = self.flush(channels).await;
        let _turn = self.flushing.lock().await;
        marker::write_corrupt(channels).await?;
        storage::sync(channels).await
    }
}
