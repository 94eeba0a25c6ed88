//! Reading compressed clusters, and the inflated ones that are kept.
//!
//! Inflating a cluster takes 50 us to several milliseconds, so the loop's pool does it. All requests that wait for a
//! cluster share one inflation. The most recent clusters stay in memory: a sequential reader inflates each once.
//!
//! A kept cluster is known by its place in the file, which requests take from the mapping. As long as any mapping leads
//! to a place, its bytes stay. So a kept cluster is wrong only once the place has been given up, and taken for another
//! compressed cluster: [`Inflated::forget`].

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::Poll;

use event_loop::sync::lock;
use event_loop::{EventLoop, IoBufs, Lane};
use nix::errno::Errno;
use tokio::sync::{OnceCell, Semaphore};

use super::context::Channels;
use super::image::Image;
use super::steps::read_part;
use crate::request::Part;

/// Bytes of inflated clusters that are kept, and bytes that are being inflated.
const MOST_BYTES: u64 = 4 << 20;
/// Clusters that are kept at least, and at most.
const LEAST_KEPT: u64 = 4;
const MOST_KEPT: u64 = 64;
/// Clusters that are inflated at a time, at least.
const LEAST_INFLATING: u64 = 2;
/// Clusters up to that size are inflated on the loop, as giving one to a thread takes about as long (an estimate).
const AT_ONCE: u64 = 4 << 10;
/// Kept clusters leave the memory after one to two times so many nanoseconds without a reader.
const IDLE: u64 = if cfg!(test) { 20_000_000 } else { 5_000_000_000 };

/// An inflated cluster.
pub(super) type Cluster = Arc<Vec<u8>>;
/// First byte and length of the compressed data in the file.
type Place = (u64, u64);
/// A cluster that one request inflates, and others wait for.
type Shared = Arc<OnceCell<Cluster>>;

/// The inflated clusters of an image.
#[derive(Debug)]
pub(super) struct Inflated {
    kept: Mutex<Kept>,
    most: usize,
    inflating: Semaphore,
    /// The image's turn on the pools of the loops.
    lane: Lane,
}

#[derive(Debug, Default)]
struct Kept {
    /// Least recently used first.
    clusters: VecDeque<(Place, Shared)>,
    /// There were readers since the watch looked last.
    is_used: bool,
    /// A task [watches](watch).
    is_watched: bool,
}

impl Kept {
    fn use_again(&mut self, place: Place) -> Option<Shared> {
        let at = self.clusters.iter().rposition(|(other, _)| *other == place)?;
        self.is_used = true;
        let found = self.clusters.remove(at)?;
        let cluster = found.1.clone();
        self.clusters.push_back(found);
        Some(cluster)
    }
}

impl Inflated {
    /// `cluster`: bytes of one.
    pub(super) fn new(cluster: u64) -> Inflated {
        let fit = MOST_BYTES / cluster;
        Inflated {
            kept: Mutex::default(),
            most: fit.clamp(LEAST_KEPT, MOST_KEPT) as usize,
            inflating: Semaphore::new(fit.clamp(LEAST_INFLATING, MOST_KEPT) as usize),
            lane: Lane::default(),
        }
    }

    /// The image's turn on the pools of the loops.
    pub(super) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// The cluster at a place, if it is inflated. The caller has claimed what is mapped there.
    pub(super) fn get(&self, place: Place) -> Option<Cluster> {
        lock(&self.kept).use_again(place)?.get().cloned()
    }

    /// The cluster at a place, which may be yet to be inflated. Called with the image's lock held, under which the mapping
    /// leads to the place.
    fn share(&self, place: Place) -> Shared {
        let mut kept = lock(&self.kept);
        if let Some(cluster) = kept.use_again(place) {
            return cluster;
        }
        kept.is_used = true;
        while kept.clusters.len() >= self.most {
            kept.clusters.pop_front();
        }
        let cluster = Shared::default();
        kept.clusters.push_back((place, cluster.clone()));
        cluster
    }

    /// The range of the file has other bytes from now on. Called with the image's lock held, before a mapping leads there.
    /// Inflations that are under way are not kept either.
    pub(super) fn forget(&self, range: Range<u64>) {
        let is_elsewhere =
            |&((host, len), _): &(Place, Shared)| host >= range.end || host + len <= range.start;
        lock(&self.kept).clusters.retain(is_elsewhere);
    }

    /// Nothing is kept.
    pub(super) fn forget_all(&self) {
        lock(&self.kept).clusters = VecDeque::new();
    }

    /// Has what is kept leave the memory when it is not used.
    fn watch(self: &Arc<Self>, event_loop: &EventLoop) {
        if !std::mem::replace(&mut lock(&self.kept).is_watched, true) {
            event_loop.spawn(watch(event_loop.clone(), Watched(Arc::downgrade(self))));
        }
    }
}

/// Inflated clusters with a watch. Dropped when its loop ends, so that another loop begins a new one.
struct Watched(Weak<Inflated>);

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(inflated) = self.0.upgrade() {
            lock(&inflated.kept).is_watched = false;
        }
    }
}

async fn watch(event_loop: EventLoop, watched: Watched) {
    loop {
        let deadline = event_loop.now_ns().saturating_add(IDLE);
        event_loop.sleep_until(deadline).await;
        let Some(inflated) = watched.0.upgrade() else { return };
        let mut kept = lock(&inflated.kept);
        if event_loop.now_ns() < deadline {
            // The loop ends.
            return;
        }
        if !std::mem::replace(&mut kept.is_used, false) {
            kept.clusters = VecDeque::new();
            // With the clusters: the next one that is kept gets a watch.
            kept.is_watched = false;
            return;
        }
    }
}

