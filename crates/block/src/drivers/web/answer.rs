//! Judges a server's answer to a question for a range, before its body is read. Pure.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, SystemTime};

use reqwest::StatusCode;
use reqwest::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderName, LAST_MODIFIED,
    RETRY_AFTER,
};

/// What tells a content from others under the same URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::drivers) struct Identity {
    /// With its quotes.
    pub(super) etag: Option<String>,
    pub(super) modified: Option<String>,
    /// Bytes.
    pub(super) len: u64,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len)?;
        if let Some(etag) = &self.etag {
            write!(f, ", ETag {etag}")?;
        }
        match &self.modified {
            Some(modified) => write!(f, ", Last-Modified {modified}"),
            None => Ok(()),
        }
    }
}

impl Identity {
    /// Returns the ETag, if equal ones mean equal bytes.
    pub(super) fn strong_etag(&self) -> Option<&str> {
        self.etag.as_deref().filter(|etag| !etag.starts_with("W/"))
    }

    /// Returns what is the same for equal bytes. A copy on another server has another time.
    pub(super) fn lasting(&self) -> String {
        let modified = self.modified.clone().filter(|_| self.strong_etag().is_none());
        Identity { modified, ..self.clone() }.to_string()
    }

    /// Returns whether both are of the same content. An ETag says more than a time.
    fn is_of_same(&self, other: &Identity) -> bool {
        self.len == other.len
            && self.etag == other.etag
            && (self.strong_etag().is_some() || self.modified == other.modified)
    }
}

/// Why there are no bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::drivers) enum Failure {
    /// The connection broke: another one may be better at once.
    Broken(String),
    /// The server may do better later, perhaps after the time that it says.
    Passing(String, Option<Duration>),
    /// The same question gets the same answer.
    Lasting(String),
    /// The URL has another content. `None`: the server does not say which.
    Changed(Option<Identity>),
}

impl Failure {
    /// Returns the reason, for an image that is not in use yet.
    pub(super) fn why(&self) -> &str {
        match self {
            Failure::Broken(why) | Failure::Passing(why, _) | Failure::Lasting(why) => why,
            Failure::Changed(_) => "the content changes",
        }
    }
}

/// Returns the content that a range was sent of. `known`: the one that the range has to be of.
pub(super) fn judge(
    status: StatusCode,
    headers: &HeaderMap,
    asked: &Range<u64>,
    known: Option<&Identity>,
    now: SystemTime,
) -> Result<Identity, Failure> {
    let lasting = |why: String| Err(Failure::Lasting(why));
    let identity = |len| Identity {
        etag: text(headers, ETAG).map(str::to_owned),
        modified: text(headers, LAST_MODIFIED).map(str::to_owned),
        len,
    };
    match status {
        StatusCode::PARTIAL_CONTENT => {}
        // QEMU's words.
        StatusCode::OK => {
            return lasting("Server does not support 'range' (byte ranges).".to_owned());
        }
        StatusCode::PRECONDITION_FAILED if known.is_some() => return Err(Failure::Changed(None)),
        StatusCode::RANGE_NOT_SATISFIABLE => {
            let len = text(headers, CONTENT_RANGE).and_then(unsatisfied);
            return match (len, known) {
                (Some(0), None) => Ok(identity(0)),
                (Some(len), Some(known)) if len != known.len => {
                    Err(Failure::Changed(Some(identity(len))))
                }
                _ => lasting(refused(status)),
            };
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            return Err(Failure::Passing(refused(status), retry_after(headers, now)));
        }
        _ if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED => {
            return Err(Failure::Passing(refused(status), retry_after(headers, now)));
        }
        _ => return lasting(refused(status)),
    }
    if let Some(encoding) = headers.get(CONTENT_ENCODING).filter(|encoding| *encoding != "identity")
    {
        let encoding = encoding.to_str().unwrap_or("?");
        return lasting(format!("the server sends the image encoded ({encoding}), not its bytes"));
    }
    let Some((sent, len)) = text(headers, CONTENT_RANGE).and_then(content_range) else {
        return lasting("the server does not say which range it sends".to_owned());
    };
    let Some(len) = len.or(known.map(|known| known.len)) else {
        return lasting("the server does not say how long the image is".to_owned());
    };
    let found = identity(len);
    if let Some(known) = known.filter(|known| !known.is_of_same(&found)) {
        debug_assert!(*known != found);
        return Err(Failure::Changed(Some(found)));
    }
    // Only a question at opening may reach past the end.
    let asked = asked.start..asked.end.min(len);
    if sent != asked {
        let (first, last) = (asked.start, asked.end - 1);
        return lasting(format!(
            "the server sends bytes {}-{} of {len} for {first}-{last}",
            sent.start,
            sent.end - 1
        ));
    }
    let bytes = asked.end - asked.start;
    match text(headers, CONTENT_LENGTH).map(str::parse::<u64>) {
        Some(Ok(length)) if length == bytes => Ok(found),
        None => Ok(found),
        Some(_) => lasting(format!("the server sends another length than {bytes} bytes")),
    }
}

