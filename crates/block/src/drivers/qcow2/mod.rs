//! `qcow2`: QEMU's image format.
//!
//! The [`engine`] has the metadata in memory: which clusters are where, which are in use. It does no I/O.
//! What it changes goes to the file by way of [`metadata`]. The guest's data does not pass through it:
//! [`access`] asks where it is, and has it go between the guest's memory and the node below. An image is
//! shared by all loops ([`core`]). A request to data that has its place goes straight to the node below; any
//! other is a task on the loop that it came from ([`channel`]).

mod access;
mod amend;
mod bitmaps;
pub(crate) mod caches;
mod channel;
mod check;
mod compress;
mod compression;
mod context;
mod core;
mod create;
mod damage;
mod described;
mod details;
mod direct;
mod dirty;
mod driver;
pub(crate) mod encrypt;
mod engine;
mod extend;
mod header;
mod header_layout;
mod image;
mod implicit;
mod inflated;
mod journal;
mod layout;
mod locks;
mod marker;
mod metadata;
mod open;
pub(crate) mod options;
mod origin;
mod overlap;
mod plan;
mod raw_data;
mod release_for_handover;
mod resize;
mod rooms;
mod scratch;
mod snapshots;
mod status;
mod steps;
mod storage;
mod writes;
mod zero;

use std::future::{Future, ready};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_loop::{EventLoop, oneshot};
use nix::errno::Errno;

use self::bitmaps::ImageBitmaps;
use self::channel::{Clean, Qcow2Channel};
use self::context::Channels;
use self::details::Details;
use self::image::{Image, errno_of};
use self::release_for_handover::Releasing;
use self::zero::Discarding;
use crate::drivers::encryption::{KeySlots, Unlocked};
use crate::inherited::OpenImage;
use crate::node::{
    BackingName, BlockNode, ChangingSnapshots, Channel, FormattedImage, Geometry, HeldState,
    HostStorage, ImageDetails, InternalSnapshot, InternalSnapshots, Placing, Released, RemoteImage,
    Renaming, ResizeError, Resized, SnapshotChange, Watcher, Watchers,
};
use crate::options::{DetectZeroes, Discard};
use crate::request::Request;
use crate::track::BitmapStore;

pub use self::check::{CheckFailure, check_qcow2};
pub use self::damage::Damage;
pub(crate) use self::damage::Damages;
pub use self::dirty::DirtyImage;
pub use self::engine::{Checked, Repair};
pub(crate) use self::header::is_qcow2;
pub(crate) use self::journal::Journals;
pub use self::journal::{
    JournalState, LeftJournal, left_journals, private_folder, remove_left_journal,
};
pub use self::layout::{CreateQcow2, create_qcow2, create_qcow2_beside};
pub(crate) use self::open::{Below, ImplicitBacking, Opening, probe};
pub use self::origin::OverlayFile;

/// An opened qcow2 image.
pub(crate) struct Qcow2Node {
    name: String,
    below: Below,
    image: Arc<Image>,
    bitmaps: Arc<ImageBitmaps>,
    details: Details,
    read_only: bool,
    discard: Discard,
    detect_zeroes: DetectZeroes,
    /// `discard-no-unref`: clusters without data keep their place.
    no_unref: bool,
    /// `pass-discard-request`.
    pass_discard: bool,
    /// `pass-discard-snapshot`.
    pass_discard_snapshot: bool,
    /// `cache-clean-interval`.
    clean: Clean,
    watchers: Watchers,
    letting_go: Releasing,
    /// Where damage is reported.
    damages: Option<Damages>,
    /// Of an image that is gone on with: whether it is this process' alone.
    owned: Option<Arc<AtomicBool>>,
    /// The image is closed: another node may have opened it.
    suspended: AtomicBool,
    /// The key of an encrypted image, for the node that takes the place of this one.
    _unlocked: Option<Arc<Unlocked>>,
}

impl Qcow2Node {
    fn check(&self, request: &Request) -> Result<(), Errno> {
        if self.read_only && !request.op.only_reads() {
            return Err(Errno::EROFS);
        }
        if self.image.damage.is_damaged() && !self.read_only {
            return Err(Errno::EIO);
        }
        match request.offset.checked_add(request.len) {
            Some(end) if end <= self.image.size() => Ok(()),
            _ => Err(request.op.beyond_end()),
        }
    }

    fn discarding(&self) -> Discarding {
        Discarding { unref: !self.no_unref, pass: self.pass_discard }
    }

