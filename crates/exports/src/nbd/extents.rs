//! Replies to block status requests: a chunk for each metadata context that the client has chosen.

use std::os::fd::RawFd;
use std::sync::Arc;

use block::status::{self, EXTENT_LEN, Extent, ExtentState};
use block::track::DirtyBitmap;
use event_loop::IoBufs;

use super::session::transmission::{Context, Contexts};
use super::state::trace_reply;
use super::wire::reply::{
    Asked, MAX_HEADER, Reply, ReplyMode, allocation, dirty, encode_extent, extent_len,
};

/// Extents of a reply at most, of all contexts together, unless each has only few of them then.
const MAX_EXTENTS: usize = 1024;
/// A context has at least so many.
const LEAST_EXTENTS: usize = 128;
/// Runs of bits that are looked at for a chunk, beside one for each extent: long ones are looked at in parts.
const MORE_RUNS: usize = 16;
/// What an extent costs, in thousandths of a unit of the loop's meter.
const EXTENT_COST: u64 = 100;
/// What a run of a bitmap costs, and 4,096 of its bits that are set: they are looked at.
const RUN_COST: u64 = 200;
const SET_COST: u64 = 40;

fn most(contexts: Contexts, one: bool) -> usize {
    let each = MAX_EXTENTS / contexts.iter().count().max(1);
    if one { 1 } else { each.max(LEAST_EXTENTS) }
}

/// Bytes of the chunks, at most.
pub(super) fn reply_len(contexts: Contexts, one: bool) -> usize {
    contexts.iter().count() * (MAX_HEADER + most(contexts, one) * EXTENT_LEN)
}

/// Bytes of what the node tells, at most.
pub(super) fn told_len(contexts: Contexts, one: bool) -> usize {
    if asks_node(contexts) { most(contexts, one) * EXTENT_LEN } else { 0 }
}

/// Whether the node has to be asked.
pub(super) fn asks_node(contexts: Contexts) -> bool {
    contexts.allocation || contexts.depth
}

/// A reply in the making.
pub(super) struct Chunks<'a> {
    /// The client's descriptor, for trace events.
    pub(super) client: RawFd,
    pub(super) mode: ReplyMode,
    pub(super) asked: Asked,
    /// Bytes of the disk, and of one extent only.
    pub(super) len: u64,
    pub(super) one: bool,
    /// The memory, and where the next byte goes.
    pub(super) memory: &'a mut IoBufs,
    pub(super) at: usize,
    /// What it has cost so far, in thousandths of a unit of the loop's meter.
    pub(super) cost: u64,
}

impl Chunks<'_> {
    /// Puts all chunks. Returns whether there were extents for each. `told`: by the node.
    pub(super) fn put_all(
        &mut self,
        contexts: Contexts,
        bitmaps: &[Arc<DirtyBitmap>],
        told: &IoBufs,
    ) -> bool {
        let of_node = |flags: fn(Extent) -> u32| {
            let extents = (0..).map_while(|index| status::extent(told, index));
            extents.map(move |extent| (extent.len, flags(extent)))
        };
        let left = contexts.iter().count();
        let most = most(contexts, self.one);
        for (context, left) in contexts.iter().zip((0..left).rev()) {
            let id = context.id();
            let is_put = match context {
                Context::Allocation => self.put(id, left == 0, most, of_node(state)),
                Context::Depth => self.put(id, left == 0, most, of_node(|extent| extent.depth)),
                Context::Bitmap(index) => match bitmaps.get(index as usize) {
                    Some(bitmap) => {
                        let runs = runs(bitmap, self.asked.offset, self.len);
                        let runs = runs.take(most + MORE_RUNS);
                        let shift = bitmap.bits().granularity().trailing_zeros() + 12;
                        let mut cost = 0;
                        let runs = runs.inspect(|(bytes, flags)| {
                            let set = if *flags == 0 { 0 } else { bytes >> shift };
                            cost += RUN_COST + SET_COST * set;
                        });
                        let is_put = self.put(id, left == 0, most, runs);
                        self.cost += cost;
                        is_put
                    }
                    None => false,
                },
            };
            if !is_put {
                return false;
            }
        }
        true
    }

    /// Puts a chunk of so many extents at most. Neighbouring extents that are the same become one. `false`: there are no
    /// extents.
    fn put(
        &mut self,
        context: u32,
        is_last: bool,
        most: usize,
        extents: impl Iterator<Item = (u64, u32)>,
    ) -> bool {
        let header =
            |count| Reply::Status { context, count }.encode_chunk(self.mode, self.asked, is_last);
        let first = self.at + header(1).1;
        let len = extent_len(self.mode);
        let mut count = 0;
        let mut last: Option<(u64, u32)> = None;
        for (bytes, flags) in extents {
            self.cost += EXTENT_COST;
            let merged = match last {
                Some((before, same)) if same == flags => before + bytes,
                _ if count == most => break,
                _ => {
                    count += 1;
                    bytes
                }
            };
            last = Some((merged, flags));
            let encoded = encode_extent(self.mode, merged, flags);
            self.memory.copy_in(first + (count - 1) * len, &encoded[..len]);
            if self.mode != ReplyMode::Extended && merged > u64::from(u32::MAX) {
                // It was cut short, so the next one would not be adjacent.
                break;
            }
        }
        let (header, header_len) = header(count as u32);
        self.memory.copy_in(self.at, &header[..header_len]);
        self.at = first + count * len;
        let reply = Reply::Status { context, count: count as u32 };
        trace_reply(self.client, self.mode, self.asked, reply);
        count > 0
    }
}

fn state(extent: Extent) -> u32 {
    match extent.state {
        ExtentState::Data => 0,
        ExtentState::Hole => allocation::HOLE | allocation::ZERO,
        ExtentState::Zeroes => allocation::ZERO,
    }
}

fn runs(bitmap: &DirtyBitmap, offset: u64, len: u64) -> impl Iterator<Item = (u64, u32)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done >= len {
            return None;
        }
        let (is_set, run) = bitmap.bits().run(offset + done, len - done);
        done += run;
        Some((run, if is_set { dirty::DIRTY } else { 0 }))
    })
}
