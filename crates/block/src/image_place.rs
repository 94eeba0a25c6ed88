//! Where an image is: what tells its file or block device from others of this host.

use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, StatxFlags, fstat, statx};

/// What tells a file or block device from others, and its path.
///
/// A new file may have the inode of a removed one, so the time of creation counts as well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePlace {
    /// It is a block device.
    pub is_device: bool,
    /// The device that has the file, or the block device itself.
    pub device: u64,
    /// The inode of the file. 0: it is a device.
    pub inode: u64,
    /// When the file was created, in nanoseconds since 1970. 0: the file system does not tell.
    pub born: u64,
    /// The path, absolute if possible.
    pub path: PathBuf,
}

impl ImagePlace {
    /// Returns the place of an open file, which was opened by `path`. `None`: it is neither a file nor a block device.
    pub(crate) fn of(fd: impl AsFd, path: &Path) -> Option<ImagePlace> {
        let fd = fd.as_fd();
        let found = fstat(fd).ok()?;
        let is_device = match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            _ => return None,
        };
        let born = statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok();
        let born =
            born.filter(|found| !is_device && found.stx_mask & StatxFlags::BTIME.bits() != 0);
        let born = born.and_then(|found| {
            let seconds = u64::try_from(found.stx_btime.tv_sec).ok()?;
            seconds.checked_mul(1_000_000_000)?.checked_add(found.stx_btime.tv_nsec.into())
        });
        // The link also leads to a descriptor's file that has no path of its own, such as /dev/fdset/1.
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let path =
            link.ok().filter(|link| link.is_absolute()).or_else(|| std::path::absolute(path).ok());
        Some(ImagePlace {
            is_device,
            device: if is_device { found.st_rdev } else { found.st_dev },
            inode: if is_device { 0 } else { found.st_ino },
            born: born.unwrap_or(0),
            path: path.unwrap_or_default(),
        })
    }

    /// Whether the two are the same file or block device.
    pub(crate) fn is_same(&self, other: &ImagePlace) -> bool {
        // Without a time of creation, and for a device, which may be another one's by now, the name has to be the same.
        let is_told = self.born != 0 && other.born != 0;
        self.is_same_but_for_name(other) && (is_told || self.path == other.path)
    }

    /// Whether the two may be the same file or block device, under any names.
    pub(crate) fn is_same_but_for_name(&self, other: &ImagePlace) -> bool {
        let what = |place: &ImagePlace| (place.is_device, place.device, place.inode, place.born);
        what(self) == what(other)
    }

    /// A file with that inode, which does not exist.
    #[cfg(test)]
    pub(crate) fn file(inode: u64) -> ImagePlace {
        let path = format!("/image-{inode}").into();
        ImagePlace { is_device: false, device: 1, inode, born: 1, path }
    }
}
