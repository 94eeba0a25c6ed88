//! Opening an image: the descriptor, the checks, the limits.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use nix::errno::Errno;
use nix::libc;
use nix::unistd::{Whence, lseek64};

use super::locks::{Claims, ImageLock};
use super::probe::{Alignment, queue_attribute};
use super::{Capabilities, FileNode, Kind, KnownData, Limits, calls};
use crate::drivers::range_lock::RangeLock;
use crate::error::{LockedBy, OpenError};
use crate::inherited::{Inherited, path_of};
use crate::node::{Geometry, Watchers};
use crate::options::{Aio, BlockdevOptions, Cache, Discard, FileOptions, Locking};
use crate::own_mounts::OwnMounts;

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;

pub(super) fn open(
    name: String,
    kind: Kind,
    common: &BlockdevOptions,
    options: &FileOptions,
    locked: Option<Arc<ImageLock>>,
    mounts: &OwnMounts,
    inherited: &mut Inherited,
) -> Result<FileNode, OpenError> {
    let path = &options.filename;
    let mut taken = |read_only| {
        let (file, lock) = inherited.take(path, common.cache.direct, read_only)?;
        Some((file, read_only, lock))
    };
    let found = taken(common.read_only);
    let found = found.or_else(|| if common.auto_read_only { taken(true) } else { None });
    let is_inherited = found.is_some();
    let (file, is_claimed, why_read_only, inherited_lock) = match found {
        // A claim is handed over together with the image.
        Some((file, read_only, lock)) => (file, true, why_inherited(path, read_only, common), lock),
        None => {
            let claims = kind == Kind::HostDevice && options.locking != Locking::Off;
            let OpenFile { file, is_claimed, why_read_only } =
                open_file(path, kind, common, claims, mounts)?;
            (file, is_claimed, why_read_only, None)
        }
    };
    let read_only = common.read_only || why_read_only.is_some();
    if options.aio == Some(Aio::Native) && !common.cache.direct {
        // Without O_DIRECT, Linux AIO waits for the disk at submission.
        return Err(OpenError::new(
            "aio=native was specified, but it requires cache.direct=on, which was not specified.",
        ));
    }
    let metadata = file
        .metadata()
        .map_err(|e| OpenError::os(format!("Could not stat '{}'", path.display()), errno_of(&e)))?;
    check_kind(path, kind, &metadata.file_type())?;
    let align = if common.cache.direct {
        let device = match kind {
            Kind::File => metadata.dev(),
            Kind::HostDevice => metadata.rdev(),
        };
        Alignment::probe(&file, device).ok_or_else(|| no_direct(path, Errno::EINVAL))?
    } else {
        Alignment::NONE
    };
    let bytes = match kind {
        Kind::File => metadata.size(),
        Kind::HostDevice => device_size(path, &file)?,
    };
    let sector = match kind {
        Kind::File => 1,
        Kind::HostDevice => rustix::fs::ioctl_blksszget(&file).map_or(SECTOR, u64::from),
    };
    let size = bytes
        .checked_next_multiple_of(SECTOR)
        .filter(|&size| i64::try_from(size).is_ok())
        .ok_or_else(|| OpenError::new(format!("'{}' is too large", path.display())))?;
    let has_tail = size % align.request as u64 > 0;
    let may_have_tail = align.request as u64 > SECTOR && !read_only;
    // Without O_DIRECT, the only way to write a partial block without making the file longer.
    let tail_fd = match has_tail || may_have_tail {
        false => None,
        true => Some(Arc::new(OwnedFd::from(
            with_flags(!read_only, 0)
                .open(if is_inherited { path_of(&file) } else { path.clone() })
                .map_err(|e| could_not_open(path, errno_of(&e), !read_only))?,
        ))),
    };
    let geometry = Geometry {
        size,
        read_only,
        physical_block_size: physical_block(kind, &file, &metadata).max(align.request as u32),
        request_alignment: align.request as u32,
        discard: common.discard == Discard::Unmap && !read_only,
        discard_granularity: discard_granularity(kind, &metadata),
        write_zeroes: !read_only,
        write_cache: !read_only,
    };
    let fd = Arc::new(OwnedFd::from(file));
    let claims = match (read_only, &locked) {
        // The registry locks the image for the node's first user.
        (true, None) => Claims::none(),
        (true, Some(_)) | (false, _) => {
            Claims::of_disk(read_only).sharing(common.force_share && read_only)
        }
    };
    let lock = match locked {
        Some(lock) => {
            lock.check_is_of(&fd, path)?;
            if !is_claimed && !lock.claims().writes() {
                return Err(claimed_by_others(path, metadata.rdev()));
            }
            lock.change(claims)?;
            Some(lock)
        }
        None => {
            let owned = is_inherited.then(|| inherited.owned().clone());
            let held_by = inherited_lock.map_or_else(|| fd.clone(), Arc::new);
            let lock = ImageLock::take(&held_by, path, options.locking, claims, owned)?;
            if !is_claimed {
                // Checked after the lock, because the lock's error can name a program.
                return Err(claimed_by_others(path, metadata.rdev()));
            }
            lock.map(|lock| Arc::new(lock.sharing(common.force_share)))
        }
    };
    let keeps_claim = kind == Kind::HostDevice && is_claimed && !read_only;
    if let Some(lock) = lock.as_ref().filter(|_| keeps_claim) {
        lock.keep_claim(&fd);
    }
    Ok(FileNode {
        // A node's name has no zero bytes.
        trace_name: CString::new(&*name).unwrap_or_default(),
        name,
        path: path.clone(),
        fd,
        tail_fd,
        geometry,
        why_read_only,
        size: AtomicU64::new(size),
        highest_write: AtomicU64::new(0),
        reach: AtomicU64::new(0),
        limits: Limits::new(align, sector),
        range_lock: RangeLock::new(align.request),
        kind,
        aio: options.aio,
        no_flush: common.cache.no_flush,
        discard: common.discard,
        detect_zeroes: common.detect_zeroes,
        page_cache: !common.cache.direct,
        had_tail: AtomicBool::new(false),
        capabilities: Capabilities::default(),
        known_data: KnownData::default(),
        flush_failed: Arc::default(),
        syncs: Arc::default(),
        // The process that hands the image over leaves flushes to this one.
        unflushed: AtomicBool::new(is_inherited && !read_only),
        grows: AtomicBool::new(false),
        watchers: Watchers::default(),
        lock,
    })
}

