//! Comparing the contents of images.

use std::ops::Range;
use std::rc::Rc;

use block::node::Channel;
use block::status::{Extent, ExtentState};
use event_loop::IoBufs;
use nix::errno::Errno;

use crate::copy::{self, extents, fill, part};
use crate::error::Error;
use crate::images::{Image, Images};

/// Bytes that are compared at once.
const CHUNK: u64 = 1 << 20;
/// Differences are told by the sector, bytes.
const SECTOR: usize = 512;

/// What a comparison has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compared {
    /// The contents are the same. `is_longer`: one image is longer, and its rest reads as zeroes.
    Same {
        /// The sizes differ.
        is_longer: bool,
    },
    /// The contents differ in the sector at this byte.
    Differ(u64),
    /// From this byte on, one image stores something and the other one nothing. Of a strict comparison only.
    StoredOtherwise(u64),
}

/// Why contents were not compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable(pub Error);

impl Images {
    /// Compares the contents of two images. Holes are not read.
    ///
    /// `is_strict`: also whether the same parts are stored.
    ///
    /// `progress` receives the number of bytes that are the same.
    ///
    /// # Errors
    ///
    /// An image cannot be read.
    pub fn compare(
        &self,
        one: &Image,
        other: &Image,
        is_strict: bool,
        progress: impl FnMut(u64) + 'static,
    ) -> Result<Compared, Unreadable> {
        let open = |image: &Image| self.channel(&image.node).map_err(Unreadable);
        let sides = [(open(one)?, one.size()), (open(other)?, other.size())];
        self.block_on(compare(sides, is_strict, progress)).map_err(Unreadable)?
    }
}

type Sides = [(Rc<dyn Channel>, u64); 2];

async fn compare(
    sides: Sides,
    is_strict: bool,
    mut progress: impl FnMut(u64),
) -> Result<Compared, Unreadable> {
    let [(one, one_size), (other, other_size)] = &sides;
    let both = *one_size.min(other_size);
    let mut at = 0;
    let (mut in_one, mut in_other) = (Known::default(), Known::default());
    while at < both {
        let first = in_one.at(one, at..*one_size).await?;
        let second = in_other.at(other, at..*other_size).await?;
        let end = first.end.min(second.end).min(both);
        let how = |found: &Found| (found.is_zero, found.is_stored);
        if is_strict && how(&first) != how(&second) {
            return Ok(Compared::StoredOtherwise(at));
        }
        let different = match (first.is_zero, second.is_zero) {
            (true, true) => None,
            (true, false) => nonzero(other, at..end).await?,
            (false, true) => nonzero(one, at..end).await?,
            (false, false) => difference(one, other, at..end).await?,
        };
        if let Some(at) = different {
            return Ok(Compared::Differ(at));
        }
        at = end;
        progress(at);
    }
    let (longer, size) = if one_size > other_size { &sides[0] } else { &sides[1] };
    let mut known = Known::default();
    while at < *size {
        let found = known.at(longer, at..*size).await?;
        if !found.is_zero
            && let Some(at) = nonzero(longer, at..found.end).await?
        {
            return Ok(Compared::Differ(at));
        }
        at = found.end;
        progress(at);
    }
    Ok(Compared::Same { is_longer: one_size != other_size })
}

/// The extents of a disk from one byte on.
#[derive(Default)]
struct Known {
    extents: std::collections::VecDeque<Extent>,
    at: u64,
}

/// What is known from a byte on.
struct Found {
    end: u64,
    is_zero: bool,
    /// An image of the chain has it.
    is_stored: bool,
}

impl Known {
    /// What is stored from the beginning of a range on.
    async fn at(
        &mut self,
        channel: &Rc<dyn Channel>,
        range: Range<u64>,
    ) -> Result<Found, Unreadable> {
        loop {
            match self.extents.front() {
                Some(extent) if self.at + extent.len > range.start => {
                    let is_zero = extent.state != ExtentState::Data;
                    let (end, is_stored) = (self.at + extent.len, extent.depth != 0);
                    return Ok(Found { end, is_zero, is_stored });
                }
                Some(extent) => {
                    self.at += extent.len;
                    self.extents.pop_front();
                }
                None => {
                    self.at = range.start;
                    self.extents = extents(channel, range.clone())
                        .await
                        .map_err(|errno| unreadable(range.start, errno))?
                        .into();
                }
            }
        }
    }
}

fn unreadable(at: u64, errno: Errno) -> Unreadable {
    Unreadable(Error::os(format!("Error while reading offset {at}"), errno))
}

async fn read(channel: &Rc<dyn Channel>, at: u64, bufs: IoBufs) -> Result<IoBufs, Unreadable> {
    fill(channel, at, bufs).await.map_err(|errno| unreadable(at, errno))
}

fn memory(len: u64) -> Result<IoBufs, Unreadable> {
    copy::memory(len, "compare").map_err(Unreadable)
}

/// The first sector of a range that has other bytes than zeroes.
async fn nonzero(channel: &Rc<dyn Channel>, range: Range<u64>) -> Result<Option<u64>, Unreadable> {
    let memory = memory(CHUNK.min(range.end - range.start))?;
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(CHUNK);
        let bufs = read(channel, at, part(&memory, 0, len)).await?;
        if !bufs.is_zero() {
            let mut sectors = (0..len).step_by(SECTOR);
            let is_data =
                |start: &u64| !part(&bufs, *start, (len - start).min(SECTOR as u64)).is_zero();
            return Ok(sectors.find(is_data).map(|start| at + start));
        }
        at += len;
    }
    Ok(None)
}

/// The first sector of a range in which two disks differ.
async fn difference(
    one: &Rc<dyn Channel>,
    other: &Rc<dyn Channel>,
    range: Range<u64>,
) -> Result<Option<u64>, Unreadable> {
    let most = CHUNK.min(range.end - range.start);
    let (first, second) = (memory(most)?, memory(most)?);
    let (mut left, mut right) = (vec![0; most as usize], vec![0; most as usize]);
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(CHUNK);
        // Both are in flight together.
        let (first, second) =
            both(read(one, at, part(&first, 0, len)), read(other, at, part(&second, 0, len))).await;
        let (left, right) = (&mut left[..len as usize], &mut right[..len as usize]);
        first?.copy_out(0, left);
        second?.copy_out(0, right);
        if left != right {
            let mut pairs = left.chunks(SECTOR).zip(right.chunks(SECTOR));
            let differs = pairs.position(|(left, right)| left != right);
            return Ok(differs.map(|index| at + (index * SECTOR) as u64));
        }
        at += len;
    }
    Ok(None)
}

/// Waits for both futures.
async fn both<A, B>(one: impl Future<Output = A>, other: impl Future<Output = B>) -> (A, B) {
    let (mut one, mut other) = (std::pin::pin!(one), std::pin::pin!(other));
    let (mut first, mut second) = (None, None);
    std::future::poll_fn(|cx| {
        use std::task::Poll;
        if first.is_none()
            && let Poll::Ready(value) = one.as_mut().poll(cx)
        {
            first = Some(value);
        }
        if second.is_none()
            && let Poll::Ready(value) = other.as_mut().poll(cx)
        {
            second = Some(value);
        }
        match (first.take(), second.take()) {
            (Some(one), Some(other)) => Poll::Ready((one, other)),
            (one, other) => {
                (first, second) = (one, other);
                Poll::Pending
            }
        }
    })
    .await
}
