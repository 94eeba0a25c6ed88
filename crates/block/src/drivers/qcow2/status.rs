//! Block status: what of a range has data, and where it reads as zeroes.

use std::ops::Range;

use event_loop::{AlignedBuf, IoBufs};
use nix::errno::Errno;

use super::access::Place;
use super::context::{Channels, Transfer};
use super::image::Image;
use crate::node::StoredAt;
use crate::request::Op;
use crate::status::{self, EXTENT_LEN, Extent, ExtentState};

/// Parts of a disk in one answer.
const MOST_PLACES: usize = 1024;

/// An answer that is put together.
struct Answer<'a> {
    bufs: &'a mut IoBufs,
    extents: usize,
    last: Option<Extent>,
}

impl Answer<'_> {
    /// Appends an extent. `false`: there is no room for it.
    fn push(&mut self, len: u64, state: ExtentState, depth: u32) -> bool {
        if let Some(last) = &mut self.last
            && (last.state, last.depth) == (state, depth)
        {
            last.len += len;
            status::put(self.bufs, self.extents - 1, *last);
            return true;
        }
        let extent = Extent { len, state, depth };
        if !status::put(self.bufs, self.extents, extent) {
            return false;
        }
        self.extents += 1;
        self.last = Some(extent);
        true
    }
}

impl Image {
    /// Answers for the range, as far as there is room. Who calls it keeps the mapping in place.
    pub(super) async fn status(
        &self,
        channels: &Channels,
        range: Range<u64>,
        bufs: &mut IoBufs,
    ) -> Result<(), Errno> {
        let mut answer = Answer { bufs, extents: 0, last: None };
        let mut at = range.start;
        while at < range.end {
            let (place, found) = self.find(channels, at..range.end).await?;
            let state = match place {
                Place::Data { at: host, .. } if self.is_raw => {
                    if !status_of_data(channels, host..host + found, &mut answer).await? {
                        break;
                    }
                    at += found;
                    continue;
                }
                Place::Data { .. } | Place::Compressed => ExtentState::Data,
                Place::Zeroes => ExtentState::Hole,
                Place::Nowhere => {
                    if !self.status_behind(channels, at..at + found, &mut answer).await? {
                        break;
                    }
                    at += found;
                    continue;
                }
            };
            if !answer.push(found, state, 1) {
                break;
            }
            at += found;
        }
        let Answer { bufs, extents, .. } = answer;
        status::end_after(bufs, extents * EXTENT_LEN);
        Ok(())
    }

    /// Tells where the range is. Who calls it keeps the mapping in place.
    pub(super) async fn places(
        &self,
        channels: &Channels,
        range: Range<u64>,
    ) -> Result<Vec<(u64, StoredAt)>, Errno> {
        let mut found = Vec::new();
        let mut at = range.start;
        while at < range.end && found.len() < MOST_PLACES {
            channels.meter.turn().await;
            channels.meter.charge(1);
            let (place, len) = self.find(channels, at..range.end).await?;
            let place = match place {
                Place::Data { at: host, .. } => {
                    StoredAt::Data((!channels.is_encrypted).then_some(host))
                }
                Place::Compressed => StoredAt::Compressed,
                Place::Zeroes => StoredAt::Zeroes,
                Place::Nowhere => StoredAt::Behind,
            };
            found.push((len, place));
            at += len;
        }
        Ok(found)
    }

    /// Asks the image behind. `false`: there was not room for all of it.
    async fn status_behind(
        &self,
        channels: &Channels,
        range: Range<u64>,
        answer: &mut Answer<'_>,
    ) -> Result<bool, Errno> {
        let Range { mut start, end } = range;
        if let Some((backing, size)) = &channels.backing {
            let there = end.min(*size);
            while start < there {
                let len = there - start;
                let room = AlignedBuf::io_bufs(answer.bufs.len(), 16).ok_or(Errno::ENOMEM)?;
                channels.meter.turn().await;
                channels.meter.charge(1);
                let asked = Transfer::start(backing, Op::BlockStatus, start, len, room);
                let (result, told) = asked.await;
                result?;
                let before = start;
                let mut index = 0;
                while let Some(Extent { len, state, depth }) = status::extent(&told, index) {
                    let len = len.min(there - start);
                    let depth = if depth == 0 { 0 } else { depth.saturating_add(1) };
                    if len > 0 && !answer.push(len, state, depth) {
                        return Ok(false);
                    }
                    start += len;
                    index += 1;
                }
                if start == before {
                    return Err(Errno::EIO);
                }
            }
        }
        // Beyond its end, the image behind hides what lies behind it.
        let depth = if channels.backing.is_some() { 2 } else { 0 };
        Ok(start >= end || answer.push(end - start, ExtentState::Hole, depth))
    }
}

/// Asks the data file, which may have holes. `false`: there was not room for all of it.
async fn status_of_data(
    channels: &Channels,
    range: Range<u64>,
    answer: &mut Answer<'_>,
) -> Result<bool, Errno> {
    let Range { mut start, end } = range;
    while start < end {
        let len = end - start;
        let room = AlignedBuf::io_bufs(answer.bufs.len(), 16).ok_or(Errno::ENOMEM)?;
        channels.meter.turn().await;
        channels.meter.charge(1);
        let (result, told) =
            Transfer::start(channels.data(), Op::BlockStatus, start, len, room).await;
        result?;
        let before = start;
        let mut index = 0;
        while let Some(Extent { len, state, .. }) = status::extent(&told, index) {
            let len = len.min(end - start);
            let state = match state {
                ExtentState::Data => ExtentState::Data,
                // It is mapped all the same.
                ExtentState::Hole | ExtentState::Zeroes => ExtentState::Zeroes,
            };
            if len > 0 && !answer.push(len, state, 1) {
                return Ok(false);
            }
            start += len;
            index += 1;
        }
        if start == before {
            return Err(Errno::EIO);
        }
    }
    Ok(true)
}
