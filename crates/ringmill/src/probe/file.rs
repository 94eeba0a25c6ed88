//! The properties of a file or device as an image.

use std::fmt;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use block::NodeRegistry;
use block::node::Geometry;
use block::options::{BlockdevOptions, Cache, Driver, FileOptions, Locking};
use rustix::fs::{AtFlags, StatxFlags};

use super::limits::bytes;
use super::row;

/// The result of the probe.
pub(super) struct FileReport {
    pub(super) path: PathBuf,
    driver: &'static str,
    /// The alignment for direct I/O by statx(2), of memory and of offsets and lengths, in bytes. Both are 0 if
    /// direct I/O is impossible. `None` before Linux 6.1 and on some file systems.
    statx: Option<(u32, u32)>,
    /// The geometry of the node with cache.direct=on, or the error.
    direct: Result<Geometry, String>,
    /// The geometry of the node with cache.direct=off.
    buffered: Geometry,
}

impl FileReport {
    /// Opens the image as the daemon does, but read-only and without a lock.
    pub(super) fn take(path: &Path) -> Result<Self, String> {
        let could_not = |error: std::io::Error| format!("{}: {error}", path.display());
        let device = std::fs::metadata(path).map_err(could_not)?.file_type().is_block_device();
        let buffered = open(path, device, false)?;
        let file = std::fs::File::open(path).map_err(could_not)?;
        Ok(Self {
            path: path.to_owned(),
            driver: if device { "host_device" } else { "file" },
            statx: statx(file.as_fd()),
            direct: open(path, device, true),
            buffered,
        })
    }

    /// Describes ringmill's choice, and the reason.
    pub(super) fn choice(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row(f, "driver", self.driver)?;
        let cache = match &self.direct {
            Ok(_) => "none (direct I/O): the default of serve; cache.direct=on of storage-daemon",
            Err(_) => "none does not work here: give serve --cache writeback",
        };
        row(f, "cache", cache)
    }
}

fn open(path: &Path, device: bool, direct: bool) -> Result<Geometry, String> {
    let file = FileOptions { filename: path.to_owned(), aio: None, locking: Locking::Off };
    let options = BlockdevOptions {
        read_only: true,
        cache: Cache { direct, no_flush: false },
        ..BlockdevOptions::new(
            Some("probe"),
            if device { Driver::host_device(file) } else { Driver::file(file) },
        )
    };
    let node = NodeRegistry::new().open(&options).map_err(|error| error.to_string())?;
    Ok(node.geometry())
}

fn statx(file: std::os::fd::BorrowedFd<'_>) -> Option<(u32, u32)> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let told = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    told.then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
}

impl fmt::Display for FileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row(f, "size", &format!("{} ({} bytes)", bytes(self.buffered.size), self.buffered.size))?;
        let statx = match self.statx {
            Some((0, _) | (_, 0)) => "no direct I/O".to_owned(),
            Some((memory, offset)) => {
                format!("memory {memory} bytes, offsets and lengths {offset} bytes")
            }
            None => "not told by this kernel or file system: found by trial".to_owned(),
        };
        row(f, "alignment by statx", &statx)?;
        match &self.direct {
            Ok(geometry) => {
                let align = geometry.request_alignment;
                let direct = format!("works, in multiples of {align} bytes");
                row(f, "O_DIRECT", &direct)?;
            }
            Err(why) => row(f, "O_DIRECT", &format!("refused: {why}"))?,
        }
        let geometry = self.direct.as_ref().unwrap_or(&self.buffered);
        row(f, "physical block", &format!("{} bytes", geometry.physical_block_size))?;
        row(f, "discard granularity", &format!("{} bytes", geometry.discard_granularity))
    }
}
