//! Requests that are not multiples of a node's block: tasks read, modify and write the blocks.
//!
//! Guests send such requests only to disks with blocks larger than a sector. There, writes of whole blocks
//! wait for modifications of the same blocks.

use std::cell::{OnceCell, RefCell};
use std::future::poll_fn;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Poll, Waker};

use event_loop::{AlignedBuf, EventLoop, IoBufs, Slab};
use nix::errno::Errno;

use super::range_lock::{Mailbox, RangeLock, Ticket};
use crate::node::Channel;
use crate::request::{CompletionGuard, Op, Request, RequestOwner};
use crate::status::{EXTENT_LEN, Extent, extent, put};
use crate::submit::submit;

/// Most bytes of a request that are processed at once: a multiple of smaller blocks. Of larger ones, one.
const PIECE: u64 = 1 << 20;
/// Fewest bytes of an extent.
const SECTOR: u64 = 512;

/// A node that accepts only multiples of a block.
pub(crate) trait WholeBlocks: 'static {
    /// Size of the block in bytes, a power of two.
    fn block(&self) -> u64;

    /// Orders the requests of all loops that write to parts of blocks.
    fn range_lock(&self) -> &RangeLock;

    /// The end of the disk, if that may lie within a block: the last block ends with it.
    fn end(&self) -> u64 {
        u64::MAX
    }

    /// Applies the node's options to a request, and checks its range. `None`: the request was answered.
    fn admit(&self, request: Request) -> Option<Request>;
}

/// A channel that accepts any range, on top of a channel of whole blocks.
pub(crate) struct Aligned<S> {
    me: Weak<Aligned<S>>,
    event_loop: EventLoop,
    shared: Arc<S>,
    below: Rc<dyn Channel>,
    slots: RefCell<Slots>,
    /// Receives granted claims; created by the first claim that waits.
    mailbox: OnceCell<Arc<Mailbox>>,
}

/// The owner of a claim.
enum Claimed {
    /// A request of whole blocks that waits for its turn.
    Waiting(Request),
    /// A request of whole blocks that was sent on.
    Below(CompletionGuard),
    /// A task: whether the claim was granted, and the waker.
    Task(bool, Option<Waker>),
}

/// Claims of this loop.
#[derive(Default)]
struct Slots {
    /// Claims by token.
    claims: Slab<(Claimed, Option<Ticket>)>,
    /// Number of requests that tasks process.
    tasks: usize,
}

impl<S: WholeBlocks> Aligned<S> {
    pub(crate) fn new(event_loop: &EventLoop, shared: &Arc<S>, below: Rc<dyn Channel>) -> Rc<Self> {
        Rc::new_cyclic(|me| Aligned {
            me: me.clone(),
            event_loop: event_loop.clone(),
            shared: shared.clone(),
            below,
            slots: RefCell::default(),
            mailbox: OnceCell::new(),
        })
    }

    fn align(&self) -> u64 {
        self.shared.block()
    }

    fn mailbox(&self) -> &Arc<Mailbox> {
        self.mailbox.get_or_init(|| Mailbox::new(&self.event_loop, self.me.clone(), Self::has_turn))
    }

    /// Claims blocks for the owner of the token. `true`: granted at once.
    fn claim(&self, token: u32, blocks: Range<u64>, modify: bool) -> bool {
        let (ticket, granted) =
            self.shared.range_lock().claim(blocks, modify, self.mailbox(), token);
        if let Some((_, place)) = self.slots.borrow_mut().claims.get_mut(token) {
            *place = Some(ticket);
        }
        granted
    }