/// A part of a request, in one cluster.
struct Piece<F> {
    /// Where it is in the request's memory, and its bytes.
    at: usize,
    len: usize,
    in_cluster: usize,
    cluster: Pin<Box<F>>,
}

impl Image {
    /// Fills `len` bytes at `at` of `bufs` from compressed clusters, from `start` on.
    pub(super) async fn read_compressed(
        &self,
        channels: &Channels,
        start: u64,
        bufs: &mut IoBufs,
        at: usize,
        len: usize,
    ) -> Result<(), Errno> {
        let end = at + len;
        let mut next = at;
        while next < end {
            let mut pieces = Vec::new();
            while next < end && pieces.len() < self.inflated.most {
                let from = start + (next - at) as u64;
                let in_cluster = (from % self.cluster) as usize;
                let len = (self.cluster as usize - in_cluster).min(end - next);
                let cluster = Box::pin(self.inflated(channels, from));
                pieces.push(Piece { at: next, len, in_cluster, cluster });
                next += len;
            }
            fill(bufs, pieces).await?;
        }
        Ok(())
    }

    /// The cluster at a byte of the disk, which is compressed. The caller keeps the mapping in place.
    async fn inflated(&self, channels: &Channels, guest: u64) -> Result<Cluster, Errno> {
        let found = self.engine(channels, |engine| {
            let place = engine.find_compressed(guest)?;
            Ok(place.map(|place| (place, self.inflated.share(place))))
        });
        let (place, shared) = found.await?.ok_or(Errno::EIO)?;
        self.inflated.watch(&channels.event_loop);
        shared.get_or_try_init(|| self.inflate(channels, place)).await.cloned()
    }

    async fn inflate(&self, channels: &Channels, (host, len): Place) -> Result<Cluster, Errno> {
        let _permit = self.inflated.inflating.acquire().await.map_err(|_| Errno::ECANCELED)?;
        let data = read_part(channels, Part::Compressed, host, len as usize).await?;
        let (compression, cluster) = (self.compression, self.cluster as usize);
        let inflate = move || compression.decompress(&data, cluster).map(Arc::new);
        let inflated = match self.cluster <= AT_ONCE {
            true => inflate(),
            false => {
                let inflated = channels.event_loop.compute(&self.inflated.lane, inflate);
                inflated.await.map_err(|_| Errno::ECANCELED)?
            }
        };
        inflated.ok_or(Errno::EIO)
    }
}

/// Fills `bufs` with the pieces, which are inflated side by side.
async fn fill<F>(bufs: &mut IoBufs, mut pieces: Vec<Piece<F>>) -> Result<(), Errno>
where
    F: Future<Output = Result<Cluster, Errno>>,
{
    poll_fn(|cx| {
        let mut result = Ok(());
        pieces.retain_mut(|piece| {
            let Poll::Ready(cluster) = piece.cluster.as_mut().poll(cx) else { return true };
            let data = cluster.and_then(|cluster| {
                let part = cluster.get(piece.in_cluster..piece.in_cluster + piece.len);
                bufs.copy_in(piece.at, part.ok_or(Errno::EIO)?);
                Ok(())
            });
            result = result.and(data);
            false
        });
        match result.is_err() || pieces.is_empty() {
            true => Poll::Ready(result),
            false => Poll::Pending,
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use event_loop::LoopConfig;

    use super::*;

    fn kept(inflated: &Inflated) -> usize {
        lock(&inflated.kept).clusters.len()
    }

    #[test]
    fn few_clusters_are_kept_whatever_their_size() {
        for (cluster, most) in [(512, 64), (64 << 10, 64), (1 << 20, 4), (2 << 20, 4)] {
            let inflated = Inflated::new(cluster);
            for place in 0..100 {
                inflated.share((place * 512, 512)).set(Cluster::default()).unwrap();
                // The first one is used again and again.
                assert!(inflated.get((0, 512)).is_some());
            }
            assert_eq!(kept(&inflated), most);
            assert!(inflated.get((99 * 512, 512)).is_some());
            assert!(inflated.get((512, 512)).is_none());
        }
    }

    #[test]
    fn a_new_cluster_replaces_all_that_it_meets() {
        let inflated = Inflated::new(64 << 10);
        for host in [0, 512, 1024, 4096] {
            inflated.share((host, if host == 0 { 1024 } else { 512 }));
        }
        inflated.forget(512..1024);
        assert_eq!(kept(&inflated), 2);
        // What was being inflated has its readers, and no new ones.
        let before = inflated.share((4096, 512));
        inflated.forget(4096..8192);
        before.set(Cluster::default()).unwrap();
        assert!(inflated.get((4096, 512)).is_none());
    }

    #[test]
    fn what_is_not_used_leaves_the_memory() {
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let inflated = Arc::new(Inflated::new(64 << 10));
        for _ in 0..2 {
            inflated.share((0, 512));
            inflated.watch(&event_loop);
            inflated.watch(&event_loop);
            while kept(&inflated) > 0 {
                event_loop.run_once(true).unwrap();
            }
            // The watch has ended: the loop sleeps.
            assert!(!lock(&inflated.kept).is_watched);
        }
        event_loop.shut_down().unwrap();
    }
}