    /// Begins work on the image on a thread of its own.
    fn begin_apart<F: Future<Output = Result<(), Errno>> + 'static>(
        &self,
        work: impl FnOnce(Rc<Channels>) -> F + Send + 'static,
    ) -> io::Result<oneshot::Receiver<io::Result<()>>> {
        let below = self.below.clone();
        self.letting_go.begin_with(move || {
            open::on_a_loop(&below, |channels| async move { Ok(work(channels).await?) })
        })
    }

    /// Waits for the work.
    async fn end_apart(
        &self,
        begun: io::Result<oneshot::Receiver<io::Result<()>>>,
    ) -> io::Result<()> {
        let ended = begun?.await;
        self.letting_go.end();
        ended.map_err(|_| io::Error::other("the thread has ended without a result"))?
    }

    /// Has the file say that its bitmaps are in use, as long as they are in memory.
    fn mark_bitmaps(self: Arc<Self>) -> Released {
        let (image, bitmaps) = (self.image.clone(), self.bitmaps.clone());
        let begun = self.begin_apart(|channels| async move {
            bitmaps.mark(&channels).await?;
            image.flush(&channels).await?;
            if image.kept.any() {
                image.mark_now(&channels).await;
                image.kept.go_on();
            }
            Ok(())
        });
        Box::pin(async move { self.end_apart(begun).await })
    }

    async fn flush(&self, channels: &Channels) -> Result<(), Errno> {
        match self.read_only {
            true => Ok(()),
            false => self.image.flush(channels).await,
        }
    }
}

impl BlockNode for Qcow2Node {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        let below = self.below.data().geometry();
        let cluster = self.image.cluster as u32;
        let discard = self.discard == Discard::Unmap && !self.read_only;
        Geometry {
            size: self.image.size(),
            read_only: self.read_only,
            physical_block_size: below.physical_block_size,
            request_alignment: match self.below.encrypted {
                Some(_) => below.request_alignment.max(crypto::cipher::SECTOR as u32),
                None => below.request_alignment,
            },
            discard,
            discard_granularity: cluster,
            write_zeroes: !self.read_only,
            write_cache: !self.read_only,
        }
    }

    fn watch(&self, watcher: Watcher) {
        self.watchers.add(watcher);
    }

    /// Data that is encrypted or elsewhere is never compressed: QEMU does not encrypt compressed clusters.
    fn compresses(&self) -> bool {
        self.below.encrypted.is_none() && self.below.data_file.is_none()
    }

    fn host_storage(self: Arc<Self>) -> Option<Arc<dyn HostStorage>> {
        Some(self)
    }

    fn remote_image(self: Arc<Self>) -> Option<Arc<dyn RemoteImage>> {
        let is_on_server = self.below.file.clone().remote_image().is_some();
        let is_above_one = || self.below.backing.as_ref().is_some_and(|it| it.content().is_some());
        (is_on_server || is_above_one()).then_some(self)
    }

    fn image(self: Arc<Self>) -> Option<Arc<dyn FormattedImage>> {
        Some(self)
    }

    fn internal_snapshots(self: Arc<Self>) -> Option<Arc<dyn InternalSnapshots>> {
        Some(self)
    }

    fn held_state(self: Arc<Self>) -> Option<Arc<dyn HeldState>> {
        Some(self)
    }

    fn resize(self: Arc<Self>, size: u64, event_loop: &EventLoop) -> Resized {
        let event_loop = event_loop.clone();
        Box::pin(async move {
            ResizeError::check(size, self.read_only)?;
            let before = self.image.size();
            self.bitmaps.note_cut(size..before);
            let failed = |error| resize::failed(errno_of(error));
            let channels = Rc::new(self.below.open_channels(&event_loop).map_err(failed)?);
            let resized = self.image.resize(&channels, size, self.pass_discard).await;
            if self.image.size() != before {
                self.watchers.tell();
            }
            resized
        })
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let channels = self.below.open_channels(event_loop)?;
        Ok(Rc::new(Qcow2Channel::new(self, event_loop, channels)))
    }
}

impl HostStorage for Qcow2Node {
    fn allocated(&self) -> Option<u64> {
        let data = self.below.data_file.as_ref().map_or(Some(0), |data| data.allocated());
        Some(self.below.file.allocated()? + data?)
    }
}

impl RemoteImage for Qcow2Node {
    fn content(&self) -> Option<String> {
        self.below.file.content()
    }

    fn content_behind(&self) -> Option<String> {
        self.below.backing.as_ref()?.content()
    }
}

impl FormattedImage for Qcow2Node {
    fn details(&self) -> ImageDetails {
        let (bitmaps, left_out) = self.bitmaps.tell();
        self.details.get((&bitmaps, left_out))
    }

    fn bitmap_store(&self) -> Option<Arc<dyn BitmapStore>> {
        Some(self.bitmaps.clone())
    }

    fn key_slots(&self) -> Option<Arc<KeySlots>> {
        self.details.key_slots()
    }

