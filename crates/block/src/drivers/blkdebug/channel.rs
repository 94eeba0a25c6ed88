//! One loop's way through a blkdebug node.

use std::cell::Cell;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::sync::lock;
use event_loop::{AlignedBuf, EventLoop, IoBufs};
use nix::errno::Errno;

use super::BlkdebugNode;
use super::limits::How;
use super::rules::{self, SECTOR, Verdict};
use crate::node::Channel;
use crate::options::{Effect, Event};
use crate::request::{Op, Request};
use crate::submit::submit;

/// A channel. What does not simply pass is worked on by a task.
pub(super) struct BlkdebugChannel {
    me: Weak<BlkdebugChannel>,
    event_loop: EventLoop,
    node: Arc<BlkdebugNode>,
    child: Rc<dyn Channel>,
    /// Requests that tasks work on.
    tasks: Cell<usize>,
}

impl BlkdebugChannel {
    pub(super) fn new(
        node: Arc<BlkdebugNode>,
        event_loop: &EventLoop,
        child: Rc<dyn Channel>,
    ) -> Rc<Self> {
        Rc::new_cyclic(|me| BlkdebugChannel {
            me: me.clone(),
            event_loop: event_loop.clone(),
            node,
            child,
            tasks: Cell::new(0),
        })
    }

    fn start(&self, request: Request, verdict: Option<Verdict>) {
        let Some(me) = self.me.upgrade() else { return request.complete(Err(Errno::ECANCELED)) };
        self.tasks.set(self.tasks.get() + 1);
        let mut owed = Owed { request: Some(request), channel: me };
        self.event_loop.spawn(async move {
            let result = owed.carry_out(verdict).await;
            if let Some(request) = owed.request.take() {
                request.complete(result);
            }
        });
    }

    /// Carries out a piece, or what the rules leave of it. `memory` is the piece's, if it has any.
    async fn piece(
        &self,
        op: Op,
        range: Range<u64>,
        memory: Option<(&IoBufs, usize)>,
        verdict: Option<Verdict>,
    ) -> Result<(), Errno> {
        let Some(Verdict { effect, errno, delay_ns, .. }) = verdict else {
            return self.pass(op, range, memory).await;
        };
        if delay_ns > 0 {
            let until = self.event_loop.now_ns().saturating_add(delay_ns);
            self.event_loop.sleep_until(until).await;
        }
        let answer = errno.map_or(Ok(()), Err);
        match effect {
            Effect::Error if errno.is_none() => return self.pass(op, range, memory).await,
            Effect::Error | Effect::Lost => return answer,
            Effect::Short | Effect::Torn => {}
        }
        for part in self.parts(effect, (range.end - range.start).div_ceil(SECTOR)) {
            let at = part.start * SECTOR;
            let memory = memory.map(|(bufs, start)| (bufs, start + at as usize));
            let end = range.end.min(range.start + part.end * SECTOR);
            self.pass(op, range.start + at..end, memory).await?;
        }
        answer
    }

    /// Which sectors of so many are carried out.
    fn parts(&self, effect: Effect, sectors: u64) -> Vec<Range<u64>> {
        let mut rules = lock(&self.node.rules);
        if effect == Effect::Short {
            let carried_out = 0..rules.random_below(sectors.max(1));
            return [carried_out].into_iter().filter(|part| !part.is_empty()).collect();
        }
        // One is not for certain.
        let missing = rules.random_below(sectors.max(1));
        let mut parts: Vec<Range<u64>> = Vec::new();
        for sector in (0..sectors).filter(|sector| *sector != missing) {
            if rules.random_below(2) == 0 {
                continue;
            }
            match parts.last_mut() {
                Some(last) if last.end == sector => last.end += 1,
                _ => parts.push(sector..sector + 1),
            }
        }
        parts
    }

    async fn pass(
        &self,
        op: Op,
        range: Range<u64>,
        memory: Option<(&IoBufs, usize)>,
    ) -> Result<(), Errno> {
        let len = range.end - range.start;
        let mut part = IoBufs::new();
        if let Some((bufs, start)) = memory {
            part.set_part(bufs, start, len as usize, usize::MAX);
        }
        submit(&self.child, op, range.start, len, part).await.0
    }

    async fn pass_whole(&self, request: &mut Request) -> Result<(), Errno> {
        let Request { op, offset, len, .. } = *request;
        let bufs = std::mem::take(&mut request.bufs);
        let (result, bufs) = submit(&self.child, op, offset, len, bufs).await;
        request.bufs = bufs;
        result
    }

    /// Carries out what is left of write-zeroes without the help of the node below.
    async fn write_data(&self, range: Range<u64>, fua: bool) -> Result<(), Errno> {
        let len = usize::try_from(range.end - range.start).map_err(|_| Errno::ENOMEM)?;
        let mut bufs = AlignedBuf::io_bufs(len, 4096).ok_or(Errno::ENOMEM)?;
        bufs.zero(0, len);
        submit(&self.child, Op::Write { fua }, range.start, len as u64, bufs).await.0
    }
}

