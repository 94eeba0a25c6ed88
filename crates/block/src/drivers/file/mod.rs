//! `file` and `host_device`: an image in a file or on a block device.

mod bounce;
mod calls;
mod channel;
mod create;
mod describe;
mod driver;
mod known_data;
mod locks;
mod merge;
mod open;
pub(crate) mod options;
mod plan;
mod probe;
mod probes;
mod resize;
mod slots;
mod syncs;
mod zeroes;

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use event_loop::{Engine, EventLoop, SetupError};
use nix::errno::Errno;
use nix::sys::stat::SFlag;

use self::channel::FileChannel;
use self::known_data::KnownData;
pub(crate) use self::locks::{Claims, ImageLock};
use self::plan::Limits;
use self::syncs::Syncs;
use crate::drivers::range_lock::RangeLock;
use crate::error::OpenError;
use crate::format::Format;
use crate::image_place::ImagePlace;
use crate::inherited::Inherited;
use crate::node::{
    BlockNode, Channel, Geometry, GrowingFile, HostStorage, Resized, Watcher, Watchers,
};
use crate::options::{Aio, BlockdevOptions, DetectZeroes, Discard, FileOptions};
use crate::own_mounts::OwnMounts;
use crate::request::Op;

/// What kind of file the image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `file`: a regular file.
    File,
    /// `host_device`: a block device.
    HostDevice,
}

impl Kind {
    /// Returns the kind of the file at a path. What is no block device counts as a file.
    pub(crate) fn of(path: &Path, mounts: &OwnMounts) -> Kind {
        let is_device = mounts.check(path).is_ok()
            && std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
        if is_device { Kind::HostDevice } else { Kind::File }
    }
}

/// An opened image. Holds the image locks for as long as it lives.
pub(crate) struct FileNode {
    name: String,
    /// As it was named when it was opened.
    path: PathBuf,
    /// The name for trace points.
    trace_name: CString,
    fd: Arc<OwnedFd>,
    /// The file without `O_DIRECT`, for a partial block at its end. Present if there is such a tail, or
    /// may be one after a resize.
    tail_fd: Option<Arc<OwnedFd>>,
    /// The geometry at the time of opening.
    geometry: Geometry,
    /// With `auto-read-only`: why the file could not be opened for writing.
    why_read_only: Option<OpenError>,
    /// The present size in bytes.
    size: AtomicU64,
    /// The largest end of a write, bytes.
    highest_write: AtomicU64,
    /// How far requests may reach on a device that was made larger, bytes; 0 if the device has its size.
    reach: AtomicU64,
    /// The limits without the tail, which depends on the size: see [`limits_now`](Self::limits_now).
    limits: Limits,
    range_lock: RangeLock,
    kind: Kind,
    aio: Option<Aio>,
    no_flush: bool,
    discard: Discard,
    detect_zeroes: DetectZeroes,
    /// Whether written data waits in the host's page cache.
    page_cache: bool,
    /// There was a tail before a resize, see [`may_wait`](Self::may_wait).
    had_tail: AtomicBool,
    capabilities: Capabilities,
    known_data: KnownData,
    /// The errno of a failed flush of the page cache; 0 if none has failed. The kernel reports the failure once and then
    /// considers the lost pages clean, so no later flush can be answered with success.
    flush_failed: Arc<AtomicI32>,
    /// Flushes of the page cache that are under way.
    syncs: Arc<Syncs>,
    /// Requests have changed the image since the last flush began.
    unflushed: AtomicBool,
    /// See [`BlockNode::enable_growth`].
    grows: AtomicBool,
    watchers: Watchers,
    /// Dropped with the node.
    lock: Option<Arc<ImageLock>>,
}

impl FileNode {
    /// Opens and locks the image, or takes it from `inherited`. The image is on none of `mounts`.
    pub(crate) fn open(
        name: String,
        kind: Kind,
        common: &BlockdevOptions,
        options: &FileOptions,
        mounts: &OwnMounts,
        inherited: &mut Inherited,
    ) -> Result<FileNode, OpenError> {
        open::open(name, kind, common, options, None, mounts, inherited)
    }