fn with_flags(write: bool, flags: i32) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(write).custom_flags(flags);
    options
}

/// The result of [`open_file`].
struct OpenFile {
    file: File,
    /// The device has no mount and no other claim, or no claim was asked for.
    is_claimed: bool,
    /// With `auto-read-only`: why the file could not be opened for writing.
    why_read_only: Option<OpenError>,
}

/// Opens the file as the options ask. With `auto-read-only`, falls back to read-only. `claims`: asks for
/// exclusive use of a device that is opened for writing, which excludes mounts. A device that is in
/// exclusive use is opened all the same, with `is_claimed` unset.
fn open_file(
    path: &Path,
    kind: Kind,
    common: &BlockdevOptions,
    claims: bool,
    mounts: &OwnMounts,
) -> Result<OpenFile, OpenError> {
    let Cache { direct, .. } = common.cache;
    // Before any call that needs an answer of the file system.
    mounts.check(path)?;
    // Opening has side effects for some file types (a tape rewinds, a FIFO waits), so the type is
    // checked first. O_NONBLOCK does not help: the ring would answer EAGAIN instead of waiting.
    let metadata = std::fs::metadata(path)
        .map_err(|e| could_not_open(path, errno_of(&e), !common.read_only))?;
    check_kind(path, kind, &metadata.file_type())?;
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let open = |write, more| with_flags(write, flags | more).open(path).map_err(|e| errno_of(&e));
    let (write, mut is_claimed) = (!common.read_only, true);
    let mut first = open(write, if claims && write { libc::O_EXCL } else { 0 });
    if let (Err(Errno::EBUSY), true) = (&first, claims) {
        (first, is_claimed) = (open(write, 0), false);
    }
    let read_only = |why: OpenError| {
        let file = open(false, 0).map_err(|errno| could_not_open(path, errno, false))?;
        log::info!("{}: cannot be written, opened read-only", path.display());
        Ok(OpenFile { file, is_claimed: true, why_read_only: Some(why) })
    };
    match first {
        // The kernel opens such a device for writing, and fails each write.
        Ok(file) if write && kind == Kind::HostDevice && calls::is_read_only(&file) => {
            let why = OpenError::os("The device is not writable", Errno::EACCES);
            match common.auto_read_only {
                true => read_only(why),
                false => Err(why.with_hint(LESS)),
            }
        }
        Ok(file) => Ok(OpenFile { file, is_claimed, why_read_only: None }),
        Err(Errno::EINVAL) if direct => Err(no_direct(path, Errno::EINVAL)),
        Err(errno @ (Errno::EACCES | Errno::EPERM | Errno::EROFS))
            if common.auto_read_only && write =>
        {
            read_only(could_not_open(path, errno, false))
        }
        Err(errno) => Err(could_not_open(path, errno, write)),
    }
}

/// What helps when a file cannot be written.
const LESS: &str = "It is opened for writing: read-only=on or auto-read-only=on asks for less";

