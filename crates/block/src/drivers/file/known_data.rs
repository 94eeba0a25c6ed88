//! The data that the last block status has found.
//!
//! lseek(2) looks for the end of data from where it is asked, on tmpfs page by page. A job that asks for one part of a large
//! file after another would make it pass over the rest of the file each time. So the driver remembers where data ends.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use event_loop::IoBufs;
use event_loop::sync::lock;

use crate::status::{self, EXTENT_LEN, Extent, ExtentState};

/// A range of an image that holds data.
///
/// A hole that another program makes stays data here, which reads as zeroes.
#[derive(Debug, Default)]
pub(super) struct KnownData {
    /// The range, and the number of holes when it was asked for.
    range: Mutex<(u64, Range<u64>)>,
    /// Counts requests that make holes, when they begin and when they end. Each makes the range unknown.
    holes: AtomicU64,
}

impl KnownData {
    /// A request makes holes, or has made them. Call this before it, and after its success.
    pub(super) fn makes_holes(&self) {
        self.holes.fetch_add(1, Ordering::AcqRel);
    }

    /// The number of holes at a question, which [`found`](Self::found) takes with the answer.
    pub(super) fn holes(&self) -> u64 {
        self.holes.load(Ordering::Acquire)
    }

    fn range(&self) -> MutexGuard<'_, (u64, Range<u64>)> {
        lock(&self.range)
    }

    /// Answers a block status from what is known. `false`: the range's first byte is not known to be data.
    pub(super) fn answer(&self, offset: u64, len: u64, bufs: &mut IoBufs) -> bool {
        let (holes, known) = self.range().clone();
        let is_known = holes == self.holes() && known.contains(&offset);
        let is_known = is_known && len > 0 && bufs.len() >= EXTENT_LEN;
        if is_known {
            let until = (known.end - offset).min(len);
            status::write_one(bufs, Extent::own(until, ExtentState::Data));
        }
        is_known
    }

    /// Takes an answer of `bytes` bytes. Its last extent may reach beyond the range: it is remembered if it is data, and cut
    /// at the range's end. `holes`: their number at the question.
    pub(super) fn found(&self, holes: u64, asked: Range<u64>, bufs: &mut IoBufs, bytes: usize) {
        status::end_after(bufs, bytes);
        let Some(last) = (bytes / EXTENT_LEN).checked_sub(1) else { return };
        let before = (0..last).map_while(|index| status::extent(bufs, index));
        let start = before.fold(asked.start, |at, extent| at.saturating_add(extent.len));
        let Some(extent) = status::extent(bufs, last) else { return };
        let end = start.saturating_add(extent.len);
        if end > asked.end {
            let len = asked.end.saturating_sub(start);
            status::put(bufs, last, Extent { len, ..extent });
        }
        if extent.state == ExtentState::Data {
            *self.range() = (holes, start..end);
        }
    }
}
