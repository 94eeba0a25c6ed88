//! An open image as a node.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ::options::Value;
use event_loop::sync::lock;
use event_loop::{EventLoop, oneshot};
use nix::errno::Errno;
use rbd::Format;

use super::channel::RbdChannel;
use super::connections::{OpenImage, Opened, within};
use super::encrypt::word;
use super::jobs::Jobs;
use crate::drivers::live::{self, Live};
use crate::error::OpenError;
use crate::node::{
    BlockNode, Channel, FormattedImage, Geometry, ImageDetails, ResizeError, Resized, Watcher,
    Watchers,
};
use crate::options::BlockdevOptions;
use crate::services::DriverServices;

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;
/// What objects are written in without being read before, bytes: the allocation unit of an OSD.
const BLOCK: u32 = 4096;
/// To what discards are rounded if the configuration does not say it, bytes: Ceph's default.
const DISCARD_GRANULARITY: u64 = 64 << 10;
/// How long a larger size may take, nanoseconds. A killed client's lock lasts 30 seconds.
const GROWING_NS: u64 = 35_000_000_000;

/// An image of a Ceph cluster.
pub(super) struct RbdNode {
    name: String,
    /// The encryption format of the contents when the image was opened.
    format: Option<Format>,
    shared: Arc<Shared>,
    services: Arc<DriverServices>,
    /// Completes once the image is closed.
    closed: Option<oneshot::Receiver<()>>,
}

/// What channels need of a node.
pub(super) struct Shared {
    pub(super) disk: Arc<Disk>,
    /// As if the options permitted everything. `read_only`: the image was opened for reading, as one of a snapshot is.
    geometry: Geometry,
    pub(super) options: Live,
    /// See [`BlockNode::enable_growth`].
    grows: AtomicBool,
}

/// The image.
pub(super) struct Disk {
    image: OpenImage,
    name: String,
    /// Bytes of the image.
    size: AtomicU64,
    watchers: Watchers,
    /// Held while the image grows: a request must not undo the growth of another.
    growing: Mutex<()>,
    jobs: Jobs,
}

impl RbdNode {
    /// Makes a node of an open image.
    pub(super) fn new(
        name: &str,
        common: &BlockdevOptions,
        opened: Opened,
        services: Arc<DriverServices>,
    ) -> RbdNode {
        let Opened { mut image, size, format, jobs } = opened;
        let image_read_only = image.get().is_some_and(|image| image.is_read_only());
        let granularity =
            image.get().and_then(|image| image.cluster().number("rbd_discard_granularity_bytes"));
        let granularity = granularity.unwrap_or(DISCARD_GRANULARITY).clamp(SECTOR, 1 << 30);
        let closed = image.tell_closed();
        let disk = Arc::new(Disk {
            image,
            name: name.to_owned(),
            size: AtomicU64::new(size),
            watchers: Watchers::default(),
            growing: Mutex::new(()),
            jobs,
        });
        disk.clone().watch();
        let geometry = Geometry {
            size: size.next_multiple_of(SECTOR),
            read_only: image_read_only,
            physical_block_size: BLOCK,
            request_alignment: 1,
            discard: true,
            discard_granularity: u32::try_from(granularity).unwrap_or(u32::MAX),
            write_zeroes: true,
            write_cache: true,
        };
        let shared =
            Shared { disk, geometry, options: Live::new(common), grows: AtomicBool::new(false) };
        RbdNode {
            name: name.to_owned(),
            format,
            shared: Arc::new(shared),
            services,
            closed: Some(closed),
        }
    }
}

impl RbdNode {
    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }
}

impl Disk {
    /// Follows changes of the size that others make.
    fn watch(self: Arc<Self>) {
        let Some(image) = self.image.get().cloned() else { return };
        let (changed, jobs) = (Arc::downgrade(&self), self.jobs.clone());
        // Asking for the size blocks, on a thread that is not the library's.
        let look = move || {
            let changed = changed.clone();
            jobs.post(move || {
                if let Some(disk) = changed.upgrade() {
                    disk.look();
                }
            });
        };
        self.jobs.clone().post(move || match image.notify(look) {
            // The size may have changed before.
            Ok(()) => self.look(),
            Err(error) => {
                let name = &self.name;
                log::warn!("{name}: changes of the image's size are not noticed: {error}");
            }
        });
    }

    /// Takes the image's size over. Blocks.
    fn look(&self) {
        match self.image.get().map(|image| image.size()) {
            Some(Ok(size)) => self.set_size(size),
            Some(Err(error)) => log::warn!("{}: {error}", self.name),
            None => {}
        }
    }