    fn places(self: Arc<Self>, range: Range<u64>, event_loop: &EventLoop) -> Option<Placing> {
        let event_loop = event_loop.clone();
        Some(Box::pin(async move {
            let channels = Rc::new(self.below.open_channels(&event_loop).map_err(errno_of)?);
            let _mapping = self.image.claim(range.clone(), false).await;
            self.image.places(&channels, range).await
        }))
    }

    fn set_backing_name(
        self: Arc<Self>,
        name: Option<BackingName>,
        event_loop: &EventLoop,
    ) -> Renaming {
        if self.read_only {
            return Box::pin(ready(Err(Errno::EROFS)));
        }
        let event_loop = event_loop.clone();
        Box::pin(async move {
            let channels = Rc::new(self.below.open_channels(&event_loop).map_err(errno_of)?);
            let reserves_bitmaps = self.bitmaps.has_new();
            self.image.set_backing_name(&channels, name.as_ref(), reserves_bitmaps).await?;
            self.details.set_backing(name);
            Ok(())
        })
    }
}

impl InternalSnapshots for Qcow2Node {
    fn list(&self) -> Option<Vec<InternalSnapshot>> {
        // As in QEMU: another program may change the data file.
        self.below.data_file.is_none().then(|| self.image.list_snapshots())
    }

    fn change(
        self: Arc<Self>,
        change: SnapshotChange,
        event_loop: &EventLoop,
    ) -> ChangingSnapshots {
        let refused = match () {
            () if self.below.data_file.is_some() => Some(Errno::ENOTSUP),
            () if self.read_only => Some(Errno::EROFS),
            () => None,
        };
        if let Some(errno) = refused {
            return Box::pin(ready(Err(errno.into())));
        }
        let event_loop = event_loop.clone();
        Box::pin(async move {
            let channels = Rc::new(self.below.open_channels(&event_loop).map_err(errno_of)?);
            let changed = match change {
                SnapshotChange::Make(name) => self.image.make_snapshot(&channels, &name).await,
                SnapshotChange::Delete(id) => {
                    self.image.delete_snapshot(&channels, &id, self.pass_discard_snapshot).await
                }
                SnapshotChange::Apply(id) => {
                    self.image.apply_snapshot(&channels, &id, self.pass_discard_snapshot).await
                }
            };
            if changed.is_err() {
                let damages = self.damages.as_ref();
                self.image.tell_damage(&channels, &self.name, None, damages).await;
            }
            changed
        })
    }
}

impl HeldState for Qcow2Node {
    fn journal(&self) -> Option<OpenImage<Arc<OwnedFd>>> {
        self.image.shared.metadata.as_ref()?.journal()
    }

    fn release_for_handover(self: Arc<Self>) -> Released {
        if self.read_only {
            return Box::pin(ready(Ok(())));
        }
        self.image.kept.lend();
        let begun = self.letting_go.begin(&self.below, &self.image);
        Box::pin(async move { self.end_apart(begun).await })
    }

    fn suspend_image(self: Arc<Self>) -> Released {
        if self.read_only {
            return Box::pin(ready(Ok(())));
        }
        self.image.kept.lend();
        let (image, bitmaps) = (self.image.clone(), self.bitmaps.clone());
        let begun = self.begin_apart(|channels| async move {
            if image.damage.is_cut_off() {
                // It is not known which tables another process would find.
                return Err(Errno::EIO);
            }
            bitmaps.store(&channels).await?;
            image.close(&channels).await
        });
        Box::pin(async move {
            let suspended = self.end_apart(begun).await;
            match suspended.is_ok() {
                true => self.suspended.store(true, Ordering::Relaxed),
                // The file may have bitmaps that are taken for complete.
                false => drop(self.clone().mark_bitmaps().await),
            }
            suspended
        })
    }

    fn resume_image(self: Arc<Self>) -> Released {
        if !self.suspended.swap(false, Ordering::Relaxed) {
            return Box::pin(ready(Ok(())));
        }
        self.image.inflated.forget_all();
        self.mark_bitmaps()
    }
}

impl Drop for Qcow2Node {
    /// What is in memory of the metadata goes to the file.
    fn drop(&mut self) {
        self.letting_go.end();
        // The process that hands over goes on with the image and its journal, unless this one does.
        let is_ours = self.owned.as_ref().is_none_or(|owned| owned.load(Ordering::Relaxed));
        if self.suspended.load(Ordering::Relaxed) {
            self.image.drop_journal();
        } else if self.read_only {
            self.bitmaps.tell_lost();
        } else if is_ours {
            open::close(&self.name, &self.below, &self.image, &self.bitmaps);
        }
        if is_ours {
            self.image.kept.remove_all();
        }
    }
}