/// Returns why a handed-over image is read-only although its node is not.
fn why_inherited(path: &Path, read_only: bool, common: &BlockdevOptions) -> Option<OpenError> {
    let why = || OpenError::new(format!("'{}' was opened read-only", path.display()));
    (read_only && !common.read_only).then(why)
}

fn check_kind(path: &Path, kind: Kind, found: &std::fs::FileType) -> Result<(), OpenError> {
    let path = path.display();
    match kind {
        Kind::File if found.is_dir() => {
            Err(OpenError::os(format!("Could not open '{path}'"), Errno::EISDIR))
        }
        Kind::File if !found.is_file() => {
            let error =
                OpenError::new(format!("'file' driver requires '{path}' to be a regular file"));
            Err(if found.is_block_device() {
                error.with_hint("driver=host_device opens block devices")
            } else {
                error
            })
        }
        Kind::HostDevice if !found.is_block_device() => {
            let error = OpenError::new(format!(
                "'host_device' driver requires '{path}' to be a block device"
            ));
            Err(if found.is_file() {
                error.with_hint("driver=file opens regular files")
            } else {
                error
            })
        }
        _ => Ok(()),
    }
}

fn device_size(path: &Path, file: &File) -> Result<u64, OpenError> {
    let end = lseek64(file, 0, Whence::SeekEnd).map_err(|errno| {
        OpenError::os(format!("Could not find the size of '{}'", path.display()), errno)
    })?;
    Ok(end.unsigned_abs())
}

fn physical_block(kind: Kind, file: &File, metadata: &std::fs::Metadata) -> u32 {
    let size = match kind {
        Kind::File => u32::try_from(metadata.blksize()).ok(),
        Kind::HostDevice => rustix::fs::ioctl_blkpbszget(file).ok(),
    };
    size.filter(|size| size.is_power_of_two() && (512..=1 << 16).contains(size)).unwrap_or(512)
}

fn discard_granularity(kind: Kind, metadata: &std::fs::Metadata) -> u32 {
    let size = match kind {
        Kind::File => Some(metadata.blksize()),
        Kind::HostDevice => queue_attribute(metadata.rdev(), "discard_granularity"),
    };
    size.and_then(|size| u32::try_from(size).ok()).filter(|&size| size > 0).unwrap_or(512)
}

fn no_direct(path: &Path, errno: Errno) -> OpenError {
    OpenError::os(format!("Could not open '{}' with O_DIRECT", path.display()), errno)
        .with_hint("Its file system has no direct I/O: use cache.direct=off")
}

fn could_not_open(path: &Path, errno: Errno, write: bool) -> OpenError {
    let error = OpenError::os(format!("Could not open '{}'", path.display()), errno);
    match errno {
        // Programs that speak QMP see the hint, too: their working directory is another one.
        Errno::ENOENT | Errno::EACCES if is_below_root(path) => error
            .with_hint("The daemon's working directory is '/': give an absolute path")
            .with_hint_everywhere(),
        Errno::EACCES | Errno::EPERM | Errno::EROFS if write => error.with_hint(LESS),
        _ => error,
    }
}

/// Whether the path is relative, and the working directory is `/`, as of services.
fn is_below_root(path: &Path) -> bool {
    path.is_relative() && std::env::current_dir().is_ok_and(|folder| folder == Path::new("/"))
}

/// The error for a block device in exclusive use that has no image lock, such as a mounted one.
fn claimed_by_others(path: &Path, device: u64) -> OpenError {
    let error = could_not_open(path, Errno::EBUSY, false);
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    let number = format!("{major}:{minor}");
    // Fields by proc_pid_mountinfo(5): identifier, parent, device, root, mount point.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut mounts = mounts.lines().map(|line| line.split(' ').skip(2));
    let mount = mounts.find_map(|mut fields| {
        (fields.next() == Some(&number)).then(|| fields.nth(1).unwrap_or_default().to_owned())
    });
    let holders = std::fs::read_dir(format!("/sys/dev/block/{number}/holders"));
    let mut holders = holders.into_iter().flatten().flatten();
    let why = "read-only=on opens it for reading";
    match (mount, holders.next()) {
        (Some(mount), _) => error.with_hint(format!("It is mounted at {mount}. {why}")),
        (None, Some(holder)) => {
            error.with_hint(format!("{} lies on it. {why}", holder.file_name().display()))
        }
        // The use may be short: the last requests of a killed process, or a device that was just closed.
        (None, None) => error
            .with_hint(format!(
                "Something has claimed it: a mount, a volume, swap or another program. {why}"
            ))
            .locked_by(LockedBy::Nobody),
    }
}

fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