    /// Opens again the image that an earlier node has `locked`. Takes over the lock and the state of
    /// flushes.
    pub(crate) fn reopen(
        name: String,
        kind: Kind,
        common: &BlockdevOptions,
        options: &FileOptions,
        mounts: &OwnMounts,
        locked: Option<Arc<ImageLock>>,
        flush_failed: Option<Arc<AtomicI32>>,
    ) -> Result<FileNode, OpenError> {
        let inherited = &mut Inherited::default();
        let mut node = open::open(name, kind, common, options, locked, mounts, inherited)?;
        if let Some(flush_failed) = flush_failed {
            node.flush_failed = flush_failed;
        }
        Ok(node)
    }

    /// The descriptor of the file.
    pub(crate) fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// The errno of a failed flush, with which all later ones fail, or 0.
    pub(crate) fn flush_failed(&self) -> &Arc<AtomicI32> {
        &self.flush_failed
    }

    /// The result of a flush, as far as earlier ones decide it.
    fn flushes_so_far(&self) -> Result<(), Errno> {
        match self.flush_failed.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(Errno::from_raw(errno)),
        }
    }

    /// Whether a durable write is a write and a flush. A failed write with `RWF_DSYNC` returns either its
    /// own error, such as a full disk, or the error of lost pages of other writes: the two cannot be told
    /// apart.
    fn flushes_writes(&self) -> bool {
        self.page_cache && !self.no_flush
    }

    /// Whether written data may be in the host's page cache: all data, or the data of the tail.
    fn may_wait(&self) -> bool {
        self.page_cache || self.had_tail.load(Ordering::Relaxed) || self.limits_now().tail.is_some()
    }

    /// A request with this operation has ended.
    #[inline]
    fn ended(&self, op: Op) {
        // Loops share the cache line as long as nothing changes.
        if !op.only_reads() && !self.unflushed.load(Ordering::Relaxed) {
            self.unflushed.store(true, Ordering::Relaxed);
        }
    }

    /// A write up to that byte begins.
    #[inline]
    fn writes_to(&self, end: u64) {
        // Loops share the cache line as long as nothing changes.
        if end > self.highest_write.load(Ordering::Relaxed) {
            self.highest_write.fetch_max(end, Ordering::Relaxed);
        }
    }

    /// The image lock, if locking is on.
    pub(crate) fn lock(&self) -> Option<&Arc<ImageLock>> {
        self.lock.as_ref()
    }

    /// The present size in bytes.
    fn size(&self) -> u64 {
        // Relaxed: a request that does not see a change yet counts as one before the change.
        self.size.load(Ordering::Relaxed)
    }

    /// Whether a request past the end of the disk may reach that far, bytes.
    #[cold]
    fn may_reach(&self, end: u64) -> bool {
        match self.kind {
            Kind::File => self.grows.load(Ordering::Relaxed) && i64::try_from(end).is_ok(),
            Kind::HostDevice => {
                if end > self.reach.load(Ordering::Relaxed) {
                    self.reach.store(resize::device_size(self).unwrap_or(0), Ordering::Relaxed);
                }
                end <= self.reach.load(Ordering::Relaxed)
            }
        }
    }

    fn limits_now(&self) -> Limits {
        match self.grows.load(Ordering::Relaxed) {
            // The file may grow, so its last block is a whole one.
            true => self.limits,
            false => self.limits.with_size(self.size()),
        }
    }
}

