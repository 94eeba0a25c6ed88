//! An image in use: repeats questions to a server that is away, and reads ahead.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use event_loop::sync::lock;
use nix::errno::Errno;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::ahead::Ahead;
use super::answer::Failure;
use super::options::WebOptions;
use super::source::{Answer, PAUSES, Source};
use crate::node::NoWaiting;

/// Ranges of a node that a server is asked for at the same time.
const IN_FLIGHT: usize = 16;

/// An image in use.
pub(super) struct Image {
    /// The node's.
    name: String,
    source: Source,
    places: Semaphore,
    ahead: Ahead,
    /// How long requests wait for the server.
    delay: Duration,
    link: Mutex<Link>,
    /// How many want requests not to wait.
    impatient: Arc<AtomicUsize>,
    impatience: Notify,
}

/// Whether the server answers.
#[derive(Default)]
struct Link {
    /// When it failed first, since its last good answer.
    down_since: Option<Instant>,
    /// What the log says of it.
    told: Option<String>,
}

impl Image {
    pub(super) fn new(name: &str, source: Source, options: &WebOptions) -> Image {
        Image {
            name: name.to_owned(),
            source,
            places: Semaphore::new(IN_FLIGHT),
            ahead: Ahead::new(options.readahead),
            delay: Duration::from_secs(options.reconnect_delay.into()),
            link: Mutex::default(),
            impatient: Arc::default(),
            impatience: Notify::new(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the image's length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.source.identity().len
    }

    /// See [`RemoteImage::content`](crate::node::RemoteImage::content).
    pub(super) fn content(&self) -> String {
        self.source.identity().lasting()
    }

    /// See [`RemoteImage::stop_waiting`](crate::node::RemoteImage::stop_waiting).
    pub(super) fn stop_waiting(&self) -> NoWaiting {
        let waits_no_longer = NoWaiting::new(self.impatient.clone());
        self.impatience.notify_waiters();
        waits_no_longer
    }

    /// Reads a range within the image, which is not empty.
    pub(super) async fn read(self: Arc<Self>, range: Range<u64>) -> Result<Vec<Bytes>, Errno> {
        let known = self.ahead.take(&self, &range).await;
        match known {
            Some(pieces) => Ok(pieces),
            None => Ok(self.fetch(&range).await?.pieces),
        }
    }

    /// Reads a range from the server.
    pub(super) async fn fetch(&self, range: &Range<u64>) -> Result<Answer, Errno> {
        let (mut pauses, mut is_first) = (PAUSES.iter(), true);
        loop {
            let read = {
                // Never closed.
                let _place = self.places.acquire().await;
                self.source.read(range).await
            };
            let (why, after) = match read {
                Ok(answer) => {
                    self.up();
                    return Ok(answer);
                }
                // The server may close connections that were kept.
                Err(Failure::Broken(_)) if is_first => {
                    is_first = false;
                    continue;
                }
                Err(Failure::Broken(why)) => (why, None),
                Err(Failure::Passing(why, after)) => (why, after),
                Err(Failure::Lasting(why)) => return Err(self.fails(&why)),
                Err(Failure::Changed(found)) => {
                    let found = match found {
                        Some(found) => Some(found),
                        None => self.source.look().await,
                    };
                    let found =
                        found.map_or_else(|| "another".to_owned(), |found| found.to_string());
                    let why = format!(
                        "the image on the server has changed: it was opened with {}, and is now {found}",
                        self.source.identity()
                    );
                    return Err(self.fails(&why));
                }
            };
            is_first = false;
            let pause = pauses.next().or(PAUSES.last()).copied().unwrap_or_default();
            if !self.waits(Duration::from_secs(pause), after, &why).await {
                return Err(self.fails(&why));
            }
        }
    }

    /// Waits for the next attempt: for a pause, and as long as the server says. `false`: the request fails.
    async fn waits(&self, pause: Duration, after: Option<Duration>, why: &str) -> bool {
        let told = self.impatience.notified();
        let mut told = std::pin::pin!(told);
        told.as_mut().enable();
        let now = Instant::now();
        let end = *lock(&self.link).down_since.get_or_insert(now) + self.delay;
        let after = after.unwrap_or_default();
        let is_impatient = || self.impatient.load(Ordering::Acquire) > 0;
        if now >= end || now + after > end || is_impatient() {
            return false;
        }
        // The last attempt is at the end.
        let next = (now + pause.max(after)).min(end);
        let (url, seconds) = (self.source.shown(), self.delay.as_secs());
        if self.is_news(why) {
            let name = &self.name;
            log::warn!("{name}: {url}: {why}; requests wait for up to {seconds} seconds");
        }
        timeout_at(next, told).await.is_err() || !is_impatient()
    }

    /// Logs an error, unless it was the last one. Returns the errno for the guest.
    #[cold]
    fn fails(&self, why: &str) -> Errno {
        let text = format!("{why}; requests fail");
        if self.is_news(&text) {
            log::error!("{}: {}: {text}", self.name, self.source.shown());
        }
        Errno::EIO
    }

    fn is_news(&self, text: &str) -> bool {
        let mut link = lock(&self.link);
        let is_news = link.told.as_deref() != Some(text);
        if is_news {
            link.told = Some(text.to_owned());
        }
        is_news
    }

    /// The server has answered well.
    fn up(&self) {
        let Link { told, .. } = std::mem::take(&mut *lock(&self.link));
        if told.is_some() {
            log::info!("{}: {}: the server answers again", self.name, self.source.shown());
        }
    }
}
