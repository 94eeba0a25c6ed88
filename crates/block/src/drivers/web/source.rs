//! An image under a URL: one question for a range, and the body of its answer.

use std::error::Error;
use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use event_loop::sync::lock;
use reqwest::header::{ACCEPT_ENCODING, HeaderMap, IF_MATCH, IF_UNMODIFIED_SINCE, RANGE};
use reqwest::{Response, Url};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::answer::{Failure, Identity, judge};
use super::client::Access;
use super::options::shown;
use super::remedy::Remedy;
use super::service::Refusal;
use crate::error::OpenError;

/// What is asked for to find an image. Busybox takes `0-0` for the whole image.
const FIRST: Range<u64> = 0..512;
/// A slower server, bytes within the node's `timeout`, is given up.
const LEAST: u64 = 1024;
/// Longest time to wait for the reason of a refusal.
const REFUSAL: Duration = Duration::from_secs(5);

/// The bytes of a range.
pub(super) struct Answer {
    /// In order.
    pub(super) pieces: Vec<Bytes>,
    /// Whether the first byte took longer than all others: more questions at once would have got more bytes in this time.
    pub(super) is_from_afar: bool,
}

/// Seconds before the next attempt, as for `nbd`; the last one stays.
pub(super) const PAUSES: [u64; 5] = [1, 2, 4, 8, 16];

/// An image that was found.
pub(super) struct Source {
    access: Access,
    /// The content when the node was opened.
    identity: Identity,
    /// Where redirects have led. `None`: there were none.
    led_to: Mutex<Option<Url>>,
}

impl Source {
    /// Looks for the image on its server. A server that does not answer is asked again for as long as `open-timeout` says.
    pub(super) async fn open(access: Access) -> Result<Source, OpenError> {
        let url = shown(&access.url);
        let (identity, at) = match first(&access).await {
            Ok((identity, response)) => (identity, response.url().clone()),
            Err(failure) => {
                let (why, remedy) = (failure.why(), Remedy::of(&access, &failure));
                let error = OpenError::new(format!("Could not open '{url}': {why}"));
                return Err(match remedy {
                    Some(remedy) => error.with_hint(remedy.sentence()),
                    None => error,
                });
            }
        };
        if identity.etag.is_none() && identity.modified.is_none() {
            log::warn!(
                "{url}: the server gives neither ETag nor Last-Modified: another image of the same length under this \
                 URL would not be noticed"
            );
        }
        let led_to = (at != access.url).then_some(at);
        Ok(Source { access, identity, led_to: Mutex::new(led_to) })
    }

    /// Returns the URL for messages.
    pub(super) fn shown(&self) -> String {
        shown(&self.access.url)
    }

    /// Returns the content.
    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Reads a range, which is not empty, once.
    pub(super) async fn read(&self, range: &Range<u64>) -> Result<Answer, Failure> {
        let led_to = lock(&self.led_to).clone();
        let failure = match self.read_at(led_to.as_ref().unwrap_or(&self.access.url), range).await {
            Err(failure) if led_to.is_some() => failure,
            done => return done,
        };
        // The place may have been for a while only, as one with a signature in its URL is.
        lock(&self.led_to).take();
        match failure {
            Failure::Passing(..) => Err(failure),
            Failure::Broken(_) | Failure::Lasting(_) | Failure::Changed(_) => {
                self.read_at(&self.access.url, range).await
            }
        }
    }

    async fn read_at(&self, url: &Url, range: &Range<u64>) -> Result<Answer, Failure> {
        let Access { patience, url: own, .. } = &self.access;
        let asked = Instant::now();
        let (_, mut response) = ask(&self.access, url, range, Some(&self.identity)).await?;
        let at = response.url();
        if at != url && at != own {
            *lock(&self.led_to) = Some(at.clone());
        }
        let wanted = range.end - range.start;
        let (mut pieces, mut got) = (Vec::new(), 0);
        let answered = Instant::now();
        let mut speed = Speed::new(*patience);
        loop {
            let piece = match speed.judge(response.chunk()).await {
                Ok(Ok(Some(piece))) => piece,
                Ok(Ok(None)) if got == wanted => {
                    let is_from_afar = answered - asked > answered.elapsed();
                    return Ok(Answer { pieces, is_from_afar });
                }
                Ok(Ok(None)) => return Err(Failure::Broken(cut_off(got, wanted))),
                Ok(Err(error)) => {
                    let why = format!("{}: {}", cut_off(got, wanted), told(error));
                    return Err(Failure::Broken(why));
                }
                Err(why) => return Err(Failure::Passing(why, None)),
            };
            got += piece.len() as u64;
            speed.add(piece.len() as u64);
            if got > wanted {
                let why = format!("the server sends more than the {wanted} bytes of the range");
                return Err(Failure::Lasting(why));
            }
            pieces.push(piece);
        }
    }

    /// Asks which content the URL has now.
    pub(super) async fn look(&self) -> Option<Identity> {
        let ask = async || ask(&self.access, &self.access.url, &FIRST, None).await;
        let asked = match ask().await {
            // The server may close connections that were kept, as after the answer that tells of the change.
            Err(Failure::Broken(_)) => ask().await,
            asked => asked,
        };
        asked.ok().map(|(identity, _)| identity)
    }
}

/// Whether a body comes fast enough.
struct Speed {
    patience: Duration,
    /// Bytes since the time began that has this end. `None`: no end.
    got: u64,
    end: Option<Instant>,
}