impl BlockNode for FileNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        Geometry { size: self.size(), ..self.geometry }
    }

    fn end(&self) -> Option<u64> {
        let stat = nix::sys::stat::fstat(&self.fd).ok()?;
        let is_file = SFlag::from_bits_truncate(stat.st_mode).contains(SFlag::S_IFREG);
        u64::try_from(stat.st_size).ok().filter(|_| is_file)
    }

    fn watch(&self, watcher: Watcher) {
        self.watchers.add(watcher);
    }

    fn resize(self: Arc<Self>, size: u64, _event_loop: &EventLoop) -> Resized {
        Box::pin(async move { resize::resize(&self, size) })
    }

    fn enable_growth(&self) {
        self.grows.store(self.kind == Kind::File, Ordering::Relaxed);
    }

    fn growing_file(self: Arc<Self>) -> Option<Arc<dyn GrowingFile>> {
        Some(self)
    }

    fn host_storage(self: Arc<Self>) -> Option<Arc<dyn HostStorage>> {
        Some(self)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let engine = match self.aio {
            Some(Aio::Threads) => Engine::Threads,
            None if !event_loop.has_io_uring() => Engine::Threads,
            Some(Aio::IoUring) if !event_loop.has_io_uring() => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!(
                        "node '{}' has aio=io_uring, and io_uring is not available here: use \
                         aio=threads, or find out why with ringmill probe",
                        self.name
                    ),
                ));
            }
            None | Some(Aio::IoUring) => Engine::Uring,
            Some(Aio::Native) => {
                event_loop.set_up_linux_aio().map_err(|error| no_linux_aio(&self.name, &error))?;
                Engine::Native
            }
        };
        Ok(Rc::new(FileChannel::new(self, event_loop, engine)))
    }
}

impl GrowingFile for FileNode {
    fn length(&self) -> u64 {
        let found = match self.kind {
            Kind::File => self.end(),
            Kind::HostDevice => resize::device_size(self).ok(),
        };
        found.and_then(|size| size.checked_next_multiple_of(512)).unwrap_or(self.size())
    }

    fn highest_write(&self) -> u64 {
        self.highest_write.load(Ordering::Relaxed)
    }
}

impl HostStorage for FileNode {
    fn place(&self) -> Option<ImagePlace> {
        ImagePlace::of(&self.fd, &self.path)
    }

    fn allocated(&self) -> Option<u64> {
        let stat = nix::sys::stat::fstat(&self.fd).ok()?;
        u64::try_from(stat.st_blocks).ok().map(|blocks| blocks * 512)
    }

    fn foreign_format(&self) -> Option<Format> {
        const SECTOR: u64 = 512;
        let last = self.size().saturating_sub(SECTOR);
        let end = probe::read_block(&self.fd, last - last % probe::BLOCK).ok()?;
        let end = end.get((last % probe::BLOCK) as usize..).unwrap_or_default();
        Format::probe(&probe::read_block(&self.fd, 0).ok()?, end)
    }

    fn why_read_only(&self) -> Option<OpenError> {
        self.why_read_only.clone()
    }

    fn memory_alignment(&self) -> u32 {
        self.limits.align.memory as u32
    }
}

impl Drop for FileNode {
    /// Flushes what no user of the node has flushed, as QEMU does when an image is closed.
    fn drop(&mut self) {
        let is_wanted = *self.unflushed.get_mut() && !self.no_flush;
        if is_wanted
            && self.flushes_so_far().is_ok()
            && let Err(errno) = nix::unistd::fdatasync(&self.fd)
        {
            let (name, why) = (&self.name, errno.desc());
            log::error!("flushing node '{name}' as it is closed failed: {why}");
        }
    }
}

fn no_linux_aio(name: &str, error: &SetupError) -> io::Error {
    let advice = match error.error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EAGAIN) => "raise the sysctl fs.aio-max-nr, or use another aio",
        _ => "use aio=io_uring or aio=threads",
    };
    let SetupError { call, error } = error;
    let why = format!("node '{name}' has aio=native, and {call} failed: {error}: {advice}");
    io::Error::new(error.kind(), why)
}

/// Calls that the file system or device turned out to lack: tried once, then remembered.
#[derive(Debug, Default)]
pub(crate) struct Capabilities {
    no_punch: AtomicBool,
    no_zero_range: AtomicBool,
    no_blk_zero_out: AtomicBool,
    no_blk_discard: AtomicBool,
}

impl Capabilities {
    fn has(flag: &AtomicBool) -> bool {
        // Relaxed: a thread that does not see the flag yet tries the call once more.
        !flag.load(Ordering::Relaxed)
    }

    fn lost(flag: &AtomicBool) {
        flag.store(true, Ordering::Relaxed);
    }
}
