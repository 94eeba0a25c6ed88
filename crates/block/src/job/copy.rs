//! Copying a range from one node to another.

use std::ops::Range;
use std::rc::Rc;

use event_loop::{AlignedBuf, IoBufs};
use nix::errno::Errno;

use super::bitmap::Bitmap;
use super::snapshot::Clusters;
use crate::node::Channel;
use crate::request::Op;
use crate::status::{self, EXTENT_LEN, Extent, ExtentState};
use crate::submit::submit;

/// The node of a job's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// A read from the source.
    Source,
    /// A write to the target.
    Target,
}

/// A failed request of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The side that failed.
    pub side: Side,
    /// The error.
    pub errno: Errno,
}

fn at(side: Side) -> impl Fn(Errno) -> Failure {
    move |errno| Failure { side, errno }
}

pub(super) fn at_target(errno: Errno) -> Failure {
    Failure { side: Side::Target, errno }
}

/// Memory to copy up to `len` bytes at once.
pub(super) struct Buffer {
    data: IoBufs,
    extents: IoBufs,
    len: u64,
    /// Bytes that count for the job's speed, of the copy for which the memory is used.
    pub(super) counted: u64,
    /// Whether zeroes count.
    pub(super) counts_zeroes: bool,
}

/// Extents per request for the block status.
const EXTENTS: usize = 64;

impl Buffer {
    /// `None`: out of memory.
    pub(super) fn new(len: u64) -> Option<Buffer> {
        let data = AlignedBuf::io_bufs(usize::try_from(len).ok()?, 4096)?;
        let extents = AlignedBuf::io_bufs(EXTENTS * EXTENT_LEN, 4096)?;
        Some(Buffer { data, extents, len, counted: 0, counts_zeroes: true })
    }

    fn count_zeroes(&mut self, len: u64) {
        self.counted += if self.counts_zeroes { len } else { 0 };
    }

    fn part(&self, len: u64) -> IoBufs {
        let mut part = IoBufs::new();
        part.set_part(&self.data, 0, len as usize, 1);
        part
    }

    /// The extents of a range; all data if the node cannot tell.
    async fn status(&mut self, channel: &Rc<dyn Channel>, range: &Range<u64>) -> Vec<Extent> {
        let len = range.end - range.start;
        let bufs = std::mem::take(&mut self.extents);
        let (result, bufs) = submit(channel, Op::BlockStatus, range.start, len, bufs).await;
        let found = match result {
            Ok(()) => (0..EXTENTS).map_while(|n| status::extent(&bufs, n)).collect(),
            Err(_) => Vec::new(),
        };
        self.extents = bufs;
        match found.is_empty() {
            true => vec![Extent::own(len, ExtentState::Data)],
            false => found,
        }
    }
}

/// Copies a range. Holes of the source become zeroes in the target, unless it reads as zeroes already. Data is written
/// in multiples of `unit` bytes, except at the range's end. The range starts at such a multiple.
///
/// Parts that are set in `zero` read as zeroes in the target, whatever its block status says. Those that get data are cleared.
pub(super) async fn copy(
    source: &Rc<dyn Channel>,
    target: &Rc<dyn Channel>,
    range: Range<u64>,
    buffer: &mut Buffer,
    unit: u64,
    zero: Option<&Bitmap>,
) -> Result<(), Failure> {
    if buffer.len < unit {
        let larger = Buffer::new(unit).ok_or(at_target(Errno::ENOMEM))?;
        let Buffer { counted, counts_zeroes, .. } = *buffer;
        *buffer = Buffer { counted, counts_zeroes, ..larger };
    }
    let mut at = range.start;
    while at < range.end {
        for extent in buffer.status(source, &(at..range.end)).await {
            let mut end = at.saturating_add(extent.len).min(range.end);
            let mut state = extent.state;
            if !end.is_multiple_of(unit) && end < range.end {
                // The unit's rest may be of another kind.
                end -= end % unit;
                if end <= at || state == ExtentState::Data {
                    (end, state) = ((end + unit).min(range.end), ExtentState::Data);
                }
            }
            let is_cut = end != at.saturating_add(extent.len);
            let parts = zero.map(|zero| (zero, zero.parts(at, end - at)));
            match state {
                ExtentState::Data => {
                    if let Some((zero, parts)) = parts {
                        zero.clear(parts);
                    }
                    copy_data(source, target, at..end, buffer).await?;
                }
                ExtentState::Hole | ExtentState::Zeroes => {
                    let is_zero =
                        parts.is_some_and(|(zero, mut parts)| parts.all(|part| zero.is_set(part)));
                    if !is_zero {
                        write_zeroes(target, at..end, buffer).await?;
                    }
                }
            }
            at = end;
            if is_cut {
                break;
            }
        }
    }
    Ok(())
}

/// Copies what a node shows of a range from its backing images, down to the given depth, into the node
/// itself. The range must not be written meanwhile. Data below that depth stays where it is.
pub(super) async fn populate(
    node: &Rc<dyn Channel>,
    range: Range<u64>,
    depth: u32,
    buffer: &mut Buffer,
) -> Result<(), Failure> {
    let mut at = range.start;
    while at < range.end {
        for extent in buffer.status(node, &(at..range.end)).await {
            let end = at.saturating_add(extent.len).min(range.end);
            match extent.state {
                _ if !(2..depth).contains(&extent.depth) => {}
                ExtentState::Data => copy_data(node, node, at..end, buffer).await?,
                ExtentState::Hole | ExtentState::Zeroes => {
                    // The range may read as zeroes only because nothing is behind it; it has to stay so.
                    buffer.count_zeroes(end - at);
                    let op = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
                    let (result, _) = submit(node, op, at, end - at, IoBufs::new()).await;
                    result.map_err(at_target)?;
                }
            }
            at = end;
        }
    }
    Ok(())
}

