//! `block_resize` of a file or device.

use std::sync::atomic::Ordering;

use nix::errno::Errno;
use nix::unistd::{Whence, ftruncate, lseek64};

use super::{FileNode, Kind};
use crate::node::ResizeError;

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;

pub(super) fn resize(node: &FileNode, size: u64) -> Result<(), ResizeError> {
    ResizeError::check(size, node.geometry.read_only)?;
    let after = match node.kind {
        Kind::File => {
            truncate(node, size)
                .map_err(|errno| ResizeError::Os { what: "Could not resize file", errno })?;
            size.next_multiple_of(SECTOR)
        }
        Kind::HostDevice => {
            // It is as large as it is, and may have been made larger since it was opened.
            let failed =
                |errno| ResizeError::Os { what: "Could not find the device's size", errno };
            let real = device_size(node).map_err(failed)?;
            // The device may have been made smaller, too.
            node.reach.store(0, Ordering::Relaxed);
            if size > real {
                return Err(ResizeError::Device);
            }
            real - real % SECTOR
        }
    };
    node.known_data.makes_holes();
    if node.limits_now().tail.is_some() {
        node.had_tail.store(true, Ordering::Relaxed);
    }
    if node.size.swap(after, Ordering::Relaxed) != after {
        node.watchers.tell();
    }
    Ok(())
}

fn truncate(node: &FileNode, size: u64) -> Result<(), Errno> {
    let size = i64::try_from(size).map_err(|_| Errno::EFBIG)?;
    loop {
        match ftruncate(&node.fd, size) {
            Err(Errno::EINTR) => {}
            done => return done,
        }
    }
}

/// The size that the kernel has for the device, bytes.
pub(super) fn device_size(node: &FileNode) -> Result<u64, Errno> {
    lseek64(&node.fd, 0, Whence::SeekEnd).map(i64::unsigned_abs)
}
