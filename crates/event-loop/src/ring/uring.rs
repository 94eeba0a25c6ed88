//! The io_uring ring.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use crate::ring::buffers::{self, BufferTable};
use crate::ring::messages::MessageHeaders;
use crate::ring::restrict::restrict;
use crate::ring::setup::{Refused, RingFlags, TaskRun};
use crate::ring::{Completion, Ready, Ring, RingFile, RingOp, Wait, workers};

/// Entries of the table of registered files. An unused entry costs 8 bytes in the kernel.
const FILE_TABLE: u32 = 1024;

/// `IORING_ENTER_*` of io_uring_enter(2).
const ENTER_GETEVENTS: u32 = 1 << 0;
const ENTER_EXT_ARG: u32 = 1 << 3;
const ENTER_NO_IOWAIT: u32 = 1 << 7;

/// An io_uring for one thread.
pub(crate) struct UringRing {
    ring: IoUring,
    /// Free indices of the table of registered files, last one first; empty if registering the table failed.
    free_files: Vec<u32>,
    /// The table of registered buffers, once needed.
    buffers: Option<BufferTable>,
    /// READV_FIXED and WRITEV_FIXED are supported: Linux 6.15.
    vectored_fixed: bool,
    /// `IORING_ENTER_NO_IOWAIT`, if supported.
    wait_flags: u32,
    /// DEFER_TASKRUN is on.
    defers: bool,
    /// Maximum entries queued at once. The kernel rounds the queue itself up to a power of two.
    max_queued: usize,
    headers: MessageHeaders,
}

/// Minimum size of the completion queue.
const MIN_COMPLETIONS: u32 = 1024;

