//! The steps of a request that is not one operation: the next step, and the result of the last one.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use event_loop::{AlignedBuf, IoBufs, IoOp};
use nix::errno::Errno;

use super::{Inner, Next};
use crate::drivers::file::bounce::Bounce;
use crate::drivers::file::calls;
use crate::drivers::file::plan::{FileStep, Position};
use crate::drivers::file::slots::{FileSlot, Stage};
use crate::drivers::file::zeroes::{Method, discard_failed, discard_op};
use crate::drivers::range_lock::Mailbox;
use crate::request::{Op, Request};

/// Bytes of zeroes per write, where the file system has no call that zeroes a range.
const ZEROES: usize = 1 << 20;

impl Inner {
    // ---- the next step -------------------------------------------------------------------------

    pub(super) fn next(&self, slot: &mut FileSlot, part: &mut IoBufs, token: u32) -> Next {
        if let Stage::AwaitingPeerFlushes(before) = slot.stage {
            return self.settle(slot, token, before);
        }
        if !slot.claimed && !self.claim(slot, token) {
            return Next::Wait;
        }
        let Request { op, offset, len, .. } = slot.request;
        let left = len - slot.done;
        match op {
            Op::Write { fua: true } if left == 0 && self.node.flushes_writes() => self.sync(slot),
            Op::Read | Op::Write { .. } if left == 0 => Next::Done(Ok(())),
            Op::Read | Op::Write { .. } => self.transfer(slot, part, token, left),
            Op::Flush => self.sync(slot),
            Op::BlockStatus => {
                let known = &self.node.known_data;
                if known.answer(offset, len, &mut slot.request.bufs) {
                    return Next::Done(Ok(()));
                }
                slot.stage = Stage::Status(known.holes());
                let bufs = std::mem::take(&mut slot.request.bufs);
                let op = IoOp::Call { call: &calls::EXTENTS, offset, len };
                Next::Submit { tail: false, op, bufs }
            }
            Op::Discard => match discard_op(&self.node, offset, len) {
                Some(op) => {
                    self.node.known_data.makes_holes();
                    slot.stage = Stage::Discard;
                    Next::Submit { tail: false, op, bufs: IoBufs::new() }
                }
                None => Next::Done(Ok(())),
            },
            Op::WriteZeroes { fua: true, .. } if left == 0 => self.sync(slot),
            Op::WriteZeroes { .. } if left == 0 => Next::Done(Ok(())),
            Op::WriteZeroes { may_unmap, no_fallback, .. } => {
                self.zero(slot, part, token, left, may_unmap, no_fallback)
            }
        }
    }

    /// Claims the blocks that a request writes. `false`: the request has to wait.
    fn claim(&self, slot: &mut FileSlot, token: u32) -> bool {
        slot.claimed = true;
        let Request { op, offset, len, .. } = slot.request;
        let limits = &self.node.limits;
        let align = limits.align.request as u64;
        let modify = limits.is_misaligned(offset, len);
        let writes = !op.only_reads();
        if align == 1 || !writes || !(modify || self.node.range_lock.is_for_all()) {
            return true;
        }
        let start = offset - offset % align;
        let end = (offset + len).next_multiple_of(align);
        let (ticket, granted) =
            self.node.range_lock.claim(start..end, modify, self.mailbox(), token);
        slot.ticket = Some(ticket);
        granted
    }

    fn mailbox(&self) -> &Arc<Mailbox> {
        self.mailbox.get_or_init(|| Mailbox::new(&self.event_loop, self.me.clone(), Inner::go_on))
    }

    /// The next step of a transfer of `left` bytes.
    fn transfer(&self, slot: &mut FileSlot, part: &mut IoBufs, token: u32, left: u64) -> Next {
        let Some(zeroes) = self.zeroes_for(slot) else { return Next::Done(Err(Errno::ENOMEM)) };
        let write = slot.request.op != Op::Read;
        let at = slot.request.offset + slot.done;
        let memory = if slot.zeroes { 0 } else { slot.done as usize };
        let bufs = zeroes.unwrap_or(&slot.request.bufs);
        let limits = self.node.limits_now();
        let step = limits.next(Position { at, memory, left, write }, bufs, part);
        let op = match step {
            FileStep::InPlace { .. } if write => self.write_op(slot.request.op, at),
            FileStep::InPlace { .. } => IoOp::Read { offset: at },
            _ => {
                if slot.bounce.is_none() {
                    let align = limits.align.memory.max(limits.align.request);
                    match self.bounces.borrow_mut().take(token, align) {
                        Bounce::Here(buf) => slot.bounce = Some(buf),
                        Bounce::Wait => {
                            slot.stage = Stage::Turn;
                            return Next::Wait;
                        }
                        Bounce::NoMemory => return Next::Done(Err(Errno::ENOMEM)),
                    }
                }
                let Some(bounce) = &mut slot.bounce else { return Next::Wait };
                match step {
                    FileStep::BounceWrite { len } => {
                        bufs.copy_to(memory, bounce, 0, len);
                        if bufs.is_lost() {
                            return Next::Done(Err(Errno::EFAULT));
                        }
                        part.set_part(bounce, 0, len, 1);
                        self.write_op(slot.request.op, at)
                    }
                    FileStep::BounceRead { start, span, .. } => {
                        part.set_part(bounce, 0, span, 1);
                        IoOp::Read { offset: start }
                    }
                    FileStep::Modify { start, .. } => {
                        part.set_part(bounce, 0, limits.align.request, 1);
                        IoOp::Read { offset: start }
                    }
                    FileStep::InPlace { .. } => return Next::Wait,
                }
            }
        };
        slot.stage = Stage::FileStep(step);
        Next::Submit { tail: limits.in_tail(at), op, bufs: std::mem::take(part) }
    }