/// Marks the parts of a range that are stored in images above the given depth.
pub(super) async fn mark(
    node: &Rc<dyn Channel>,
    range: Range<u64>,
    depth: u32,
    marks: &Bitmap,
    buffer: &mut Buffer,
) -> u64 {
    let mut at = range.start;
    for extent in buffer.status(node, &range).await {
        let end = at.saturating_add(extent.len).min(range.end);
        if (1..depth).contains(&extent.depth) {
            marks.set(at, end - at);
        }
        at = end;
    }
    at
}

/// Copies the parts of a range that are stored in images above the given depth.
pub(super) async fn copy_above(
    source: &Rc<dyn Channel>,
    target: &Rc<dyn Channel>,
    range: Range<u64>,
    depth: u32,
    buffer: &mut Buffer,
) -> Result<(), Failure> {
    let mut from = range.start;
    while from < range.end {
        for extent in buffer.status(source, &(from..range.end)).await {
            let end = from.saturating_add(extent.len).min(range.end);
            match extent.state {
                _ if !(1..depth).contains(&extent.depth) => {}
                ExtentState::Data => copy_data(source, target, from..end, buffer).await?,
                ExtentState::Hole | ExtentState::Zeroes => {
                    write_zeroes(target, from..end, buffer).await?;
                }
            }
            from = end;
        }
    }
    Ok(())
}

/// Copies the clusters of a range that the source's topmost image stores at least in part.
pub(super) async fn copy_top(
    source: &Rc<dyn Channel>,
    target: &Rc<dyn Channel>,
    range: Range<u64>,
    buffer: &mut Buffer,
    Clusters { len, unit }: Clusters,
) -> Result<(), Failure> {
    let (mut at, mut done) = (range.start, range.start);
    while at < range.end {
        for extent in buffer.status(source, &(at..range.end)).await {
            let end = at.saturating_add(extent.len).min(range.end);
            let from = (at - at % len).max(done);
            let to = end.next_multiple_of(len).min(range.end);
            if extent.depth == 1 && from < to {
                let counted = buffer.counted + (to - from);
                copy(source, target, from..to, buffer, unit, None).await?;
                (buffer.counted, done) = (counted, to);
            }
            at = end;
        }
    }
    Ok(())
}

/// Discards a range of the source, whose data the target has.
pub(super) async fn discard(source: &Rc<dyn Channel>, range: Range<u64>) {
    let len = range.end - range.start;
    // The data stays if it cannot be discarded.
    let _ = submit(source, Op::Discard, range.start, len, IoBufs::new()).await;
}

/// Discards what the source's topmost image stores of a range. A discard elsewhere would hide the images behind.
pub(super) async fn discard_top(source: &Rc<dyn Channel>, range: Range<u64>, buffer: &mut Buffer) {
    let mut at = range.start;
    while at < range.end {
        for extent in buffer.status(source, &(at..range.end)).await {
            let end = at.saturating_add(extent.len).min(range.end);
            if extent.depth == 1 {
                discard(source, at..end).await;
            }
            at = end;
        }
    }
}

async fn copy_data(
    source: &Rc<dyn Channel>,
    target: &Rc<dyn Channel>,
    range: Range<u64>,
    buffer: &mut Buffer,
) -> Result<(), Failure> {
    buffer.counted += range.end - range.start;
    let mut offset = range.start;
    while offset < range.end {
        let len = (range.end - offset).min(buffer.len);
        let (read, bufs) = submit(source, Op::Read, offset, len, buffer.part(len)).await;
        read.map_err(at(Side::Source))?;
        let write = Op::Write { fua: false };
        let (written, _) = submit(target, write, offset, len, bufs).await;
        written.map_err(at(Side::Target))?;
        offset += len;
    }
    Ok(())
}

async fn write_zeroes(
    target: &Rc<dyn Channel>,
    range: Range<u64>,
    buffer: &mut Buffer,
) -> Result<(), Failure> {
    let mut offset = range.start;
    while offset < range.end {
        for extent in buffer.status(target, &(offset..range.end)).await {
            let end = offset.saturating_add(extent.len).min(range.end);
            // Zeroes of an image behind the target may become data: that image may be the source.
            if extent.state == ExtentState::Data || extent.depth != 1 {
                buffer.count_zeroes(end - offset);
                let op = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
                let (result, _) = submit(target, op, offset, end - offset, IoBufs::new()).await;
                result.map_err(at(Side::Target))?;
            }
            offset = end;
        }
    }
    Ok(())
}

/// Flushes the target, so that the copied data is durable before the job reports its end.
pub(super) async fn flush(target: &Rc<dyn Channel>) -> Result<(), Failure> {
    let (result, _) = submit(target, Op::Flush, 0, 0, IoBufs::new()).await;
    result.map_err(at(Side::Target))
}
