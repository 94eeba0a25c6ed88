//! Properties of an opened file or device: size, alignment, discard.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::uio::pread;
use rustix::fs::{AtFlags, StatxFlags};

/// Largest alignment that is probed, in bytes; also the default if probing gives no result.
const SAFE_ALIGN: usize = 4096;

/// Bytes that [`read_block`] reads.
pub(super) const BLOCK: u64 = SAFE_ALIGN as u64;

/// Alignment that `O_DIRECT` requires of memory and range, in bytes. Both are powers of two, and 1
/// without `O_DIRECT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Addresses of segments.
    pub(crate) memory: usize,
    /// Offset and lengths.
    pub(crate) request: usize,
}

impl Alignment {
    /// No requirement.
    pub(crate) const NONE: Alignment = Alignment { memory: 1, request: 1 };

    /// The alignment of a device, or of a file on that device. `None`: direct I/O is not supported.
    pub(crate) fn probe(fd: impl AsFd, device: u64) -> Option<Alignment> {
        let mut align = Self::ask(fd.as_fd())?;
        // zram moves whole pages, so a segment that does not begin at a page boundary has the bytes around
        // it overwritten (Linux 6.18, although it reports 512).
        if device_name(device).is_some_and(|name| name.starts_with("zram")) {
            align.memory = align.memory.max(SAFE_ALIGN);
        }
        Some(align)
    }

    /// The alignment by statx(2) (`STATX_DIOALIGN`, since Linux 6.1), otherwise by trial reads.
    fn ask(fd: BorrowedFd<'_>) -> Option<Alignment> {
        if let Ok(stat) = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
            && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
        {
            let (memory, request) =
                (stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize);
            if memory == 0 || request == 0 {
                return None;
            }
            return (memory.is_power_of_two() && request.is_power_of_two())
                .then_some(Alignment { memory, request });
        }
        let safe = Alignment { memory: SAFE_ALIGN, request: SAFE_ALIGN };
        // If one byte at an odd address can be read, the kernel does not check reads here (a hole, an
        // empty file), and they tell nothing about writes.
        if trial_read(fd, 1, 1) {
            return Some(safe);
        }
        let sizes = || [512, 1024, 2048, SAFE_ALIGN].into_iter();
        let request = sizes().find(|&size| trial_read(fd, size, SAFE_ALIGN))?;
        let memory = sizes().find(|&align| trial_read(fd, SAFE_ALIGN, align)).unwrap_or(SAFE_ALIGN);
        Some(Alignment { memory, request })
    }
}

/// Whether the first `len` bytes can be read into memory aligned to exactly `align`.
fn trial_read(fd: impl AsFd, len: usize, align: usize) -> bool {
    let mut memory = vec![0; 2 * SAFE_ALIGN + len];
    let start = memory.as_ptr().align_offset(SAFE_ALIGN) + align % SAFE_ALIGN;
    let Some(buf) = memory.get_mut(start..start + len) else { return false };
    loop {
        match pread(fd.as_fd(), buf, 0) {
            Err(Errno::EINTR) => {}
            done => return done.is_ok(),
        }
    }
}

/// Reads the block of 4096 bytes at `offset`, a multiple of 4096. Returns fewer bytes at the end of
/// the file.
pub(super) fn read_block(fd: impl AsFd, offset: u64) -> Result<Vec<u8>, Errno> {
    let mut memory = vec![0; 2 * SAFE_ALIGN];
    let start = memory.as_ptr().align_offset(SAFE_ALIGN);
    let block = memory.get_mut(start..start + SAFE_ALIGN).ok_or(Errno::ENOMEM)?;
    loop {
        match pread(fd.as_fd(), block, offset.cast_signed()) {
            Err(Errno::EINTR) => {}
            read => return Ok(block[..read?].to_vec()),
        }
    }
}

/// A block device's name in the kernel, such as `sda1`.
fn device_name(device: u64) -> Option<String> {
    let target = fs::read_link(sysfs(device)).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

fn sysfs(device: u64) -> String {
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    format!("/sys/dev/block/{major}:{minor}")
}

/// An attribute of a block device's queue in sysfs, by device number.
pub(crate) fn queue_attribute(device: u64, name: &str) -> Option<u64> {
    let device = sysfs(device);
    // A partition has its disk's queue.
    [format!("{device}/queue/{name}"), format!("{device}/../queue/{name}")]
        .iter()
        .find_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

    #[test]
    fn direct_io_alignment_is_enough_for_the_kernel() {
        let path = std::env::temp_dir().join(format!("ringmill-probe-{}", std::process::id()));
        let mut file = fs::File::create(&path).unwrap();
        file.write_all(&[1; 65536]).unwrap();
        file.sync_all().unwrap();
        let direct = OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_DIRECT)
            .open(&path)
            .expect("the temporary directory's file system has O_DIRECT");
        let align =
            Alignment::probe(&direct, direct.metadata().unwrap().dev()).expect("an alignment");
        assert!(trial_read(&direct, align.request, align.memory), "{align:?}");
        fs::remove_file(&path).unwrap();
    }
}