    fn write_op(&self, op: Op, offset: u64) -> IoOp {
        let fua = matches!(op, Op::Write { fua: true });
        IoOp::Write { offset, dsync: fua && !self.node.no_flush && !self.node.page_cache }
    }

    /// The memory of a step that writes zeroes; `Some(None)` for a step without zeroes. `None`: out of
    /// memory.
    fn zeroes_for(&self, slot: &FileSlot) -> Option<Option<&IoBufs>> {
        if !slot.zeroes {
            return Some(None);
        }
        if self.zeroes.get().is_none() {
            // Never written: all pages are the kernel's zero page.
            self.zeroes.set(AlignedBuf::io_bufs(ZEROES, 4096)?).ok();
        }
        self.zeroes.get().map(Some)
    }

    /// The next step of zeroing `left` bytes: a system call for whole blocks if there is one, otherwise
    /// a write of zeroes.
    fn zero(
        &self,
        slot: &mut FileSlot,
        part: &mut IoBufs,
        token: u32,
        left: u64,
        may_unmap: bool,
        no_fallback: bool,
    ) -> Next {
        let at = slot.request.offset + slot.done;
        let sector = self.node.limits.sector;
        let head = at % sector;
        // A format above relies on the file's end being behind its zeroes.
        let extends = at + left > self.node.size();
        let method = Method::best(&self.node, may_unmap, extends);
        let write = match method {
            Some(method) if head == 0 && left >= sector => {
                let len = left - left % sector;
                slot.stage = Stage::Zero(method, len);
                self.node.known_data.makes_holes();
                return Next::Submit {
                    tail: false,
                    op: method.op(at, len, extends),
                    bufs: IoBufs::new(),
                };
            }
            Some(_) if head != 0 => left.min(sector - head),
            Some(_) => left,
            None if no_fallback => return Next::Done(Err(Errno::EOPNOTSUPP)),
            None => left,
        };
        slot.zeroes = true;
        self.transfer(slot, part, token, write.min(ZEROES as u64))
    }

    fn sync(&self, slot: &mut FileSlot) -> Next {
        if self.node.no_flush || self.node.geometry.read_only {
            return Next::Done(Ok(()));
        }
        if let failed @ Err(_) = self.node.flushes_so_far() {
            return Next::Done(failed);
        }
        if slot.request.op == Op::Flush {
            // Requests that end from now on set it again.
            self.node.unflushed.store(false, Ordering::Relaxed);
        }
        slot.stage = Stage::Sync;
        slot.sync = self.node.may_wait().then(|| self.node.syncs.begin());
        Next::Submit { tail: false, op: IoOp::Fsync { data_only: true }, bufs: IoBufs::new() }
    }

    // ---- the result of a step ------------------------------------------------------------------

    pub(super) fn took_step(
        &self,
        slot: &mut FileSlot,
        part: &mut IoBufs,
        token: u32,
        result: i32,
    ) -> Next {
        let Ok(n) = usize::try_from(result) else {
            return self.failed(slot, part, token, Errno::from_raw(result.wrapping_neg()));
        };
        match slot.stage {
            Stage::Turn | Stage::Merged => return Next::Wait,
            Stage::FileStep(step) => match self.took_transfer_step(slot, part, step, n) {
                Ok(Some(next)) => return next,
                Ok(None) => {}
                Err(errno) => return Next::Done(Err(errno)),
            },
            // One block: the kernel does not shorten such a write.
            Stage::ModifyWrite(len) if n == self.node.limits.align.request => {
                slot.done += len as u64;
            }
            Stage::ModifyWrite(_) => return Next::Done(Err(Errno::EIO)),
            Stage::Zero(_, len) => {
                self.node.known_data.makes_holes();
                slot.done += len;
            }
            Stage::Status(holes) => {
                let Request { offset, len, ref mut bufs, .. } = slot.request;
                let asked = offset..offset.saturating_add(len);
                self.node.known_data.found(holes, asked, bufs, n);
                return Next::Done(Ok(()));
            }
            Stage::Sync => match slot.sync.take() {
                Some(running) => return self.settle(slot, token, running.end()),
                None => return Next::Done(Ok(())),
            },
            Stage::AwaitingPeerFlushes(_) => return Next::Wait,
            Stage::Discard => {
                self.node.known_data.makes_holes();
                return Next::Done(Ok(()));
            }
        }
        self.next(slot, part, token)
    }

