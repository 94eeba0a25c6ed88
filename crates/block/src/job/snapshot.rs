//! What a disk was at one moment: which parts of it are in the target, and which still only in the source.

use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use super::backup::OnCbwError;
use super::bitmap::Bitmap;
use super::claims::Claims;
use super::copy::{Buffer, Failure, copy, copy_above, copy_top, discard, discard_top, populate};
use super::giving_up::GivingUp;
use super::worker::CHUNK;
use crate::node::Channel;

/// Selects the data of a part that is copied.
#[derive(Debug, Clone, Copy)]
pub(crate) enum What {
    /// All, written in multiples of so many bytes.
    All(u64),
    /// Clusters that the topmost image of the source stores at least in part.
    Top(Clusters),
    /// Data of images behind the node itself, down to but excluding the given depth. The target is the node.
    Behind(u32),
    /// Data of images above the given depth.
    Above(u32),
}

/// How clusters are written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clusters {
    /// Bytes of a cluster.
    pub(super) len: u64,
    /// Data is written in multiples of so many bytes.
    pub(super) unit: u64,
}

impl What {
    pub(super) async fn copy(
        self,
        source: &Rc<dyn Channel>,
        target: &Rc<dyn Channel>,
        range: Range<u64>,
        buffer: &mut Buffer,
    ) -> Result<(), Failure> {
        match self {
            What::All(unit) => {
                let counted = buffer.counted + (range.end - range.start);
                copy(source, target, range, buffer, unit, None).await?;
                // As in QSD, with what is zero.
                buffer.counted = counted;
                Ok(())
            }
            What::Top(clusters) => copy_top(source, target, range, buffer, clusters).await,
            What::Behind(depth) => populate(target, range, depth, buffer).await,
            What::Above(depth) => copy_above(source, target, range, depth, buffer).await,
        }
    }

    /// Discards in the source what was copied of a range. A discard that fails leaves the data.
    pub(super) async fn discard(
        self,
        source: &Rc<dyn Channel>,
        range: Range<u64>,
        buffer: &mut Buffer,
    ) {
        match self {
            What::Top(_) => discard_top(source, range, buffer).await,
            What::All(_) | What::Behind(_) | What::Above(_) => discard(source, range).await,
        }
    }
}

/// The parts still to be copied, and the parts that any thread is copying.
pub(crate) struct Snapshot {
    /// Parts that are in the target are cleared, and only then.
    pub(crate) left: Bitmap,
    claims: Claims,
    /// Parts that are being discarded in the source, as they are in the target.
    discarding: Claims,
    pub(super) on_error: OnCbwError,
    pub(super) what: What,
    /// The longest time that copying before a write takes, nanoseconds.
    pub(super) timeout_ns: Option<u64>,
    /// A write went through to what had not been copied.
    broken: AtomicBool,
    /// Whether it is not needed any more.
    pub(super) giving_up: GivingUp,
    /// Of a cache: a read whose data cannot be stored succeeds.
    pub(super) cache: Option<CacheRoom>,
}

/// Why a cache stores no more.
const FULL: &str = "max-size is reached";

/// The limit of a cache.
pub(crate) struct CacheRoom {
    /// The node, for the log.
    name: String,
    /// Bytes that may still be stored. Copies in flight may make it negative.
    room: AtomicI64,
}

impl CacheRoom {
    /// Returns a limit of `room` bytes that are stored from now on.
    pub(crate) fn new(name: String, room: u64) -> CacheRoom {
        CacheRoom { name, room: AtomicI64::new(i64::try_from(room).unwrap_or(i64::MAX)) }
    }

    /// Counts stored bytes. Returns whether there is room for more.
    fn take(&self, bytes: u64) -> bool {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.room.fetch_sub(bytes, Ordering::AcqRel) > bytes
    }
}

/// Some parts that nothing else copies meanwhile, or that nothing copies while they are read.
pub(crate) struct Claim<'a> {
    snapshot: &'a Snapshot,
    pub(crate) parts: Range<u64>,
    reads: bool,
}

impl Claim<'_> {
    /// They are in the target.
    pub(super) fn done(self) {
        self.snapshot.left.clear(self.parts.clone());
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.snapshot.claims.release(&self.parts, self.reads);
    }
}

/// Some parts that are being discarded in the source.
pub(super) struct Discarding<'a> {
    snapshot: &'a Snapshot,
    parts: Range<u64>,
}

impl Drop for Discarding<'_> {
    fn drop(&mut self) {
        self.snapshot.discarding.release(&self.parts, false);
    }
}

/// Where the first of some parts is to be read.
pub(crate) enum Place<'a> {
    /// In the target, these parts.
    Target(Range<u64>),
    /// In the source, which keeps them while the claim lasts.
    Source(Claim<'a>),
}

impl Snapshot {
    pub(crate) fn new(left: Bitmap, on_error: OnCbwError, what: What) -> Snapshot {
        Snapshot {
            left,
            claims: Claims::default(),
            discarding: Claims::default(),
            on_error,
            what,
            timeout_ns: None,
            broken: AtomicBool::new(false),
            giving_up: GivingUp::default(),
            cache: None,
        }
    }