impl Channel for BlkdebugChannel {
    fn submit(&self, request: Request) {
        let Some(request) = self.node.common.admit(request) else { return };
        let Request { op, offset, len, part, .. } = request;
        let Some(end) = offset.checked_add(len) else {
            return request.complete(Err(op.beyond_end()));
        };
        let range = offset..end;
        let is_whole = self.node.limits.first_piece(op, &range) == (end, How::AsAsked);
        let mut rules = lock(&self.node.rules);
        rules::events(op, part).iter().for_each(|event| rules.fire(*event));
        let verdict = match is_whole {
            true => rules.judge(rules::kind(op), &range),
            // Each piece is judged in its turn.
            false => None,
        };
        let is_watched = ends(op) && rules.listen_to(Event::PwritevDone);
        drop(rules);
        if verdict.is_none() && is_whole && !is_watched {
            return self.child.submit(request);
        }
        let is_immediate = |verdict: &Verdict| {
            verdict.immediately && matches!(verdict.effect, Effect::Error | Effect::Lost)
        };
        match verdict.filter(is_immediate).and_then(at_once) {
            Some(answer) => request.complete(answer),
            None => self.start(request, verdict),
        }
    }

    fn in_flight(&self) -> usize {
        self.tasks.get() + self.child.in_flight()
    }

    fn drain_begin(&self) {
        self.child.drain_begin();
    }

    fn drain_end(&self) {
        self.child.drain_end();
    }
}

/// Whether its end is an event.
fn ends(op: Op) -> bool {
    matches!(op, Op::Write { .. } | Op::WriteZeroes { .. })
}

/// The answer to a request that is not carried out, nor delayed.
fn at_once(verdict: Verdict) -> Option<Result<(), Errno>> {
    let Verdict { effect, errno, delay_ns, .. } = verdict;
    let answer = errno.map_or(Ok(()), Err);
    (delay_ns == 0 && (effect == Effect::Lost || answer.is_err())).then_some(answer)
}

/// A request that a task is at work on. A task that is dropped, as the loop ends, answers it too.
struct Owed {
    request: Option<Request>,
    channel: Rc<BlkdebugChannel>,
}

impl Owed {
    /// Does the request piece by piece. `verdict` is that on the first piece, if there is no other.
    async fn carry_out(&mut self, verdict: Option<Verdict>) -> Result<(), Errno> {
        let Some(request) = &mut self.request else { return Ok(()) };
        let channel = &*self.channel;
        let node = &*channel.node;
        let Request { op, offset, len, .. } = *request;
        let range = offset..offset + len;
        if let (end, How::AsAsked) = node.limits.first_piece(op, &range)
            && end == range.end
        {
            let result = match verdict {
                None => channel.pass_whole(request).await,
                // What stands in the memory is no part of the disk, and the answer's length tells.
                Some(_) if op == Op::BlockStatus => match verdict.and_then(at_once) {
                    Some(answer) => answer,
                    None => channel.pass_whole(request).await,
                },
                Some(_) => {
                    let memory = Some((&request.bufs, 0)).filter(|(bufs, _)| !bufs.is_empty());
                    channel.piece(op, range, memory, verdict).await
                }
            };
            return self.done(op, result);
        }
        let mut at = offset;
        let mut result = Ok(());
        while at < range.end && result.is_ok() {
            let (end, how) = node.limits.first_piece(op, &(at..range.end));
            let piece = at..end;
            let memory = Some((&request.bufs, (at - offset) as usize));
            let memory = memory.filter(|(bufs, _)| !bufs.is_empty());
            at = end;
            if how == How::NotAtAll {
                continue;
            }
            let verdict = lock(&node.rules).judge(rules::kind(op), &piece);
            result = match op {
                Op::WriteZeroes { no_fallback: true, .. } if how == How::AsData => {
                    Err(Errno::EOPNOTSUPP)
                }
                Op::WriteZeroes { fua, .. } if how == How::AsData && verdict.is_none() => {
                    channel.write_data(piece, fua).await
                }
                _ => channel.piece(op, piece, memory, verdict).await,
            };
        }
        self.done(op, result)
    }

    fn done(&self, op: Op, result: Result<(), Errno>) -> Result<(), Errno> {
        if ends(op) {
            lock(&self.channel.node.rules).fire(Event::PwritevDone);
        }
        result
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.channel.tasks.set(self.channel.tasks.get() - 1);
        if let Some(mut request) = self.request.take() {
            // Parts of the memory may be with the node below still, which keeps it.
            request.bufs = IoBufs::new();
            request.complete(Err(Errno::ECANCELED));
        }
    }
}
