//! Damaged metadata that is found while an image is in use: told once, and marked in the image's header.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::mailbox;
use event_loop::sync::lock;
use nix::errno::Errno;

use super::context::Channels;
use super::image::{Image, errno_of};
use super::marker;
use super::storage;

/// An image's metadata is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The node whose image it is.
    pub node_name: String,
    /// What was found.
    pub message: String,
    /// The image was being written: it is marked as corrupt, and all further requests fail.
    pub is_fatal: bool,
}

/// Where damage is told.
pub(crate) type Damages = Arc<mailbox::Sender<Damage>>;

/// What was found of an image.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Waits to be told.
    message: Mutex<Option<String>>,
    /// Something was found. What is found later is not told.
    is_damaged: AtomicBool,
}

impl Found {
    /// Whether the metadata is known to be damaged.
    pub(super) fn is_damaged(&self) -> bool {
        self.is_damaged.load(Ordering::Acquire)
    }

    /// What is to be told. `None`: nothing, or it was told.
    fn take(&self) -> Option<String> {
        lock(&self.message).take()
    }
}

impl Image {
    /// What a request is answered with for an error of [`imago`]'s, of which note is taken if it says that
    /// metadata is damaged.
    pub(super) fn failed(&self, error: io::Error) -> Errno {
        let is_damage =
            error.raw_os_error().is_none() && error.kind() == io::ErrorKind::InvalidData;
        if is_damage && !self.damage.is_damaged.swap(true, Ordering::AcqRel) {
            *lock(&self.damage.message) = Some(error.to_string());
        }
        errno_of(error)
    }

    /// Tells of damage that a request has found, the first time. `at`: where on the disk the request was. An image
    /// that is written to is marked before.
    pub(super) async fn tell_damage(
        &self,
        channels: &Channels,
        node_name: &str,
        at: u64,
        damages: Option<&Damages>,
    ) {
        let Some(message) = self.damage.take() else { return };
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
        log::error!(
            "node '{node_name}': the metadata of its qcow2 image is damaged: {message}, found by a request at byte \
             {at}: {consequence} (Input/output error); qemu-img check -r all repairs it"
        );
        if let Some(damages) = damages {
            // Without anybody who hears of it, the log has it.
            let _ = damages.send(Damage { node_name: node_name.to_owned(), message, is_fatal });
        }
    }

    /// Has the header say that the image is corrupt. What was answered is written before.
    async fn mark_corrupt(&self, channels: &Channels) -> Result<(), Errno> {
        if self.version < 3 {
            return Err(Errno::EOPNOTSUPP);
        }
        self.shared.metadata.iter().for_each(|metadata| metadata.set_corrupt());
        // What cannot be written stays where it is.
        let _ = self.flush(channels).await;
        let _turn = self.flushing.lock().await;
        marker::write_corrupt(channels).await?;
        storage::sync(channels).await
    }
}
