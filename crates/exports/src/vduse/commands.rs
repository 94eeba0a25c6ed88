//! Commands to VDUSE, by ioctl(2).

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;

use super::wire::{self, CONTROL, Description, Entry, ioctls};

/// Carries out a command with its structure, and returns the result.
fn command(file: BorrowedFd<'_>, number: u64, structure: &mut [u8]) -> nix::Result<i32> {
    // The structures with a tail have the length of the tail in their last word.
    let fixed = ioctls::size(number);
    let tail = match number {
        ioctls::CREATE_DEV | ioctls::SET_CONFIG => structure
            .get(..fixed)
            .and_then(<[u8]>::last_chunk)
            .map_or(usize::MAX, |len| u32::from_ne_bytes(*len) as usize),
        _ => 0,
    };
    if fixed.checked_add(tail).is_none_or(|needed| structure.len() < needed) {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the kernel reads and writes the structure of the command, whose size is a part of the number, and reads
    // a tail of the length that the structure has. Both are in `structure`, which is borrowed for the call.
    Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), number as _, structure.as_mut_ptr()) })
}

/// The file of the commands that make and remove devices.
pub(super) struct Control(File);

impl Control {
    /// Opens it.
    ///
    /// # Errors
    ///
    /// As of open(2), or the kernel has another interface.
    pub(super) fn open() -> nix::Result<Control> {
        let file = File::options().read(true).write(true).open(CONTROL).map_err(errno_of)?;
        command(file.as_fd(), ioctls::SET_API_VERSION, &mut 0u64.to_ne_bytes())?;
        Ok(Control(file))
    }

    /// Makes a device.
    pub(super) fn create(&self, description: &Description<'_>) -> nix::Result<()> {
        command(self.0.as_fd(), ioctls::CREATE_DEV, &mut description.encode()).map(drop)
    }

    /// Removes a device, with `EBUSY` if it is on the vDPA bus or has an open file.
    pub(super) fn destroy(&self, name: &str) -> nix::Result<()> {
        command(self.0.as_fd(), ioctls::DESTROY_DEV, &mut wire::name_field(name)).map(drop)
    }
}

/// Returns the features that the driver has accepted.
pub(super) fn features(device: &OwnedFd) -> nix::Result<u64> {
    let mut features = [0; 8];
    command(device.as_fd(), ioctls::GET_FEATURES, &mut features)?;
    Ok(u64::from_ne_bytes(features))
}

/// Sets the configuration space that drivers read.
pub(super) fn set_config(device: &OwnedFd, config: &[u8]) -> nix::Result<()> {
    command(device.as_fd(), ioctls::SET_CONFIG, &mut wire::config_data(config)).map(drop)
}

/// Notifies the driver of a change of the configuration space. `EINVAL`: there is no driver.
pub(super) fn signal_config(device: &OwnedFd) -> nix::Result<()> {
    command(device.as_fd(), ioctls::INJECT_CONFIG_IRQ, &mut []).map(drop)
}

/// Sets the most entries of a queue.
pub(super) fn set_up_queue(device: &OwnedFd, index: u16, max_size: u16) -> nix::Result<()> {
    command(device.as_fd(), ioctls::VQ_SETUP, &mut wire::queue_config(index, max_size)).map(drop)
}

/// Returns what the kernel knows of a queue.
pub(super) fn queue_info(device: &OwnedFd, index: u16) -> nix::Result<Vec<u8>> {
    let mut info = wire::queue_question(index);
    command(device.as_fd(), ioctls::VQ_GET_INFO, &mut info)?;
    Ok(info)
}

/// Has the kernel signal kicks of a queue to an eventfd, or keep them.
pub(super) fn set_kick(device: &OwnedFd, index: u16, kick: Option<&OwnedFd>) -> nix::Result<()> {
    let kick = kick.map_or(-1, AsRawFd::as_raw_fd);
    command(device.as_fd(), ioctls::VQ_SETUP_KICKFD, &mut wire::queue_eventfd(index, kick))
        .map(drop)
}

/// Notifies the driver of used buffers. `EINVAL`: there is no driver.
pub(super) fn signal_queue(device: &OwnedFd, index: u16) -> nix::Result<()> {
    let mut index = u32::from(index).to_ne_bytes();
    command(device.as_fd(), ioctls::VQ_INJECT_IRQ, &mut index).map(drop)
}

/// Returns the first memory from `start` to `last`, and its file. `None`: there is none.
pub(super) fn memory(
    device: &OwnedFd,
    start: u64,
    last: u64,
) -> nix::Result<Option<(Option<Entry>, OwnedFd)>> {
    let mut entry = Entry::question(start, last);
    match command(device.as_fd(), ioctls::IOTLB_GET_FD, &mut entry) {
        // SAFETY: the kernel has made a new descriptor for this call.
        Ok(fd) => Ok(Some((Entry::parse(&entry), unsafe { OwnedFd::from_raw_fd(fd) }))),
        Err(Errno::EINVAL) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The errno of a failed call.
pub(super) fn errno_of(error: std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