fn refused(status: StatusCode) -> String {
    format!("The requested URL returned error: {}", status.as_u16())
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// `bytes FIRST-LAST/LENGTH`, with `*` for an unknown length.
fn content_range(text: &str) -> Option<(Range<u64>, Option<u64>)> {
    let (range, len) = text.strip_prefix("bytes ")?.trim().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
    let end = last.checked_add(1).filter(|end| first < *end)?;
    let len = match len {
        "*" => None,
        len => Some(len.parse().ok().filter(|len| end <= *len)?),
    };
    Some((first..end, len))
}

/// `bytes */LENGTH`.
fn unsatisfied(text: &str) -> Option<u64> {
    text.strip_prefix("bytes")?.trim().strip_prefix("*/")?.parse().ok()
}

/// `Retry-After`: seconds, or a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = text(headers, RETRY_AFTER)?.trim();
    if let Ok(seconds) = text.parse::<u32>() {
        return Some(Duration::from_secs(seconds.into()));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(HeaderName, &str)]) -> HeaderMap {
        all.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    fn known() -> Identity {
        Identity { etag: Some("\"a\"".into()), modified: Some("Mon".into()), len: 1000 }
    }

    const RANGE: (HeaderName, &str) = (CONTENT_RANGE, "bytes 10-19/1000");
    const TAG: (HeaderName, &str) = (ETAG, "\"a\"");
    const MONDAY: (HeaderName, &str) = (LAST_MODIFIED, "Mon");

    fn of(status: u16, all: &[(HeaderName, &str)]) -> Result<Identity, Failure> {
        let status = StatusCode::from_u16(status).unwrap();
        judge(status, &headers(all), &(10..20), Some(&known()), SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn the_range_that_was_asked_for_is_taken() {
        assert_eq!(of(206, &[RANGE, TAG, MONDAY]), Ok(known()));
        assert!(of(206, &[RANGE, TAG, (CONTENT_LENGTH, "10")]).is_ok());
        assert!(of(206, &[(CONTENT_RANGE, "bytes 10-19/*"), TAG]).is_ok());
        assert!(of(206, &[RANGE, TAG, (CONTENT_ENCODING, "identity")]).is_ok());
        // The same strong ETag at another time.
        assert!(of(206, &[RANGE, TAG, (LAST_MODIFIED, "Tue")]).is_ok());
    }

    #[test]
    fn another_content_is_a_change_that_names_it() {
        let changed = |all: &[_]| match of(206, all) {
            Err(Failure::Changed(Some(found))) => found.to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(changed(&[RANGE, (ETAG, "\"b\"")]), "1000 bytes, ETag \"b\"");
        assert_eq!(changed(&[RANGE]), "1000 bytes");
        assert_eq!(changed(&[(CONTENT_RANGE, "bytes 10-19/1001"), TAG]), "1001 bytes, ETag \"a\"");
        assert_eq!(of(412, &[]), Err(Failure::Changed(None)));
        assert!(matches!(
            of(416, &[(CONTENT_RANGE, "bytes */5")]),
            Err(Failure::Changed(Some(Identity { len: 5, .. })))
        ));
        // A weak ETag does not say that the bytes are the same.
        let weak = Identity { etag: Some("W/\"a\"".into()), ..known() };
        let answer = headers(&[RANGE, (ETAG, "W/\"a\""), (LAST_MODIFIED, "Tue")]);
        let now = SystemTime::UNIX_EPOCH;
        let judged = judge(StatusCode::PARTIAL_CONTENT, &answer, &(10..20), Some(&weak), now);
        assert!(matches!(judged, Err(Failure::Changed(Some(_)))));
    }

    #[test]
    fn what_is_no_such_range_is_refused_with_the_reason() {
        let why = |status, all: &[_]| match of(status, all) {
            Err(Failure::Lasting(why)) => why,
            other => panic!("{other:?}"),
        };
        assert_eq!(why(200, &[TAG]), "Server does not support 'range' (byte ranges).");
        assert!(why(206, &[RANGE, TAG, (CONTENT_ENCODING, "gzip")]).contains("(gzip)"));
        assert!(why(206, &[TAG]).contains("which range"));
        for range in ["bytes 10-19", "items 1-2/3", "bytes 19-10/1000", "bytes 10-1000/1000"] {
            assert!(why(206, &[TAG, (CONTENT_RANGE, range)]).contains("which range"), "{range}");
        }
        let shifted = why(206, &[TAG, (CONTENT_RANGE, "bytes 11-20/1000")]);
        assert_eq!(shifted, "the server sends bytes 11-20 of 1000 for 10-19");
        assert!(why(206, &[RANGE, TAG, (CONTENT_LENGTH, "11")]).contains("another length"));
        assert!(why(404, &[]).ends_with("404") && why(403, &[]).ends_with("403"));
        assert!(why(416, &[(CONTENT_RANGE, "bytes */1000")]).ends_with("416"));
        let headers = headers(&[(CONTENT_RANGE, "bytes 10-19/*")]);
        let now = SystemTime::UNIX_EPOCH;
        let judged = judge(StatusCode::PARTIAL_CONTENT, &headers, &(10..20), None, now);
        assert!(matches!(judged, Err(Failure::Lasting(why)) if why.contains("how long")));
    }

    #[test]
    fn a_busy_server_says_when_to_come_back() {
        let after = |status, value| match of(status, &[(RETRY_AFTER, value)]) {
            Err(Failure::Passing(_, after)) => after.map(|after| after.as_secs()),
            other => panic!("{other:?}"),
        };
        assert_eq!(after(503, "7"), Some(7));
        assert_eq!(after(429, "Thu, 01 Jan 1970 00:01:00 GMT"), Some(60));
        assert_eq!(after(503, "soon"), None);
        assert!(matches!(of(500, &[]), Err(Failure::Passing(_, None))));
        assert!(matches!(of(408, &[]), Err(Failure::Passing(_, None))));
    }

    #[test]
    fn an_image_may_be_shorter_than_the_first_question() {
        let headers = headers(&[(CONTENT_RANGE, "bytes 0-99/100"), (CONTENT_LENGTH, "100")]);
        let now = SystemTime::UNIX_EPOCH;
        let judged = judge(StatusCode::PARTIAL_CONTENT, &headers, &(0..512), None, now);
        assert_eq!(judged.map(|found| found.len), Ok(100));
    }

    #[test]
    fn an_empty_image_has_no_range() {
        let judged = judge(
            StatusCode::RANGE_NOT_SATISFIABLE,
            &headers(&[(CONTENT_RANGE, "bytes */0")]),
            &(0..1),
            None,
            SystemTime::UNIX_EPOCH,
        );
        assert_eq!(judged.map(|found| found.len), Ok(0));
    }
}