    /// A successful flush of the page cache counts once all flushes that ran at the same time (numbers
    /// below `before`) have ended, if none of them has failed.
    fn settle(&self, slot: &mut FileSlot, token: u32, before: u64) -> Next {
        if !self.node.syncs.have_ended(before, self.mailbox(), token) {
            slot.stage = Stage::AwaitingPeerFlushes(before);
            return Next::Wait;
        }
        Next::Done(self.node.flushes_so_far())
    }

    /// Accounts for `n` bytes of a step. `None`: plan the next step.
    fn took_transfer_step(
        &self,
        slot: &mut FileSlot,
        part: &mut IoBufs,
        step: FileStep,
        n: usize,
    ) -> Result<Option<Next>, Errno> {
        // A resize may have come after the plan, so the requested length counts, not the tail's present place.
        let limits = self.node.limits_now();
        let at = slot.request.offset + slot.done;
        let align = if limits.in_tail(at) { 1 } else { limits.align.request };
        let memory = slot.done as usize;
        match step {
            FileStep::InPlace { len } | FileStep::BounceWrite { len }
                if slot.request.op != Op::Read =>
            {
                let whole = if n >= len { len } else { n - n % align };
                if whole == 0 {
                    return Err(Errno::EIO);
                }
                slot.done += whole.min(len) as u64;
            }
            FileStep::InPlace { len } => {
                let (got, ended) = bytes_read(n, len, align);
                slot.done += got.min(len) as u64;
                if ended {
                    self.zero_rest(slot);
                }
            }
            FileStep::BounceRead { span, skip, len, .. } => {
                let (got, ended) = bytes_read(n, span, align);
                let got = got.saturating_sub(skip).min(len);
                if let Some(bounce) = &slot.bounce {
                    bounce.copy_to(skip, &mut slot.request.bufs, memory, got);
                }
                slot.done += got as u64;
                if ended && got < len {
                    self.zero_rest(slot);
                }
            }
            FileStep::BounceWrite { .. } => return Err(Errno::EIO),
            FileStep::Modify { start, skip, len } => {
                let zeroes = self.zeroes_for(slot).flatten();
                let FileSlot { bounce: Some(bounce), request, .. } = slot else {
                    return Err(Errno::EIO);
                };
                bounce.zero(n, align.saturating_sub(n));
                match zeroes {
                    Some(zeroes) => zeroes.copy_to(0, bounce, skip, len),
                    None => request.bufs.copy_to(memory, bounce, skip, len),
                };
                if request.bufs.is_lost() {
                    return Err(Errno::EFAULT);
                }
                part.set_part(bounce, 0, align, 1);
                let op = self.write_op(request.op, start);
                slot.stage = Stage::ModifyWrite(len);
                return Ok(Some(Next::Submit { tail: false, op, bufs: std::mem::take(part) }));
            }
        }
        Ok(None)
    }

    /// The file ends here: the rest of a read is zeroes.
    fn zero_rest(&self, slot: &mut FileSlot) {
        let memory = slot.done as usize;
        let left = slot.request.bufs.len().saturating_sub(memory);
        slot.request.bufs.zero(memory, left);
        slot.done = slot.request.len;
    }

    fn failed(&self, slot: &mut FileSlot, part: &mut IoBufs, token: u32, errno: Errno) -> Next {
        if matches!(errno, Errno::EINTR | Errno::EAGAIN) {
            return self.next(slot, part, token);
        }
        if slot.stage == Stage::Sync {
            self.node.unflushed.store(true, Ordering::Relaxed);
        }
        match slot.stage {
            Stage::Zero(method, _) if method.failed(&self.node, errno) => {
                self.next(slot, part, token)
            }
            Stage::Discard if discard_failed(&self.node, errno) => Next::Done(Ok(())),
            // A cancelled flush has not begun: its loop ends.
            Stage::Sync if self.node.may_wait() && errno != Errno::ECANCELED => {
                // Before the flush counts as ended.
                self.node.flush_failed.store(errno as i32, Ordering::Relaxed);
                Next::Done(Err(errno))
            }
            _ => Next::Done(Err(errno)),
        }
    }
}

/// Returns how many bytes of a read of `asked` count, and whether the file ends there. With `O_DIRECT`,
/// a part of a block is the file's end. After whole blocks, the next read shows the end.
fn bytes_read(n: usize, asked: usize, align: usize) -> (usize, bool) {
    match n - n % align {
        _ if n >= asked => (n, false),
        0 => (n, true),
        whole => (whole, false),
    }
}
