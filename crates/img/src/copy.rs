//! Copying the contents of images.
//!
//! Block status runs ahead of the reads, so that holes are never read. Reads and writes of many parts are in flight together,
//! and end in any order.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use block::node::{Channel, cluster_size};
use block::request::Op;
use block::status::{self, EXTENT_LEN, Extent, ExtentState};
use block::submit;
use event_loop::{AlignedBuf, EventLoop, IoBufs};
use nix::errno::Errno;

use crate::error::Error;
use crate::images::{Image, Images};

/// Bytes that are read at once, at most. A larger cluster of the target is read at once all the same.
const CHUNK: u64 = 1 << 20;
/// Bytes for which block status is asked at once.
const ASKED: u64 = 1 << 30;
/// Extents of one answer.
const EXTENTS: usize = 256;
/// Alignment of memory, bytes.
const ALIGN: usize = 4096;
/// The least that is tried of what cannot be read as a whole, bytes.
const SECTOR: u64 = 512;

/// How contents are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyOptions {
    /// Copies in flight, 1 or more. Each has 1 MiB of memory.
    pub parallel: usize,
    /// Zeroes in data, of at least that many bytes, become holes. 0: all is written, also holes.
    pub sparse: u64,
    /// The target reads as zeroes: nothing is written there for holes.
    pub target_is_zero: bool,
    /// Only what images of the source's chain above this depth store is copied: 2 is the source itself. The target has, or
    /// shows, what the others have. `None`: all is copied.
    pub above: Option<u32>,
    /// What cannot be read is zeroes, and a warning in the log.
    pub salvage: bool,
}

impl Default for CopyOptions {
    fn default() -> CopyOptions {
        CopyOptions {
            parallel: 8,
            sparse: 4096,
            target_is_zero: false,
            above: None,
            salvage: false,
        }
    }
}

impl CopyOptions {
    /// Whether nothing is to be written for zeroes.
    fn reads_zero(&self) -> bool {
        self.target_is_zero && self.above.is_none()
    }
}

/// A part of the target, and what becomes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    /// Bytes of the target.
    range: Range<u64>,
    /// Where the part is in its source.
    source: (usize, u64),
    is_data: bool,
}

/// What has ended.
enum Ended {
    /// A copy: the memory, and the bytes that are done.
    Copy(Option<IoBufs>, u64),
    /// The answer about a range.
    Status(Vec<Extent>),
}

type Task = Pin<Box<dyn Future<Output = Result<Ended, Error>>>>;

impl Images {
    /// Copies the contents of images, one after the other, to the beginning of another one, and flushes that.
    ///
    /// `progress` receives the number of bytes that are done.
    ///
    /// # Errors
    ///
    /// A read or a write failed. The target has a part of the contents then.
    pub fn copy(
        &self,
        sources: &[Image],
        target: &Image,
        options: &CopyOptions,
        progress: impl FnMut(u64) + 'static,
    ) -> Result<(), Error> {
        let ranges = sources.iter().map(|source| 0..source.size());
        let ranges = ranges.collect::<Vec<_>>();
        self.copy_ranges(sources, &ranges, target, options, progress)
    }

    /// Copies a range of an image to the beginning of another one, and flushes that.
    ///
    /// # Errors
    ///
    /// As of [`copy`](Self::copy).
    pub fn copy_range(
        &self,
        source: &Image,
        range: Range<u64>,
        target: &Image,
        options: &CopyOptions,
        progress: impl FnMut(u64) + 'static,
    ) -> Result<(), Error> {
        self.copy_ranges(std::slice::from_ref(source), &[range], target, options, progress)
    }

    /// Copies a range of each image.
    fn copy_ranges(
        &self,
        sources: &[Image],
        ranges: &[Range<u64>],
        target: &Image,
        options: &CopyOptions,
        progress: impl FnMut(u64) + 'static,
    ) -> Result<(), Error> {
        let open = |image: &Image| self.channel(&image.node);
        let channels = sources.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let unit = cluster_size(&target.node).unwrap_or(0).max(options.sparse).max(512);
        let target_size = target.size();
        let copier = Copier {
            event_loop: self.event_loop.clone(),
            sources: channels.into_iter().zip(ranges.iter().cloned()).collect(),
            overlays: sources.iter().map(is_overlay).collect(),
            target: open(target)?,
            target_size,
            unit: if unit.is_power_of_two() { unit } else { 4096 },
            options: *options,
            parts: VecDeque::new(),
            next: (0, 0),
            done: 0,
        };
        self.block_on(copier.run(progress))?
    }
}

