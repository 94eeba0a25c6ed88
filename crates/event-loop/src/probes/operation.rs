//! Values of trace events about operations.

use std::os::fd::RawFd;
use std::rc::Rc;

use io_uring::opcode;

use crate::event_loop::EventLoop;
use crate::ring::RingOp;
use crate::slots::UserData;

impl EventLoop {
    /// Identifies this loop in trace events: an address.
    pub(crate) fn trace_ctx(&self) -> u64 {
        Rc::as_ptr(&self.0).addr() as u64
    }

    /// The descriptor of a ring operation, also if it uses an index; else -1.
    pub(crate) fn trace_fd(&self, op: &RingOp, user_data: UserData) -> RawFd {
        match (*op, user_data) {
            (RingOp::PollAdd { fd, .. }, _) => fd,
            (_, UserData::Op(id)) => {
                self.0.slots.borrow().get(id).map_or(-1, |in_flight| in_flight.file.raw_fd())
            }
            _ => -1,
        }
    }
}

impl RingOp {
    /// The `IORING_OP_*` of the operation.
    pub(crate) fn trace_opcode(&self) -> u8 {
        match self {
            RingOp::Rw { socket: true, write: false, .. } => opcode::Recv::CODE,
            RingOp::Rw { socket: true, write: true, .. } => opcode::Send::CODE,
            RingOp::Rw { write: false, buffer: Some(_), .. } => opcode::ReadFixed::CODE,
            RingOp::Rw { write: true, buffer: Some(_), .. } => opcode::WriteFixed::CODE,
            RingOp::Rw { write: false, .. } => opcode::Read::CODE,
            RingOp::Rw { write: true, .. } => opcode::Write::CODE,
            RingOp::RwVectored { socket: false, write, buffer: Some(_), .. } => match write {
                false => opcode::ReadvFixed::CODE,
                true => opcode::WritevFixed::CODE,
            },
            RingOp::RwVectored { socket: true, write: true, .. } => opcode::SendMsg::CODE,
            RingOp::RwVectored { write: false, .. } => opcode::Readv::CODE,
            RingOp::RwVectored { write: true, .. } => opcode::Writev::CODE,
            RingOp::Fsync { .. } => opcode::Fsync::CODE,
            RingOp::Fallocate { .. } => opcode::Fallocate::CODE,
            RingOp::Command { .. } => opcode::UringCmd16::CODE,
            RingOp::PollAdd { .. } => opcode::PollAdd::CODE,
            RingOp::PollRemove { .. } | RingOp::Cancel { .. } => opcode::AsyncCancel::CODE,
        }
    }

    /// The operation's first byte in the file; 0 if it has none.
    pub(crate) fn trace_offset(&self) -> u64 {
        match *self {
            RingOp::Rw { offset, .. }
            | RingOp::RwVectored { offset, .. }
            | RingOp::Fallocate { offset, .. } => offset,
            _ => 0,
        }
    }
}