    fn has_turn(&self, token: u32) {
        let mut slots = self.slots.borrow_mut();
        let Some((claimed, _)) = slots.claims.get_mut(token) else { return };
        match claimed {
            Claimed::Task(granted, waker) => {
                *granted = true;
                let waker = waker.take();
                drop(slots);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            Claimed::Waiting(_) => {
                drop(slots);
                self.send(token);
            }
            Claimed::Below(_) => {}
        }
    }

    /// Submits a request of whole blocks after its range was claimed.
    fn send(&self, token: u32) {
        let Some(me) = self.me.upgrade() else { return };
        let to: Rc<dyn RequestOwner> = me;
        let mut slots = self.slots.borrow_mut();
        let Some((claimed, _)) = slots.claims.get_mut(token) else { return };
        // Replaced below.
        let Claimed::Waiting(mut request) = std::mem::replace(claimed, Claimed::Task(true, None))
        else {
            return;
        };
        *claimed = Claimed::Below(request.intercept(&to, token));
        drop(slots);
        self.below.submit(request);
    }

    fn end(&self, token: u32) -> Option<Claimed> {
        let (claimed, ticket) = self.slots.borrow_mut().claims.remove(token)?;
        if let Some(ticket) = ticket {
            self.shared.range_lock().release(ticket);
        }
        Some(claimed)
    }

    // ---- tasks ---------------------------------------------------------------------------------

    async fn work(self: Rc<Self>, mut request: Request) {
        let blocks = self.blocks(request.offset, request.len);
        let result = match request.op {
            Op::Read => self.read(&mut request).await,
            Op::BlockStatus => self.block_status(&mut request, blocks).await,
            Op::Discard => self.discard(&request).await,
            Op::Flush => submit(&self.below, Op::Flush, 0, 0, IoBufs::new()).await.0,
            Op::Write { fua } => {
                let token = self.turn(blocks).await;
                let result = self.write(&request, 0..request.len, fua).await;
                self.end(token);
                result
            }
            Op::WriteZeroes { .. } => {
                let token = self.turn(blocks).await;
                let result = self.write_zeroes(&request).await;
                self.end(token);
                result
            }
        };
        self.slots.borrow_mut().tasks -= 1;
        request.complete(result);
    }

    /// The blocks that contain this range.
    fn blocks(&self, offset: u64, len: u64) -> Range<u64> {
        let align = self.align();
        let end = (offset + len).next_multiple_of(align);
        offset - offset % align..end.min(self.shared.end().max(offset + len))
    }

    /// Whether a request consists of whole blocks.
    fn is_whole(&self, request: &Request) -> bool {
        let (align, end) = (self.align(), request.offset.saturating_add(request.len));
        let is_end = |end: u64| end.is_multiple_of(align) || end == self.shared.end();
        request.offset.is_multiple_of(align) && is_end(end)
    }

    /// Waits until the blocks are claimed for this task alone.
    async fn turn(&self, blocks: Range<u64>) -> u32 {
        let token = self.slots.borrow_mut().claims.insert((Claimed::Task(false, None), None));
        if self.claim(token, blocks, true) {
            return token;
        }
        poll_fn(|cx| match self.slots.borrow_mut().claims.get_mut(token) {
            Some((Claimed::Task(false, waker), _)) => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
            _ => Poll::Ready(token),
        })
        .await
    }

    /// The next piece of a range, from `at` on: its blocks, and memory for them.
    fn piece(&self, at: u64, end: u64) -> Result<(Range<u64>, IoBufs), Errno> {
        let Range { start, end } = self.blocks(at, end - at);
        let end = end.min(start + PIECE.max(self.align()));
        let bounce = AlignedBuf::io_bufs((end - start) as usize, 4096).ok_or(Errno::ENOMEM)?;
        Ok((start..end, bounce))
    }

    async fn read(&self, request: &mut Request) -> Result<(), Errno> {
        let (mut at, end) = (request.offset, request.offset + request.len);
        while at < end {
            let (blocks, bounce) = self.piece(at, end)?;
            let len = blocks.end - blocks.start;
            let (result, bounce) = submit(&self.below, Op::Read, blocks.start, len, bounce).await;
            result?;
            let (from, to) = ((at - blocks.start) as usize, (at - request.offset) as usize);
            let bytes = blocks.end.min(end) - at;
            bounce.copy_to(from, &mut request.bufs, to, bytes as usize);
            at += bytes;
        }
        Ok(())
    }

    /// Writes a part of a request, or zeroes if the request has no memory.
    async fn write(&self, request: &Request, part: Range<u64>, fua: bool) -> Result<(), Errno> {
        let align = self.align();
        let (mut at, end) = (request.offset + part.start, request.offset + part.end);
        while at < end {
            let (blocks, mut bounce) = self.piece(at, end)?;
            let bytes = blocks.end.min(end) - at;
            let last = (blocks.end - 1) / align * align;
            if at != blocks.start {
                self.read_block(blocks.start, &mut bounce, &blocks).await?;
            }
            if at + bytes != blocks.end && (at == blocks.start || last != blocks.start) {
                self.read_block(last, &mut bounce, &blocks).await?;
            }
            let (to, from) = ((at - blocks.start) as usize, (at - request.offset) as usize);
            if request.bufs.is_empty() {
                bounce.zero(to, bytes as usize);
            } else {
                request.bufs.copy_to(from, &mut bounce, to, bytes as usize);
                if request.bufs.is_lost() {
                    return Err(Errno::EFAULT);
                }
            }
            let (op, len) = (Op::Write { fua }, blocks.end - blocks.start);
            submit(&self.below, op, blocks.start, len, bounce).await.0?;
            at += bytes;
        }
        Ok(())
    }

    /// Reads one block into its place in `bounce`, which has these blocks.
    async fn read_block(
        &self,
        block: u64,
        bounce: &mut IoBufs,
        blocks: &Range<u64>,
    ) -> Result<(), Errno> {
        let len = self.align().min(blocks.end - block);
        let mut part = IoBufs::new();
        part.set_part(bounce, (block - blocks.start) as usize, len as usize, 1);
        submit(&self.below, Op::Read, block, len, part).await.0
    }

    async fn write_zeroes(&self, request: &Request) -> Result<(), Errno> {
        let Op::WriteZeroes { fua, .. } = request.op else { return Err(Errno::EINVAL) };
        let inner = self.inner(request);
        if inner.is_empty() {
            return self.write(request, 0..request.len, fua).await;
        }
        // The largest part first, since it may be refused.
        let (offset, len) = (request.offset + inner.start, inner.end - inner.start);
        submit(&self.below, request.op, offset, len, IoBufs::new()).await.0?;
        self.write(request, 0..inner.start, fua).await?;
        self.write(request, inner.end..request.len, fua).await
    }

    /// The part of a request that consists of whole blocks.
    fn inner(&self, request: &Request) -> Range<u64> {
        let (align, end) = (self.align(), request.offset + request.len);
        let start = request.offset.next_multiple_of(align) - request.offset;
        let end = if end == self.shared.end() { end } else { end - end % align };
        start..end.saturating_sub(request.offset)
    }

    async fn discard(&self, request: &Request) -> Result<(), Errno> {
        let inner = self.inner(request);
        if inner.is_empty() {
            return Ok(());
        }
        let (offset, len) = (request.offset + inner.start, inner.end - inner.start);
        submit(&self.below, Op::Discard, offset, len, IoBufs::new()).await.0
    }

    async fn block_status(&self, request: &mut Request, blocks: Range<u64>) -> Result<(), Errno> {
        let len = blocks.end - blocks.start;
        let mut skip = request.offset - blocks.start;
        // Each sector before the range may be an extent.
        let before = (skip / SECTOR + 1) as usize * EXTENT_LEN;
        let memory = AlignedBuf::io_bufs(before + request.bufs.len(), 16).ok_or(Errno::ENOMEM)?;
        let (result, found) = submit(&self.below, Op::BlockStatus, blocks.start, len, memory).await;
        result?;
        let (mut left, mut count) = (request.len, 0);
        for index in 0.. {
            let Some(found) = extent(&found, index).filter(|_| left > 0) else {
                break;
            };
            let skipped = skip.min(found.len);
            skip -= skipped;
            let len = (found.len - skipped).min(left);
            if len > 0 && put(&mut request.bufs, count, Extent { len, ..found }) {
                count += 1;
                left -= len;
            }
        }
        crate::status::end_after(&mut request.bufs, count * EXTENT_LEN);
        Ok(())
    }
}

impl<S: WholeBlocks> Channel for Aligned<S> {
    fn submit(&self, request: Request) {
        let writes = !request.op.only_reads();
        if self.is_whole(&request) {
            if !writes || !self.shared.range_lock().is_for_all() {
                return self.below.submit(request);
            }
            let blocks = request.offset..request.offset.saturating_add(request.len);
            let token = self.slots.borrow_mut().claims.insert((Claimed::Waiting(request), None));
            if self.claim(token, blocks, false) {
                self.send(token);
            }
            return;
        }
        let Some(request) = self.shared.admit(request) else { return };
        if let Some(me) = self.me.upgrade() {
            self.slots.borrow_mut().tasks += 1;
            self.event_loop.spawn(me.work(request));
        }
    }

    fn in_flight(&self) -> usize {
        let slots = self.slots.borrow();
        slots.tasks + slots.claims.len() + self.below.in_flight()
    }
}

impl<S: WholeBlocks> RequestOwner for Aligned<S> {
    fn complete(&self, token: u32, result: Result<(), Errno>, bufs: IoBufs) {
        if let Some(Claimed::Below(mut reply)) = self.end(token) {
            reply.send(result, bufs);
        }
    }
}

impl<S> Drop for Aligned<S> {
    fn drop(&mut self) {
        if let Some(mailbox) = self.mailbox.get() {
            self.event_loop.delete_bottom_half(mailbox.bottom_half());
        }
    }
}