struct Copier {
    event_loop: EventLoop,
    /// The sources, and the range of each.
    sources: Vec<(Rc<dyn Channel>, Range<u64>)>,
    /// Which sources have an image behind.
    overlays: Vec<bool>,
    target: Rc<dyn Channel>,
    target_size: u64,
    /// Data is written in multiples of this, bytes.
    unit: u64,
    options: CopyOptions,
    /// Found and not begun.
    parts: VecDeque<Part>,
    /// What block status is to be asked for next: the source, and the first byte in its range.
    next: (usize, u64),
    /// Bytes of the target before the source that is asked next.
    done: u64,
}

/// Whether an image has another one behind.
fn is_overlay(image: &Image) -> bool {
    image.node.details().is_some_and(|details| details.backing.is_some())
}

impl Copier {
    async fn run(mut self, mut progress: impl FnMut(u64)) -> Result<(), Error> {
        let parallel = self.options.parallel.max(1);
        let chunk = CHUNK.max(self.unit);
        let mut memory = Vec::new();
        for _ in 0..parallel {
            memory.push(self::memory(chunk, "copy")?);
        }
        let mut tasks: Vec<Task> = Vec::new();
        let (mut is_asking, mut finished) = (false, 0);
        let mut failed = None;
        loop {
            while failed.is_none()
                && let Some(bufs) = memory.pop()
            {
                match self.parts.pop_front() {
                    Some(part) => tasks.push(self.begin(part, chunk, bufs)),
                    None => {
                        memory.push(bufs);
                        break;
                    }
                }
            }
            // Ahead of the copies, and not so far ahead that the list grows without bound.
            if failed.is_none() && !is_asking && self.parts.len() < EXTENTS {
                is_asking = self.ask().map(|task| tasks.push(task)).is_some();
            }
            if tasks.is_empty() {
                break;
            }
            match next(&mut tasks).await {
                Ok(Ended::Copy(bufs, bytes)) => {
                    memory.extend(bufs);
                    finished += bytes;
                    progress(finished);
                }
                Ok(Ended::Status(extents)) => {
                    is_asking = false;
                    self.found(extents, chunk);
                }
                // What is in flight ends first.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        drop(self.event_loop);
        match failed {
            Some(error) => Err(error),
            None => flush(&self.target).await,
        }
    }

    /// Asks for the next status. `None`: all is found.
    fn ask(&mut self) -> Option<Task> {
        let (index, at) = self.next;
        let (channel, range) = self.sources.get(index)?;
        let (start, end) = (range.start + at, range.end);
        if start >= end {
            self.next = (index + 1, 0);
            self.done += end - range.start;
            return self.ask();
        }
        let (channel, len) = (channel.clone(), (end - start).min(ASKED));
        let (is_all_data, salvage) = (self.options.sparse == 0, self.options.salvage);
        Some(Box::pin(async move {
            if is_all_data {
                return Ok(Ended::Status(vec![Extent::own(len, ExtentState::Data)]));
            }
            let found = extents(&channel, start..start + len).await;
            let found = found.or_else(|errno| match salvage {
                true => Ok(vec![Extent::own(len, ExtentState::Data)]),
                false => Err(errno),
            });
            let failed = |errno| {
                Error::os(format!("error while reading block status at offset {start}"), errno)
            };
            Ok(Ended::Status(found.map_err(failed)?))
        }))
    }

    /// Turns extents from the next position on into parts.
    fn found(&mut self, extents: Vec<Extent>, chunk: u64) {
        let (index, mut at) = self.next;
        let Some((_, range)) = self.sources.get(index).cloned() else { return };
        let end = range.end - range.start;
        for extent in extents {
            let len = extent.len.min(end - at);
            let (from, to) = (self.done + at, self.done + at + len);
            at += len;
            let is_data = extent.state == ExtentState::Data;
            // What no image of an overlay's chain has, the target's backing file has not, either.
            let is_hidden = self.options.above.is_some_and(|above| match extent.depth {
                0 => self.overlays.get(index) == Some(&true),
                depth => depth >= above,
            });
            let is_skipped = !is_data && self.options.reads_zero();
            if is_hidden || is_skipped || len == 0 {
                self.push(Part { range: from..to, source: (usize::MAX, 0), is_data: false }, chunk);
                continue;
            }
            let source = (index, range.start + (from - self.done));
            self.push(Part { range: from..to, source, is_data }, chunk);
        }
        self.next = (index, at);
    }

    /// Adds a part, in pieces that end at multiples of the unit.
    fn push(&mut self, part: Part, chunk: u64) {
        let Part { range, source, is_data } = part;
        // Clusters are written as wholes: an extent that ends within a unit continues as data.
        if let Some(last) = self.parts.back_mut()
            && source.0 != usize::MAX
            && last.source.0 == source.0
            && last.range.end == range.start
            && !range.start.is_multiple_of(self.unit)
        {
            let end = range.start.next_multiple_of(self.unit).min(range.end);
            if is_data || last.is_data {
                last.is_data = true;
            }
            last.range.end = end;
            if end < range.end {
                let source = (source.0, source.1 + (end - range.start));
                self.push(Part { range: end..range.end, source, is_data }, chunk);
            }
            return;
        }
        let mut start = range.start;
        while start < range.end {
            let end = match is_data {
                true => ((start / chunk + 1) * chunk).min(range.end),
                false => range.end,
            };
            let source = match source.0 {
                usize::MAX => source,
                index => (index, source.1 + (start - range.start)),
            };
            self.parts.push_back(Part { range: start..end, source, is_data });
            start = end;
        }
    }

    fn begin(&self, part: Part, chunk: u64, bufs: IoBufs) -> Task {
        let Part { range, source, is_data } = part;
        let (target, target_size) = (self.target.clone(), self.target_size);
        let source = self.sources.get(source.0).map(|(channel, _)| (channel.clone(), source.1));
        let (unit, options) = (self.unit, self.options);
        Box::pin(async move {
            let len = range.end - range.start;
            match source {
                None => {}
                Some((source, at)) if is_data => {
                    let job = Job { source, target, unit, options, target_size };
                    job.data(range.clone(), at, &bufs, chunk).await?;
                }
                Some(_) => write_zeroes(&target, range, options).await?,
            }
            Ok(Ended::Copy(Some(bufs), len))
        })
    }
}

/// A copy of one part.
struct Job {
    source: Rc<dyn Channel>,
    target: Rc<dyn Channel>,
    unit: u64,
    options: CopyOptions,
    target_size: u64,
}

impl Job {
    /// Copies data, and leaves zeroes out. A part that a neighbour has lengthened may be larger than the memory.
    async fn data(
        &self,
        range: Range<u64>,
        from: u64,
        memory: &IoBufs,
        chunk: u64,
    ) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            let end = (at + chunk).min(range.end);
            self.piece(at..end, from + (at - range.start), memory).await?;
            at = end;
        }
        Ok(())
    }