impl UringRing {
    /// Creates a ring for `entries` queued operations and `completions` completions. 0 means eight times
    /// `entries`, as far more operations may be in flight than are queued between two calls. The kernel gets
    /// at most `workers` threads of each kind for blocking operations.
    pub(crate) fn new(
        flags: RingFlags,
        entries: u32,
        completions: u32,
        workers: u32,
    ) -> Result<Self, Refused> {
        let completions = match completions {
            0 => entries.saturating_mul(8).max(MIN_COMPLETIONS),
            n => n.max(entries),
        };
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp().setup_cqsize(completions);
        if flags.single_issuer {
            builder.setup_single_issuer();
        }
        match flags.task_run {
            TaskRun::Interrupt => {}
            TaskRun::Coop => {
                builder.setup_coop_taskrun().setup_taskrun_flag();
            }
            TaskRun::Defer => {
                builder.setup_defer_taskrun().setup_taskrun_flag();
            }
        }
        if flags.no_sqarray {
            builder.setup_no_sqarray();
        }
        if flags.submit_all {
            builder.setup_submit_all();
        }
        if flags.restricted {
            builder.setup_r_disabled();
        }
        let ring = builder.build(entries).map_err(Refused::Ring)?;
        let params = ring.params();
        if !params.is_feature_ext_arg() || !params.is_feature_resource_tagging() {
            // Before 5.11 the waiting call has no timeout. Before 5.13, which also brought resource tags, a
            // poll fires only once.
            return Err(Refused::Ring(io::Error::from_raw_os_error(libc::ENOSYS)));
        }
        if flags.no_iowait && !params.is_feature_no_iowait() {
            // The errno that the waiting call would return.
            return Err(Refused::Ring(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let wait_flags = if flags.no_iowait { ENTER_NO_IOWAIT } else { 0 };
        let free_files = match ring.submitter().register_files_sparse(FILE_TABLE) {
            Ok(()) => (0..FILE_TABLE).rev().collect(),
            Err(_) => Vec::new(),
        };
        workers::limit(&ring, workers);
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe).is_ok();
        let vectored_fixed = probed
            && probe.is_supported(opcode::ReadvFixed::CODE)
            && probe.is_supported(opcode::WritevFixed::CODE);
        if flags.restricted {
            let commands = probed && probe.is_supported(opcode::UringCmd16::CODE);
            restrict(&ring, vectored_fixed, commands).map_err(Refused::Restrictions)?;
        }
        let defers = flags.task_run == TaskRun::Defer;
        let max_queued = entries.max(1) as usize;
        let mut ring = UringRing {
            ring,
            free_files,
            buffers: None,
            vectored_fixed,
            wait_flags,
            defers,
            max_queued,
            headers: MessageHeaders::new(max_queued),
        };
        // A filter may permit creating rings but not entering them: detect that now.
        ring.enter(Wait::No).map_err(Refused::Entry)?;
        Ok(ring)
    }
}

/// Builds the entry of an operation for a file by descriptor or by index.
macro_rules! with_file {
    ($file:expr, |$target:ident| $entry:expr) => {
        match $file {
            RingFile::Fd(fd) => {
                let $target = types::Fd(fd);
                $entry
            }
            RingFile::Fixed(index) => {
                let $target = types::Fixed(index);
                $entry
            }
        }
    };
}

fn entry(op: &RingOp, headers: &mut MessageHeaders) -> squeue::Entry {
    match *op {
        RingOp::Rw { file, write, socket, segment, offset, rw_flags, buffer } => {
            let base = segment.iov_base.cast::<u8>();
            // Fits: a segment is part of a request that was checked against `MAX_IO`.
            let len = u32::try_from(segment.iov_len).unwrap_or(u32::MAX);
            // A receive of no bytes would wait for a byte.
            if socket && len > 0 {
                if write {
                    with_file!(file, |fd| opcode::Send::new(fd, base, len).build())
                } else {
                    with_file!(file, |fd| opcode::Recv::new(fd, base, len).build())
                }
            } else if let Some(index) = buffer {
                if write {
                    with_file!(file, |fd| opcode::WriteFixed::new(fd, base, len, index)
                        .offset(offset)
                        .rw_flags(rw_flags)
                        .build())
                } else {
                    with_file!(file, |fd| opcode::ReadFixed::new(fd, base, len, index)
                        .offset(offset)
                        .rw_flags(rw_flags)
                        .build())
                }
            } else if write {
                with_file!(file, |fd| opcode::Write::new(fd, base, len)
                    .offset(offset)
                    .rw_flags(rw_flags)
                    .build())
            } else {
                with_file!(file, |fd| opcode::Read::new(fd, base, len)
                    .offset(offset)
                    .rw_flags(rw_flags)
                    .build())
            }
        }
        // Not WRITEV, which raises SIGPIPE if the other side has closed. READV works for sockets too.
        RingOp::RwVectored { file, write: true, segments, count, socket: true, .. } => {
            let header = headers.of(segments, count);
            with_file!(file, |fd| opcode::SendMsg::new(fd, header).build())
        }
        RingOp::RwVectored { file, write, segments, count, offset, rw_flags, socket, buffer } => {
            if let Some(index) = buffer
                && !socket
            {
                if write {
                    with_file!(file, |fd| opcode::WritevFixed::new(fd, segments, count, index)
                        .offset(offset)
                        .rw_flags(rw_flags)
                        .build())
                } else {
                    with_file!(file, |fd| opcode::ReadvFixed::new(fd, segments, count, index)
                        .offset(offset)
                        .rw_flags(rw_flags)
                        .build())
                }
            } else if write {
                with_file!(file, |fd| opcode::Writev::new(fd, segments, count)
                    .offset(offset)
                    .rw_flags(rw_flags)
                    .build())
            } else {
                with_file!(file, |fd| opcode::Readv::new(fd, segments, count)
                    .offset(offset)
                    .rw_flags(rw_flags)
                    .build())
            }
        }
        RingOp::Fsync { file, data_only } => {
            let flags =
                if data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
            with_file!(file, |fd| opcode::Fsync::new(fd).flags(flags).build())
        }
        RingOp::Fallocate { file, mode, offset, len } => {
            with_file!(file, |fd| opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build())
        }
        RingOp::Command { file, code, head, address } => {
            let mut bytes = [0; 16];
            let (first, last) = bytes.split_at_mut(8);
            first.copy_from_slice(&head.to_ne_bytes());
            last.copy_from_slice(&(address.expose_provenance() as u64).to_ne_bytes());
            with_file!(file, |fd| opcode::UringCmd16::new(fd, code).cmd(bytes).build())
        }
        RingOp::PollAdd { fd, events, multishot } => {
            opcode::PollAdd::new(types::Fd(fd), events).multi(multishot).build()
        }
        // Not IORING_OP_POLL_REMOVE: it fails with EALREADY on a poll that has just fired, and a multishot
        // poll then stays armed for ever.
        RingOp::PollRemove { user_data } | RingOp::Cancel { user_data } => {
            opcode::AsyncCancel::new(user_data).build()
        }
    }
}

impl Ring for UringRing {
    unsafe fn push(&mut self, op: &RingOp, user_data: u64) -> bool {
        let mut queue = self.ring.submission();
        // Checked before the entry takes a message header, which a queued entry may still use.
        if queue.len() >= self.max_queued {
            return false;
        }
        let entry = entry(op, &mut self.headers).user_data(user_data);
        // SAFETY: the caller keeps descriptors and memory valid until the completion, as the
        // trait's contract says.
        unsafe { queue.push(&entry) }.is_ok()
    }

    fn queued(&mut self) -> u32 {
        self.ring.submission().len() as u32
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        // First fetch overflown completions. While there are any, the kernel ends each multishot poll that
        // fires. A poll armed on a ready descriptor fires at once. More of them than the queue has room for
        // would prevent each other from staying armed.
        let queue = self.ring.submission();
        let to_submit = if queue.cq_overflow() { 0 } else { queue.len() as u32 };
        drop(queue);
        // Always GETEVENTS: it runs deferred task work and flushes an overflown completion queue.
        let (mut flags, min_complete) = match wait {
            Wait::No => (ENTER_GETEVENTS, 0),
            Wait::For(_) | Wait::Forever => (ENTER_GETEVENTS | self.wait_flags, 1),
        };
        let timespec = match wait {
            Wait::For(ns) => types::Timespec::from(std::time::Duration::from_nanos(ns)),
            Wait::No | Wait::Forever => types::Timespec::new(),
        };
        let args = types::SubmitArgs::new().timespec(&timespec);
        let (arg, size) = match wait {
            Wait::For(_) => {
                flags |= ENTER_EXT_ARG;
                (&raw const args as *const libc::c_void, size_of_val(&args))
            }
            Wait::No | Wait::Forever => (std::ptr::null(), 0),
        };
        // SAFETY: the arguments are those of io_uring_enter(2): with EXT_ARG a pointer to, and the
        // size of, `io_uring_getevents_arg` (which `SubmitArgs` is), else none. The queue's entries
        // were pushed under `push`'s contract.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                self.ring.as_raw_fd(),
                to_submit,
                min_complete,
                flags,
                arg,
                size,
            )
        };
        if result >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // A timeout; a signal; no memory for requests right now; completions must be taken first. In
            // each case the caller checks the completions next.
            Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
            _ => Err(error),
        }
    }

    fn ready(&mut self) -> Ready {
        if !self.ring.completion().is_empty() {
            return Ready::Completions;
        }
        let queue = self.ring.submission();
        if queue.taskrun() || queue.cq_overflow() { Ready::NeedsEnter } else { Ready::Nothing }
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        let room = into.capacity() - into.len();
        into.extend(self.ring.completion().take(room).map(|cqe| Completion {
            user_data: cqe.user_data(),
            result: cqe.result(),
            more: io_uring::cqueue::more(cqe.flags()),
        }));
    }

    /// `None` with DEFER_TASKRUN: deferred task work does not wake pollers of the ring's descriptor. An
    /// eventfd registered with the ring misses most events caused by other eventfds. (Linux 6.18: a signal
    /// from within an eventfd's own wake-up is delivered once, then never again.)
    fn pollable_fd(&self) -> Option<RawFd> {
        if self.defers { None } else { Some(self.ring.as_raw_fd()) }
    }

    fn does_file_io(&self) -> bool {
        true
    }

    fn register_file(&mut self, fd: RawFd) -> Option<u32> {
        let index = self.free_files.pop()?;
        match self.ring.submitter().register_files_update(index, &[fd]) {
            Ok(_) => Some(index),
            Err(_) => {
                self.free_files.push(index);
                None
            }
        }
    }

    fn unregister_file(&mut self, index: u32) {
        if self.ring.submitter().register_files_update(index, &[-1]).is_ok() {
            self.free_files.push(index);
        }
    }

    fn reserve_buffers(&mut self, count: u32) -> io::Result<u32> {
        let table = match &mut self.buffers {
            Some(table) => table,
            none => {
                self.ring.submitter().register_buffers_sparse(buffers::PLACES)?;
                none.insert(BufferTable::new())
            }
        };
        table.take(count).ok_or(io::Error::from_raw_os_error(libc::ENOSPC))
    }

    fn register_buffer(&mut self, index: u32, memory: libc::iovec) -> io::Result<()> {
        // SAFETY: the call pins the memory mapped there now. What operations do with it is their submitter's
        // promise.
        unsafe { self.ring.submitter().register_buffers_update(index, &[memory], None) }
    }

    fn release_buffer(&mut self, index: u32) {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let released = self.register_buffer(index, nothing);
        if let (Ok(()), Some(table)) = (released, &mut self.buffers) {
            table.give_back(index);
        }
    }

    fn has_vectored_fixed(&self) -> bool {
        self.vectored_fixed
    }
}

