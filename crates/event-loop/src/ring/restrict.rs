//! Restricts a ring to the operations that ringmill uses.
//!
//! A seccomp filter does not see operations of io_uring. A restricted ring (Linux 5.10,
//! `IORING_REGISTER_RESTRICTIONS`) permanently refuses all operations that are not on its list. Code that
//! gains control of the ring can read and write open files, but cannot open files, connect, or start
//! programs.

use std::io;

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::{IoUring, opcode};

/// Operations that [`entry`](super::uring) makes from a [`RingOp`](super::RingOp).
const OPERATIONS: [u8; 13] = [
    opcode::Read::CODE,
    opcode::ReadFixed::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::WriteFixed::CODE,
    opcode::Writev::CODE,
    opcode::Recv::CODE,
    opcode::Send::CODE,
    opcode::SendMsg::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
];

/// Further operations, if the kernel supports them: it refuses a list with unknown operations.
const VECTORED_FIXED: [u8; 2] = [opcode::ReadvFixed::CODE, opcode::WritevFixed::CODE];

/// Another such operation (Linux 5.19). It reaches only drivers of files that are open.
const COMMAND: u8 = opcode::UringCmd16::CODE;

/// `IORING_REGISTER_*` operations needed while the ring is in use.
const REGISTERING: [u8; 3] = [
    // FILES_UPDATE sets entries of the table of files. The table itself is registered before the restriction.
    6,
    // BUFFERS2 and BUFFERS_UPDATE create the table of buffers, which most rings never need, and set entries.
    15, 16,
];

/// Restricts a ring created with `IORING_SETUP_R_DISABLED`, then enables it. The calling thread becomes its
/// single issuer, if the ring has one.
pub(super) fn restrict(ring: &IoUring, vectored_fixed: bool, commands: bool) -> io::Result<()> {
    let mut list: Vec<_> = OPERATIONS.into_iter().map(Restriction::sqe_op).collect();
    if vectored_fixed {
        list.extend(VECTORED_FIXED.map(Restriction::sqe_op));
    }
    if commands {
        list.push(Restriction::sqe_op(COMMAND));
    }
    list.push(Restriction::sqe_flags_allowed(Flags::FIXED_FILE.bits()));
    list.extend(REGISTERING.map(Restriction::register_op));
    ring.submitter().register_restrictions(&mut list)?;
    ring.submitter().register_enable_rings()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use io_uring::types::Fd;
    use nix::sys::eventfd::EventFd;

    use super::*;
    use crate::ring::setup::RingFlags;
    use crate::ring::uring::UringRing;
    use crate::ring::{Ring, Wait};

    fn ring(restricted: bool) -> UringRing {
        UringRing::new(RingFlags { restricted, ..RingFlags::BEST }, 4, 0, 1).unwrap()
    }

    fn result(ring: &mut UringRing, entry: io_uring::squeue::Entry) -> i32 {
        ring.push_raw(&entry);
        let mut reaped = Vec::with_capacity(1);
        while reaped.is_empty() {
            ring.enter(Wait::Forever).unwrap();
            ring.reap(&mut reaped);
        }
        reaped[0].result
    }

    #[test]
    fn unlisted_operations_are_refused_with_eacces() {
        let (mut free, mut restricted) = (ring(false), ring(true));
        let (not_ours, close) = (Fd(-1), Fd(-1));
        for (entry, unrestricted) in [
            (opcode::Nop::new().build(), 0),
            (opcode::Close::new(close).build(), -libc::EBADF),
            (
                opcode::Socket::new(libc::AF_UNIX, libc::SOCK_DGRAM, 99).build(),
                -libc::EPROTONOSUPPORT,
            ),
            // Permitted, but not with this flag.
            (opcode::Fsync::new(not_ours).build().flags(Flags::ASYNC), -libc::EBADF),
        ] {
            assert_eq!(result(&mut free, entry.clone()), unrestricted, "{entry:?}");
            assert_eq!(result(&mut restricted, entry.clone()), -libc::EACCES, "{entry:?}");
        }
        // Permitted, but the named index is not registered.
        let nowhere = std::ptr::null_mut();
        let vectored = if restricted.has_vectored_fixed() { libc::EFAULT } else { libc::EACCES };
        for (entry, errno) in [
            (opcode::ReadFixed::new(not_ours, nowhere, 1, 0).build(), libc::EBADF),
            (opcode::WriteFixed::new(not_ours, nowhere, 1, 0).build(), libc::EBADF),
            (opcode::ReadvFixed::new(not_ours, nowhere.cast(), 1, 0).build(), vectored),
            (opcode::WritevFixed::new(not_ours, nowhere.cast(), 1, 0).build(), vectored),
        ] {
            assert_eq!(result(&mut restricted, entry.clone()), -errno, "{entry:?}");
        }
        let fsync = opcode::Fsync::new(not_ours).build();
        assert_eq!(result(&mut restricted, fsync), -libc::EBADF, "it is on the list");
    }

    #[test]
    fn registering_is_restricted_to_what_is_needed() {
        let (free, mut restricted) = (ring(false), ring(true));
        let eventfd = EventFd::new().unwrap();
        let raw = std::os::fd::AsRawFd::as_raw_fd(&eventfd.as_fd());
        free.register_eventfd(raw).unwrap();
        let error = restricted.register_eventfd(raw).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EACCES));
        let page = Box::new([0u8; 4096]);
        let memory = libc::iovec { iov_base: page.as_ptr().cast_mut().cast(), iov_len: 4096 };
        let index = restricted.reserve_buffers(1).expect("a table of buffers");
        restricted.register_buffer(index, memory).expect("buffers come and go");
        restricted.release_buffer(index);
        assert_eq!(restricted.reserve_buffers(1).unwrap(), index);
        // The restriction cannot be lifted.
        let error = restricted.restrict_again().unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::EACCES | libc::EBADFD)), "{error}");
        let index = restricted.register_file(raw).expect("files come and go");
        restricted.unregister_file(index);
        assert_eq!(restricted.register_file(raw), Some(index));
    }
}
