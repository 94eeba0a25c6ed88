//! Write-zeroes and discards: what becomes of clusters that are not wanted any more.

use std::ops::Range;

use event_loop::{AlignedBuf, IoBufs};
use nix::errno::Errno;

use super::access::Place;
use super::context::{Channels, Transfer};
use super::engine::Zeroing;
use super::image::Image;
use crate::request::Op;

/// Bytes of zeroes written at once where nothing better is there.
const ZEROES: u64 = 1 << 20;

/// How whole clusters cease to have data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Discarding {
    /// Their place is free for others. Else they keep it.
    pub(super) unref: bool,
    /// The node below gets a discard of what they had.
    pub(super) pass: bool,
}

/// Bytes of the disk that are to be punched, at their place in the data's file, once they read as zeroes.
pub(super) struct Punch {
    range: Range<u64>,
    /// The place of the first one.
    host: u64,
}

impl Image {
    /// Has the range read as zeroes.
    pub(super) async fn write_zeroes(
        &self,
        channels: &Channels,
        range: Range<u64>,
        discarding: Option<Discarding>,
        no_fallback: bool,
    ) -> Result<(), Errno> {
        let _change = self.claim(range.clone(), true).await;
        if self.is_raw {
            return self.zero_raw(channels, range, discarding.is_some(), no_fallback).await;
        }
        let units = self.whole(&range, self.unit);
        let slow = self.version < 3 || units != range;
        if no_fallback && slow {
            return Err(Errno::EOPNOTSUPP);
        }
        if self.version < 3 || units.is_empty() {
            return self.write_zeroes_slowly(channels, range).await;
        }
        self.write_zeroes_slowly(channels, range.start..units.start).await?;
        let clusters = self.whole(&units, self.cluster);
        let before = units.start..clusters.start.min(units.end);
        let after = clusters.end.max(before.end)..units.end;
        self.zero_part(channels, before, no_fallback).await?;
        let discarding = discarding.unwrap_or(Discarding { unref: false, pass: false });
        self.drop_data(channels, clusters, discarding).await?;
        self.zero_part(channels, after, no_fallback).await?;
        self.write_zeroes_slowly(channels, units.end..range.end).await
    }

    /// Has units of one cluster read as zeroes. Never all of the cluster.
    pub(super) async fn zero_part(
        &self,
        channels: &Channels,
        range: Range<u64>,
        no_fallback: bool,
    ) -> Result<(), Errno> {
        if range.is_empty() {
            return Ok(());
        }
        let (place, found) = self.find_to_change(channels, range.clone()).await?;
        let is_zero = match place {
            Place::Zeroes => true,
            Place::Nowhere => !self.has_backing,
            Place::Data { .. } | Place::Compressed => false,
        };
        if is_zero && found == range.end - range.start {
            return Ok(());
        }
        self.limit(channels).await?;
        self.make_table(channels, range.start).await?;
        match self.engine(channels, |engine| engine.zero_part(range.clone())).await? {
            true => Ok(()),
            false if no_fallback => Err(Errno::EOPNOTSUPP),
            false => self.write_zeroes_slowly(channels, range).await,
        }
    }

    /// Gives clusters back. What lies in others stays as it is.
    pub(super) async fn discard(
        &self,
        channels: &Channels,
        range: Range<u64>,
        discarding: Discarding,
    ) -> Result<(), Errno> {
        if self.version < 3 && (self.has_backing || !discarding.unref) {
            // There are no zeroes: what lies behind would show, and no cluster without data has a place.
            return Ok(());
        }
        let _change = self.claim(range.clone(), true).await;
        if self.is_raw {
            return self.discard_raw(channels, range, discarding).await;
        }
        let whole = self.whole(&range, self.cluster);
        self.drop_data(channels, whole, discarding).await
    }

    /// Those clusters, or units, that lie in the range, all of each; the last one of the disk ends with it.
    fn whole(&self, range: &Range<u64>, len: u64) -> Range<u64> {
        let start = range.start.next_multiple_of(len);
        let end = match range.end {
            end if end == self.size() => end,
            end => end - end % len,
        };
        start..end.max(start)
    }

    /// Has whole clusters read as zeroes.
    pub(super) async fn drop_data(
        &self,
        channels: &Channels,
        range: Range<u64>,
        discarding: Discarding,
    ) -> Result<(), Errno> {
        // Where the disk ends within a cluster, what that has past the end goes too: data from before the disk shrank.
        let limit = range.end.next_multiple_of(self.cluster);
        let wanted = |at: u64, found: u64| found.min(range.end.saturating_sub(at));
        let mut at = range.start;
        while at < range.end {
            let (place, found) = self.find_to_change(channels, at..limit).await?;
            let end = at + found;
            let has_nothing = match place {
                // It reads as zeroes, and has nothing to give back.
                Place::Nowhere => !self.has_backing,
                Place::Zeroes => !discarding.unref,
                Place::Data { .. } | Place::Compressed => false,
            };
            // Its last cluster may have something behind.
            let whole = end - end % self.cluster;
            if has_nothing && whole > at {
                at = whole;
                continue;
            }
            let mut punches = Vec::new();
            let part = at..at + wanted(at, found);
            self.pass_discard(channels, place, part, discarding, &mut punches).await?;
            let last = end.next_multiple_of(self.cluster);
            let mut end = end;
            while end < last {
                let (place, found) = self.find_to_change(channels, end..last).await?;
                let part = end..end + wanted(end, found);
                self.pass_discard(channels, place, part, discarding, &mut punches).await?;
                end += found;
            }
            self.change_to_zeroes(channels, at..end, discarding.unref, &punches).await?;
            at = end;
        }
        Ok(())
    }