    async fn piece(&self, range: Range<u64>, from: u64, memory: &IoBufs) -> Result<(), Error> {
        let len = range.end - range.start;
        let bufs = match read(&self.source, from, part(memory, 0, len)).await {
            Err(_) if self.options.salvage => self.salvage(from, memory, len).await,
            read => read?,
        };
        let mut at = range.start;
        while at < range.end {
            let is_zero = |start: u64, end: u64| {
                self.options.sparse > 0 && part(&bufs, start - range.start, end - start).is_zero()
            };
            let unit_end = |at: u64| ((at / self.unit + 1) * self.unit).min(range.end);
            let mut end = unit_end(at);
            let zero = is_zero(at, end);
            while end < range.end && is_zero(end, unit_end(end)) == zero {
                end = unit_end(end);
            }
            match zero {
                true if self.options.reads_zero() => {}
                true => write_zeroes(&self.target, at..end, self.options).await?,
                false => {
                    // A disk's last sectors may lack the end of a unit.
                    let end = end.min(self.target_size.max(at));
                    let bufs = part(&bufs, at - range.start, end - at);
                    let op = Op::Write { fua: false };
                    let (result, _) = submit(&self.target, op, at, end - at, bufs).await;
                    result.map_err(|errno| writing(at, errno))?;
                }
            }
            at = end;
        }
        Ok(())
    }
}

impl Job {
    /// Reads what can be read of a part, down to single sectors. The rest becomes zeroes.
    async fn salvage(&self, from: u64, memory: &IoBufs, len: u64) -> IoBufs {
        // A stack: the first part is the last entry.
        let mut parts = vec![(0, len)];
        while let Some((start, end)) = parts.pop() {
            let Err(error) =
                read(&self.source, from + start, part(memory, start, end - start)).await
            else {
                continue;
            };
            if end - start > SECTOR {
                let middle = start + ((end - start) / 2).next_multiple_of(SECTOR);
                parts.extend([(middle, end), (start, middle)]);
                continue;
            }
            log::warn!("{error}; zeroes take its place");
            part(memory, start, end - start).zero(0, (end - start) as usize);
        }
        part(memory, 0, len)
    }
}