    fn set_size(&self, size: u64) {
        if self.size.swap(size, Ordering::Relaxed) != size {
            self.watchers.tell();
        }
    }

    /// Returns the bytes of the image, now.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Has the image grow to at least `end` bytes.
    pub(super) fn grow(self: &Arc<Self>, end: u64) -> oneshot::Receiver<Result<(), Errno>> {
        let disk = self.clone();
        self.jobs.run(move || {
            let _growing = lock(&disk.growing);
            let Some(image) = disk.image.get() else { return Err(Errno::ENODEV) };
            let mut size = image.size().map_err(|error| error.errno)?;
            if size < end {
                image.resize(end).map_err(|error| error.errno)?;
                size = end;
            }
            disk.set_size(size);
            Ok(())
        })
    }

    /// Returns where calls are made that block.
    pub(super) fn jobs(&self) -> &Jobs {
        &self.jobs
    }
}

impl Shared {
    /// Returns size and limits, now.
    pub(super) fn geometry(&self) -> Geometry {
        let options = self.options.get();
        let read_only = self.geometry.read_only || options.read_only();
        Geometry {
            size: self.disk.size().next_multiple_of(SECTOR),
            read_only,
            discard: options.unmaps() && !read_only,
            write_zeroes: !read_only,
            write_cache: !read_only,
            ..self.geometry
        }
    }

    /// Gives the open node other options. Returns how to take them back. The message is QEMU's.
    pub(super) fn change(
        self: &Arc<Self>,
        common: &BlockdevOptions,
    ) -> Result<impl FnOnce() + use<>, OpenError> {
        if self.geometry.read_only && !common.read_only {
            let name = &self.disk.name;
            return Err(OpenError::new(format!(
                "Cannot change node '{name}' to r/w when using an rbd snapshot"
            )));
        }
        let (shared, before) = (self.clone(), self.options.set(live::Options::of(common)));
        Ok(move || {
            shared.options.set(before);
        })
    }

    /// Returns whether requests may reach past the end of the image, up to byte `end`.
    #[cold]
    pub(super) fn may_reach(&self, end: u64) -> bool {
        self.grows.load(Ordering::Relaxed) && i64::try_from(end).is_ok()
    }
}

impl Drop for RbdNode {
    fn drop(&mut self) {
        // Channels that are left keep the image open.
        if Arc::strong_count(&self.shared) == 1
            && let Some(closed) = self.closed.take()
        {
            self.services.closes(closed);
        }
    }
}

impl BlockNode for RbdNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn watch(&self, watcher: Watcher) {
        self.shared.disk.watchers.add(watcher);
    }

    fn resize(self: Arc<Self>, size: u64, event_loop: &EventLoop) -> Resized {
        let disk = self.shared.disk.clone();
        let Geometry { size: before, read_only, .. } = self.geometry();
        let (checked, event_loop) = (ResizeError::check(size, read_only), event_loop.clone());
        Box::pin(async move {
            checked?;
            let what = "failed to resize";
            let jobs = disk.jobs.clone();
            let resized = jobs.run(move || {
                let Some(image) = disk.image.get() else { return Err(Errno::ENODEV) };
                image.resize(size).map_err(|error| error.errno)?;
                disk.set_size(size);
                Ok(())
            });
            let resized = match size >= before {
                true => within(&event_loop, GROWING_NS, resized).await.ok_or(ResizeError::Slow)?,
                // Removing objects may take longer. Requests are held until what is cut off is gone.
                false => resized.await,
            };
            let resized = resized.unwrap_or(Err(Errno::ECANCELED));
            resized.map_err(|errno| ResizeError::Os { what, errno })
        })
    }

    fn enable_growth(&self) {
        self.shared.grows.store(true, Ordering::Relaxed);
    }

    fn image(self: Arc<Self>) -> Option<Arc<dyn FormattedImage>> {
        Some(self)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let image = self.shared.disk.image.get().cloned();
        let image = image.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
        Ok(RbdChannel::new(event_loop, self.shared.clone(), image))
    }
}

impl FormattedImage for RbdNode {
    fn details(&self) -> ImageDetails {
        let format =
            self.format.map(|format| ("encryption-format".to_owned(), word(format).into()));
        let data = Value::Object(format.into_iter().collect());
        let specific = [("type".to_owned(), "rbd".into()), ("data".to_owned(), data)];
        // As QSD, which calls a node encrypted if it decrypts by itself.
        ImageDetails {
            cluster_size: None,
            encrypted: false,
            backing: None,
            specific: specific.into(),
        }
    }
}
