//! Commands to device drivers: the loop's description of them, and long commands for the control plane, which use a ring
//! of their thread.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, cqueue, opcode, squeue, types};

/// A command to a device driver of the layer above, for [`IoOp::Command`](crate::IoOp::Command).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCommand {
    pub(crate) code: u32,
    pub(crate) reach: usize,
}

impl DeviceCommand {
    /// Describes the command with the driver's number `code`.
    ///
    /// # Safety
    ///
    /// A driver that gets the command accesses at most `reach` bytes from the address on that it contains, and only
    /// until the command's completion. A driver that does not know the command accesses none.
    pub const unsafe fn new(code: u32, reach: usize) -> Self {
        DeviceCommand { code, reach }
    }
}

thread_local! {
    /// The thread's ring, with the process that made it: a forked child makes its own.
    ///
    /// It stays after a command. When a thread closes its last ring, Linux 6.19 and later ends the thread's workers. A
    /// command that comes while one ends may get no worker, and then never completes (seen with 7.2).
    static RING: Cell<Option<(u32, IoUring<squeue::Entry128, cqueue::Entry>)>> = const { Cell::new(None) };
}

/// Sends a command of 80 bytes to a file's driver (`IORING_OP_URING_CMD`), and waits for its end.
///
/// For threads that may block. Returns the driver's result.
///
/// # Errors
///
/// The driver's errno. `EOPNOTSUPP`: the file's driver takes no commands. Those of io_uring_setup(2), for the ring of
/// the command.
///
/// # Safety
///
/// The command may contain addresses. Their memory is valid for the driver's accesses until the call returns.
pub unsafe fn command_and_wait(
    file: BorrowedFd<'_>,
    code: u32,
    command: [u8; 80],
) -> io::Result<u32> {
    let mut ring = match RING.take() {
        Some((process, ring)) if process == std::process::id() => ring,
        _ => IoUring::builder().build(1)?,
    };
    let entry = opcode::UringCmd80::new(types::Fd(file.as_raw_fd()), code).cmd(command).build();
    // SAFETY: the caller's promise; the call returns after the command's completion.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
    let result = loop {
        if let Some(done) = ring.completion().next() {
            break done.result();
        }
        match ring.submit_and_wait(1) {
            Err(error) if !ring.submission().is_empty() => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                _ => return Err(error),
            },
            // Submitted: the driver may use the memory until the completion.
            Ok(_) | Err(_) => {}
        }
    };
    RING.set(Some((std::process::id(), ring)));
    u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(result.wrapping_neg()))
}