    /// The node below may give back what is discarded: now, or in an encrypted image later. A hole decrypts to noise, so the
    /// image must not lead to it after a kill.
    async fn pass_discard(
        &self,
        channels: &Channels,
        place: Place,
        range: Range<u64>,
        discarding: Discarding,
        later: &mut Vec<Punch>,
    ) -> Result<(), Errno> {
        if let (Place::Data { at: host, own: true }, true) =
            (place, discarding.pass && !range.is_empty())
        {
            if channels.is_encrypted {
                later.push(Punch { range, host });
                return Ok(());
            }
            self.engine(channels, |engine| engine.check_tables()).await?;
            self.punch(channels, host, range.end - range.start).await;
        }
        Ok(())
    }

    /// Punches what lies in `range`, which reads as zeroes by now, if a kill does not undo that. The places are ours as long
    /// as the caller has the ticket of a write that began with the change.
    async fn punch_changed(&self, channels: &Channels, range: Range<u64>, punches: &[Punch]) {
        if !self.commit_to_journal(channels).await {
            return;
        }
        for punch in punches {
            let start = punch.range.start.max(range.start);
            let end = punch.range.end.min(range.end);
            if start < end {
                let host = punch.host + start - punch.range.start;
                self.punch(channels, host, end - start).await;
            }
        }
    }

    /// The node below may give back what lies there, as long as it is ours: afterwards it may be used
    /// for something else at once.
    pub(super) async fn punch(&self, channels: &Channels, host: u64, len: u64) {
        let ticket = self.shared.begin_write();
        let (to, bufs) = (channels.data(), IoBufs::new());
        let punched = Transfer::start_write(to, Op::Discard, host, len, bufs, ticket).await;
        // If it cannot, it keeps it.
        drop(punched);
    }

    /// Has clusters read as zeroes, then punches places of theirs. `unref`: what they have is given up.
    pub(super) async fn change_to_zeroes(
        &self,
        channels: &Channels,
        range: Range<u64>,
        unref: bool,
        punches: &[Punch],
    ) -> Result<(), Errno> {
        let zeroing = match (unref, self.version) {
            (false, _) => Zeroing::Keep,
            (true, 3..) => Zeroing::Free,
            // There is nothing behind the image that could show.
            (true, _) => Zeroing::Uncover,
        };
        let mut at = range.start / self.cluster;
        let end = self.end(range.end) / self.cluster;
        while at < end {
            self.limit(channels).await?;
            if zeroing != Zeroing::Uncover {
                self.make_table(channels, at * self.cluster).await?;
            }
            let mut ticket = None;
            let changed = self.engine(channels, |engine| {
                let changed = engine.zero(at, end - at, zeroing)?;
                // With the engine: no write-out frees what was given up here before the ticket is returned. Not before: other
                // tasks may wait for the writes that are under way while this one waits for room.
                ticket = (!punches.is_empty()).then(|| self.shared.begin_write());
                Ok(changed)
            });
            let next = at + changed.await?;
            if ticket.is_some() {
                let range = at * self.cluster..next * self.cluster;
                self.punch_changed(channels, range, punches).await;
            }
            at = next;
        }
        Ok(())
    }

    /// Has the data read as zeroes that a range within one cluster has, whether that is in the disk or past its end.
    pub(super) async fn clear_data(
        &self,
        channels: &Channels,
        range: Range<u64>,
    ) -> Result<(), Errno> {
        let Range { start: mut at, end } = range;
        while at < end {
            let (place, found) = self.find_to_change(channels, at..end).await?;
            match place {
                Place::Nowhere | Place::Zeroes => {}
                Place::Data { .. } | Place::Compressed => {
                    self.write_zeroes_slowly(channels, at..at + found).await?;
                }
            }
            at += found;
        }
        Ok(())
    }

    pub(super) async fn write_zeroes_slowly(
        &self,
        channels: &Channels,
        range: Range<u64>,
    ) -> Result<(), Errno> {
        let Range { mut start, end } = range;
        if start >= end {
            return Ok(());
        }
        let zeroes = AlignedBuf::io_bufs((end - start).min(ZEROES) as usize, 4096);
        let zeroes = zeroes.ok_or(Errno::ENOMEM)?;
        while start < end {
            let (place, found) = self.find(channels, start..end).await?;
            let is_zero = match place {
                Place::Nowhere => !self.has_backing,
                Place::Zeroes => true,
                _ => false,
            };
            let len = if is_zero { found } else { found.min(zeroes.len() as u64) };
            if !is_zero {
                let mut part = IoBufs::new();
                part.set_part(&zeroes, 0, len as usize, 1);
                self.write_anew(channels, start, &part).await?;
            }
            start += len;
        }
        Ok(())
    }
}