    /// The same for a cache. `on_error` has to be [`OnCbwError::BreakSnapshot`].
    pub(crate) fn of_cache(self, cache: CacheRoom) -> Snapshot {
        let is_full = !cache.take(0);
        let snapshot = Snapshot { cache: Some(cache), ..self };
        if is_full {
            snapshot.stop_storing(FULL);
        }
        snapshot
    }

    /// The same, with a limit to the time that copying before a write takes.
    pub(crate) fn with_timeout(self, timeout_ns: Option<u64>) -> Snapshot {
        Snapshot { timeout_ns, ..self }
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Whether requests pass without a copy.
    pub(super) fn is_over(&self) -> bool {
        self.is_broken() || self.giving_up.is_given_up()
    }

    pub(crate) fn set_broken(&self) {
        self.broken.store(true, Ordering::Release);
    }

    /// Has a cache store no more. The log has the reason once.
    pub(super) fn stop_storing(&self, why: &str) {
        let was_broken = self.broken.swap(true, Ordering::AcqRel);
        if let (Some(cache), false) = (&self.cache, was_broken) {
            log::warn!(
                "cache '{}': {why}: nothing more is stored until the next start",
                cache.name
            );
        }
    }

    /// Begins to discard parts in the source that are in the target and still claimed. `None`: requests pass without the claim,
    /// so the parts may have new data.
    pub(super) fn begin_discard(&self, parts: &Range<u64>) -> Option<Discarding<'_>> {
        // Before the look: a request that passes looks for this afterwards.
        self.discarding.lock().add(parts.clone(), false);
        let discarding = Discarding { snapshot: self, parts: parts.clone() };
        (!self.is_over()).then_some(discarding)
    }

    /// Whether some of these parts are being discarded. If [`is_over`](Self::is_over), none will be.
    pub(super) fn is_discarding(&self, parts: &Range<u64>) -> bool {
        self.discarding.lock().touches(parts)
    }

    /// Waits until none of these parts is being discarded.
    pub(super) async fn until_kept(&self, parts: &Range<u64>) {
        self.discarding.wait_for(|| (!self.is_discarding(parts)).then_some(())).await;
    }

    /// Claims the first parts of `parts` that are left and unclaimed, at most `most` of them.
    /// `Ok(None)`: no part is left. `Err`: other tasks are copying all parts that are left.
    pub(super) fn claim(&self, parts: Range<u64>, most: u64) -> Result<Option<Claim<'_>>, ()> {
        let mut claimed = self.claims.lock();
        let mut busy = false;
        let mut from = parts.start;
        let start = loop {
            match self.left.first_set(from).filter(|&part| part < parts.end) {
                None if busy => return Err(()),
                None => return Ok(None),
                Some(part) if claimed.has(part) => (busy, from) = (true, part + 1),
                Some(part) => break part,
            }
        };
        let is_free = |part: &u64| self.left.is_set(*part) && !claimed.has(*part);
        let count =
            (start..parts.end.min(start.saturating_add(most))).take_while(is_free).count() as u64;
        let parts = start..start + count;
        claimed.add(parts.clone(), false);
        drop(claimed);
        Ok(Some(Claim { snapshot: self, parts, reads: false }))
    }

    /// Finds the first of some parts. `None`: it is being copied.
    fn place(&self, parts: &Range<u64>) -> Option<Place<'_>> {
        let run = |is_one: &dyn Fn(&u64) -> bool| {
            let count = parts.clone().take_while(is_one).count() as u64;
            parts.start..parts.start + count
        };
        let mut claimed = self.claims.lock();
        if !self.left.is_set(parts.start) {
            drop(claimed);
            return Some(Place::Target(run(&|part| !self.left.is_set(*part))));
        }
        let parts = run(&|part| self.left.is_set(*part) && !claimed.is_copied(*part));
        if parts.is_empty() {
            return None;
        }
        claimed.add(parts.clone(), true);
        drop(claimed);
        Some(Place::Source(Claim { snapshot: self, parts, reads: true }))
    }

    /// Finds the first of some parts, and waits while it is being copied.
    pub(crate) async fn next_place(&self, parts: &Range<u64>) -> Place<'_> {
        self.claims.wait_for(|| self.place(parts)).await
    }

    /// Claims the next of `parts`, and waits while others copy all that is left of them.
    async fn next_claim(&self, parts: &Range<u64>, most: u64) -> Option<Claim<'_>> {
        self.claims.wait_for(|| self.claim(parts.clone(), most).ok()).await
    }

    /// Has some parts not copied any more. Waits while they are copied or read.
    pub(crate) async fn forget(&self, parts: Range<u64>) {
        while let Some(claim) = self.next_claim(&parts, u64::MAX).await {
            claim.done();
        }
    }

    /// Copies what is left of some parts.
    pub(super) async fn copy(
        &self,
        parts: Range<u64>,
        source: &Rc<dyn Channel>,
        target: &Rc<dyn Channel>,
        buffer: &mut Buffer,
    ) -> Result<(), Failure> {
        let most = (CHUNK / self.left.granularity()).max(1);
        while let Some(claim) = self.next_claim(&parts, most).await {
            let range = self.left.bytes_of(&claim.parts);
            let before = buffer.counted;
            self.what.copy(source, target, range, buffer).await?;
            claim.done();
            if let Some(cache) = &self.cache
                && !cache.take(buffer.counted.saturating_sub(before))
            {
                self.stop_storing(FULL);
                break;
            }
        }
        Ok(())
    }
}