impl Speed {
    fn new(patience: Duration) -> Speed {
        Speed { patience, got: 0, end: Instant::now().checked_add(patience) }
    }

    /// Waits for a part of the body.
    async fn judge<T>(&self, part: impl Future<Output = T>) -> Result<T, String> {
        let Some(end) = self.end else { return Ok(part.await) };
        timeout_at(end, part).await.map_err(|_| {
            let (got, seconds) = (self.got, self.patience.as_secs());
            format!("the server has sent {got} bytes in {seconds} seconds")
        })
    }

    fn add(&mut self, len: u64) {
        self.got += len;
        if self.got >= LEAST {
            *self = Speed::new(self.patience);
        }
    }
}

fn cut_off(got: u64, wanted: u64) -> String {
    format!("the answer ended after {got} of {wanted} bytes")
}

impl Access {
    fn silent(&self) -> String {
        format!("the server has sent nothing for {} seconds", self.patience.as_secs())
    }
}

/// Asks for the beginning of an image. Asks again if the server may do better later, for as long as `open-timeout` says.
async fn first(access: &Access) -> Result<(Identity, Response), Failure> {
    let (start, mut pauses) = (Instant::now(), PAUSES.iter());
    let end = start + access.open_timeout;
    loop {
        let failure = match ask(access, &access.url, &FIRST, None).await {
            Ok(found) => return Ok(found),
            Err(failure) => failure,
        };
        let after = match &failure {
            // Another attempt gets the same answer.
            Failure::Broken(_) if Remedy::of(access, &failure).is_some_and(Remedy::is_needed) => {
                return Err(failure);
            }
            Failure::Broken(_) => Duration::ZERO,
            Failure::Passing(_, after) => after.unwrap_or_default(),
            Failure::Lasting(_) | Failure::Changed(_) => return Err(failure),
        };
        let now = Instant::now();
        if now >= end || now + after > end {
            return Err(failure);
        }
        if pauses.len() == PAUSES.len() {
            let (url, why) = (shown(&access.url), failure.why());
            let seconds = access.open_timeout.as_secs();
            log::warn!("{url}: {why}; opening waits for up to {seconds} seconds");
        }
        let pause = pauses.next().or(PAUSES.last()).copied().unwrap_or_default();
        // The last attempt is at the end.
        sleep_until((now + Duration::from_secs(pause).max(after)).min(end)).await;
    }
}

/// Asks for a range, which is not empty. Returns the content, and the answer without its body.
async fn ask(
    access: &Access,
    url: &Url,
    range: &Range<u64>,
    known: Option<&Identity>,
) -> Result<(Identity, Response), Failure> {
    let Range { start, end } = range;
    let question = access
        .client
        .get(url.clone())
        .header(RANGE, format!("bytes={start}-{}", end - 1))
        .header(ACCEPT_ENCODING, "identity")
        .headers(known.map(condition).unwrap_or_default());
    let mut question = question.build().map_err(|error| Failure::Lasting(told(error)))?;
    let asked_at = SystemTime::now();
    if url.origin() == access.url.origin() {
        access.service.authorize(url, question.headers_mut(), asked_at);
    }
    let response = match timeout(access.patience, access.client.execute(question)).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) if error.is_redirect() => return Err(Failure::Lasting(told(error))),
        Ok(Err(error)) if error.is_timeout() => return Err(Failure::Passing(told(error), None)),
        Ok(Err(error)) => return Err(Failure::Broken(told(error))),
        Err(_) => return Err(Failure::Passing(access.silent(), None)),
    };
    match judge(response.status(), response.headers(), range, known, SystemTime::now()) {
        Ok(identity) => Ok((identity, response)),
        Err(failure) => Err(explained(access, failure, response, asked_at).await),
    }
}

/// Returns the failure with what the answer's body says of it.
async fn explained(
    access: &Access,
    failure: Failure,
    mut response: Response,
    asked_at: SystemTime,
) -> Failure {
    let longest = access.service.longest_refusal();
    if longest == 0 || response.status().is_success() {
        return failure;
    }
    let mut body = Vec::new();
    let read = async {
        while let Ok(Some(piece)) = response.chunk().await {
            body.extend(piece.into_iter().take(longest - body.len()));
            if body.len() == longest {
                break;
            }
        }
    };
    // The part of the body that has arrived may say enough.
    let _ = timeout(access.patience.min(REFUSAL), read).await;
    let (status, headers) = (response.status(), response.headers());
    access.service.explain(failure, &Refusal { status, headers, body: &body, asked_at })
}

/// The condition that the content is the known one.
fn condition(known: &Identity) -> HeaderMap {
    let value = match (known.strong_etag(), &known.modified) {
        (Some(etag), _) => Some((IF_MATCH, etag)),
        (None, Some(modified)) => Some((IF_UNMODIFIED_SINCE, modified.as_str())),
        (None, None) => None,
    };
    let header = value.and_then(|(name, value)| Some((name, value.parse().ok()?)));
    header.into_iter().collect()
}

/// Returns what an error says, without the URL, which may have a secret in it.
pub(super) fn told(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut why = String::new();
    let mut cause = error.source();
    while let Some(deeper) = cause {
        let text = deeper.to_string();
        if !why.ends_with(&text) {
            why = if why.is_empty() { text } else { format!("{why}: {text}") };
        }
        cause = deeper.source();
    }
    if why.is_empty() { error.to_string() } else { why }
}