fn writing(at: u64, errno: Errno) -> Error {
    Error::os(format!("error while writing at byte {at}"), errno)
}

/// Has a range of the target read as zeroes. Where it does already, nothing is written.
async fn write_zeroes(
    target: &Rc<dyn Channel>,
    range: Range<u64>,
    options: CopyOptions,
) -> Result<(), Error> {
    let mut at = range.start;
    while at < range.end {
        let found = extents(target, at..range.end).await.map_err(|errno| writing(at, errno))?;
        for extent in found {
            let end = at.saturating_add(extent.len).min(range.end);
            // What an image behind has may change.
            let is_zero = extent.state != ExtentState::Data && extent.depth <= 1;
            if !is_zero || options.above.is_some() || options.sparse == 0 {
                let op = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
                let (result, _) = submit(target, op, at, end - at, IoBufs::new()).await;
                result.map_err(|errno| writing(at, errno))?;
            }
            at = end;
        }
    }
    Ok(())
}

pub(crate) async fn flush(target: &Rc<dyn Channel>) -> Result<(), Error> {
    let (result, _) = submit(target, Op::Flush, 0, 0, IoBufs::new()).await;
    result.map_err(|errno| Error::os("error while flushing the target", errno))
}

/// Memory for a read.
pub(crate) fn memory(len: u64, doing: &str) -> Result<IoBufs, Error> {
    let bufs = AlignedBuf::io_bufs(len as usize, ALIGN);
    bufs.ok_or_else(|| Error::os(format!("no memory to {doing} with"), Errno::ENOMEM))
}

/// Fills memory from byte `at` of a disk on.
pub(crate) async fn fill(
    channel: &Rc<dyn Channel>,
    at: u64,
    bufs: IoBufs,
) -> Result<IoBufs, Errno> {
    let len = bufs.len() as u64;
    let (result, bufs) = submit(channel, Op::Read, at, len, bufs).await;
    result.map(|()| bufs)
}

/// The same, with an error that names the place.
pub(crate) async fn read(
    channel: &Rc<dyn Channel>,
    at: u64,
    bufs: IoBufs,
) -> Result<IoBufs, Error> {
    fill(channel, at, bufs).await.map_err(|errno| reading(at, errno))
}

/// The error of a read at a byte.
pub(crate) fn reading(at: u64, errno: Errno) -> Error {
    Error::os(format!("error while reading at byte {at}"), errno)
}

/// A part of memory.
pub(crate) fn part(of: &IoBufs, at: u64, len: u64) -> IoBufs {
    let mut part = IoBufs::new();
    part.set_part(of, at as usize, len as usize, usize::MAX);
    part
}

/// The extents of a range, as many as one answer has.
pub(crate) async fn extents(
    channel: &Rc<dyn Channel>,
    range: Range<u64>,
) -> Result<Vec<Extent>, Errno> {
    let len = range.end - range.start;
    let bufs = AlignedBuf::io_bufs(EXTENTS * EXTENT_LEN, ALIGN).ok_or(Errno::ENOMEM)?;
    let (result, bufs) = submit(channel, Op::BlockStatus, range.start, len, bufs).await;
    result?;
    let mut left = len;
    let mut found: Vec<Extent> = Vec::new();
    for extent in (0..EXTENTS).map_while(|index| status::extent(&bufs, index)) {
        let len = extent.len.min(left);
        left -= len;
        if len > 0 {
            found.push(Extent { len, ..extent });
        }
    }
    match found.is_empty() {
        true => Ok(vec![Extent::own(len, ExtentState::Data)]),
        false => Ok(found),
    }
}

/// Waits for one of the tasks; there is one.
async fn next(tasks: &mut Vec<Task>) -> Result<Ended, Error> {
    poll_fn(|cx| {
        for index in 0..tasks.len() {
            let Some(task) = tasks.get_mut(index) else { break };
            if let Poll::Ready(ended) = task.as_mut().poll(cx) {
                drop(tasks.swap_remove(index));
                return Poll::Ready(ended);
            }
        }
        Poll::Pending
    })
    .await
}
