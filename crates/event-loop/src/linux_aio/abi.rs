//! Structures shared with the kernel: `linux/aio_abi.h`, and the head of the completion ring. The latter is
//! `struct aio_ring` of the kernel's `fs/aio.c`, unchanged since Linux 2.6.

use std::os::fd::RawFd;
use std::sync::atomic::AtomicU32;

use crate::op::IoOp;
use crate::slots::InFlight;

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_FSYNC: u16 = 2;
const IOCB_CMD_FDSYNC: u16 = 3;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;
/// `resfd` is an eventfd that the completion signals.
const IOCB_FLAG_RESFD: u32 = 1;

/// `struct iocb`: an operation, copied by the kernel as it is submitted.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Iocb {
    /// Returned with the completion.
    pub(super) data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    fd: RawFd,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: RawFd,
}

/// `struct io_event`: a completion.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct IoEvent {
    pub(super) data: u64,
    _iocb: u64,
    /// A count, or a negated errno.
    pub(super) result: i64,
    _result2: i64,
}

/// The head of the completion ring; `nr` [`IoEvent`]s follow it.
#[repr(C)]
pub(super) struct RingHead {
    _id: u32,
    /// Number of events in the ring.
    pub(super) nr: u32,
    /// Index of the next event to take; written by this process.
    pub(super) head: AtomicU32,
    /// Index after the last event; written by the kernel.
    pub(super) tail: AtomicU32,
    pub(super) magic: u32,
    _compat_features: u32,
    pub(super) incompat_features: u32,
    pub(super) header_length: u32,
}

pub(super) const RING_MAGIC: u32 = 0xa10a_10a1;

/// Whether an `IOCB_CMD_*` exists for `op`.
pub(super) fn takes(op: &IoOp) -> bool {
    match op {
        IoOp::Read { .. } | IoOp::Write { .. } | IoOp::Fsync { .. } => true,
        IoOp::Fallocate { .. } | IoOp::Call { .. } | IoOp::Command { .. } | IoOp::Poll { .. } => {
            false
        }
    }
}

impl Iocb {
    /// A read of no bytes from `file`, which signals the eventfd `notify` when done.
    pub(super) fn nothing(file: RawFd, notify: RawFd) -> Iocb {
        Iocb {
            data: 0,
            key: 0,
            rw_flags: 0,
            opcode: IOCB_CMD_PREAD,
            priority: 0,
            fd: file,
            buf: 0,
            nbytes: 0,
            offset: 0,
            reserved: 0,
            flags: IOCB_FLAG_RESFD,
            resfd: notify,
        }
    }

    /// The operation, whose completion signals the eventfd `notify`. `None` if Linux AIO has no command for
    /// it. Its pointers are valid while `in_flight` is in its slot.
    pub(super) fn new(in_flight: &InFlight, user_data: u64, notify: RawFd) -> Option<Iocb> {
        let segments = in_flight.bufs.iovecs();
        let (single, vectored, offset, dsync) = match in_flight.op {
            IoOp::Read { offset } => (IOCB_CMD_PREAD, IOCB_CMD_PREADV, offset, false),
            IoOp::Write { offset, dsync } => (IOCB_CMD_PWRITE, IOCB_CMD_PWRITEV, offset, dsync),
            IoOp::Fsync { data_only: true } => (IOCB_CMD_FDSYNC, IOCB_CMD_FDSYNC, 0, false),
            IoOp::Fsync { data_only: false } => (IOCB_CMD_FSYNC, IOCB_CMD_FSYNC, 0, false),
            _ => return None,
        };
        let (opcode, buf, nbytes) = match segments {
            // fsync requires 0 in these fields.
            [] => (single, 0, 0),
            [segment] => (single, segment.iov_base as u64, segment.iov_len as u64),
            segments => (vectored, segments.as_ptr() as u64, segments.len() as u64),
        };
        Some(Iocb {
            data: user_data,
            key: 0,
            rw_flags: if dsync { libc::RWF_DSYNC } else { 0 },
            opcode,
            priority: 0,
            fd: in_flight.file.raw_fd(),
            buf,
            nbytes,
            offset: offset.cast_signed(),
            reserved: 0,
            flags: IOCB_FLAG_RESFD,
            resfd: notify,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Offsets according to `linux/aio_abi.h` and `fs/aio.c`.
    #[test]
    fn layouts_are_the_kernels() {
        assert_eq!((size_of::<Iocb>(), size_of::<IoEvent>(), size_of::<RingHead>()), (64, 32, 32));
        assert_eq!(
            [
                offset_of!(Iocb, opcode),
                offset_of!(Iocb, fd),
                offset_of!(Iocb, buf),
                offset_of!(Iocb, offset),
                offset_of!(Iocb, flags),
                offset_of!(Iocb, resfd)
            ],
            [16, 20, 24, 40, 56, 60]
        );
        assert_eq!([offset_of!(RingHead, head), offset_of!(RingHead, magic)], [8, 16]);
    }
}