/// Operations that the loop never uses, for the tests of `restrict.rs`.
#[cfg(test)]
impl UringRing {
    pub(super) fn push_raw(&mut self, entry: &squeue::Entry) {
        // SAFETY: those tests' operations name no memory.
        unsafe { self.ring.submission().push(entry) }.unwrap();
    }

    pub(super) fn register_eventfd(&self, fd: RawFd) -> io::Result<()> {
        self.ring.submitter().register_eventfd(fd)
    }

    pub(super) fn restrict_again(&self) -> io::Result<()> {
        restrict(&self.ring, false, false)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_completion_queue_is_as_large_as_asked_for_and_never_too_small() {
        for (entries, completions, has) in
            [(4, 0, 1024), (256, 0, 2048), (4, 16, 16), (64, 1, 64), (5, 100_000, 65536)]
        {
            let ring = UringRing::new(RingFlags::PLAIN, entries, completions, 1).unwrap();
            assert_eq!(ring.ring.params().cq_entries(), has, "{entries}, {completions}");
        }
    }

    #[test]
    fn sockets_are_read_and_written_by_recv_and_send() {
        let opcode = |write, socket, len| {
            let segment = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: len };
            let file = RingFile::Fd(-1);
            let op =
                RingOp::Rw { file, write, socket, segment, offset: 0, rw_flags: 0, buffer: None };
            let entry = entry(&op, &mut MessageHeaders::new(1)).get_opcode() as u8;
            let traced = op.trace_opcode();
            assert!(entry == traced || len == 0, "{op:?}");
            entry
        };
        assert_eq!((opcode(false, true, 1), opcode(true, true, 1)), (27, 26));
        assert_eq!((opcode(false, false, 1), opcode(true, false, 1)), (22, 23));
        // A receive of no bytes would wait for a byte.
        assert_eq!((opcode(false, true, 0), opcode(true, true, 0)), (22, 23));
    }

    #[test]
    fn a_refused_send_takes_no_queued_header() {
        let mut ring = UringRing::new(RingFlags::PLAIN, 2, 0, 1).unwrap();
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        let mut letters = *b"abc";
        let segments = letters
            .each_mut()
            .map(|letter| libc::iovec { iov_base: std::ptr::from_mut(letter).cast(), iov_len: 1 });
        let send = |segment: &libc::iovec| RingOp::RwVectored {
            file: RingFile::Fd(ours.as_raw_fd()),
            write: true,
            segments: segment,
            count: 1,
            offset: 0,
            rw_flags: 0,
            socket: true,
            buffer: None,
        };
        // SAFETY: socket and segments outlive the operations, which have ended below.
        let pushed = segments.each_ref().map(|segment| unsafe { ring.push(&send(segment), 0) });
        assert_eq!(pushed, [true, true, false]);
        let mut reaped = Vec::with_capacity(2);
        while reaped.len() < 2 {
            ring.enter(Wait::Forever).unwrap();
            ring.reap(&mut reaped);
        }
        let mut bytes = [0; 2];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"ab");
    }
}
