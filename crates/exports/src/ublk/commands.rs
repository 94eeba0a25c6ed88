//! The commands of ublk, with the promises that rings need.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use event_loop::{DeviceCommand, command_and_wait};

use super::wire::{COMMIT_AND_FETCH, Command, FETCH, MAX_IO};

/// Waits for the first request of a tag.
// SAFETY: the driver copies the data of the tag's requests from or to the address. A request has at most `max_io_buf_bytes`.
// An export makes no device with more than MAX_IO, and takes over none. The driver copies while it
// delivers a request, before the command completes, and while it takes the next command with an answer. Other drivers
// have no command of this number ('u', 0x20).
pub(super) const FETCH_FIRST: DeviceCommand = unsafe { DeviceCommand::new(FETCH, MAX_IO) };

/// Answers a request, and waits for the tag's next.
// SAFETY: as above.
pub(super) const ANSWER_AND_FETCH: DeviceCommand =
    unsafe { DeviceCommand::new(COMMIT_AND_FETCH, MAX_IO) };

/// Sends a command to `/dev/ublk-control`, and waits for its end. `memory` is the command's structure.
pub(super) fn control(
    file: BorrowedFd<'_>,
    command: Command,
    id: u32,
    data: u64,
    memory: &mut [u8],
) -> io::Result<u32> {
    let len = u16::try_from(memory.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let address = if len == 0 { 0 } else { memory.as_mut_ptr().expose_provenance() as u64 };
    // struct ublksrv_ctrl_cmd: device, queue (none), length, address, data, and what unprivileged devices need.
    let mut bytes = [0; 80];
    let fields: [&[u8]; 5] = [
        &id.to_ne_bytes(),
        &u16::MAX.to_ne_bytes(),
        &len.to_ne_bytes(),
        &address.to_ne_bytes(),
        &data.to_ne_bytes(),
    ];
    bytes.iter_mut().zip(fields.into_iter().flatten()).for_each(|(to, from)| *to = *from);
    // SAFETY: the address is that of `memory`, of `len` bytes, which is borrowed for the call. The driver accesses no
    // more.
    unsafe { command_and_wait(file, command.code(), bytes) }
}

mod ioctl {
    // BLKRRPART, linux/fs.h.
    nix::ioctl_none!(read_partitions, 0x12, 95);
}

/// Has the kernel read the partition table of a disk. Afterwards the partitions are block devices.
pub(super) fn read_partitions(disk: &File) -> io::Result<()> {
    // SAFETY: the call has no argument.
    unsafe { ioctl::read_partitions(disk.as_raw_fd()) }?;
    Ok(())
}
