//! Signs the questions to a store, and explains its refusals.

use std::time::SystemTime;

use crypto::sigv4::{self, Signer};
use reqwest::header::{AUTHORIZATION, DATE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{StatusCode, Url};

use super::keys::Keys;
use super::place::is_region;
use super::said::{LONGEST, Said};
use crate::drivers::web::{Failure, Refusal, Service};

/// Names a bucket's region, in answers of S3.
const BUCKET_REGION: &str = "x-amz-bucket-region";
/// The headers of a question that are signed if it has them, in order.
const SIGNED: [&str; 6] = [
    "if-match",
    "if-unmodified-since",
    "range",
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-security-token",
];

/// A store.
pub(super) struct Store {
    /// `None`: questions are not signed.
    pub(super) keys: Option<Keys>,
    pub(super) region: String,
    pub(super) bucket: String,
}

impl Service for Store {
    /// Signs the question anew: signatures are for a few minutes.
    fn authorize(&self, url: &Url, headers: &mut HeaderMap, now: SystemTime) {
        let Some(Keys { access_key, secret_key, token, .. }) = &self.keys else { return };
        let time = timestamp(now);
        let mut add = |name: &'static str, value: &[u8], is_secret| {
            // Keys and regions are checked when the node is opened.
            if let Ok(mut value) = HeaderValue::from_bytes(value) {
                value.set_sensitive(is_secret);
                headers.insert(HeaderName::from_static(name), value);
            }
        };
        add("x-amz-date", time.as_bytes(), false);
        add("x-amz-content-sha256", sigv4::EMPTY.as_bytes(), false);
        if let Some(token) = token {
            add("x-amz-security-token", token, true);
        }
        let host = match (url.host_str().unwrap_or_default(), url.port()) {
            (host, Some(port)) => format!("{host}:{port}"),
            (host, None) => host.to_owned(),
        };
        let value = |name: &'static str| Some((name, headers.get(name)?.to_str().ok()?));
        let signed: Vec<_> =
            [("host", &*host)].into_iter().chain(SIGNED.into_iter().filter_map(value)).collect();
        let request = sigv4::Request {
            method: "GET",
            path: url.path(),
            query: url.query().unwrap_or_default(),
            headers: &signed,
            payload: sigv4::EMPTY,
        };
        let signer = Signer { access_key, secret_key, region: &self.region, service: "s3" };
        let authorization = signer.authorization(&request, &time);
        if let Ok(mut value) = HeaderValue::try_from(authorization) {
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
    }

    /// A signature is for one host.
    fn redirects(&self) -> bool {
        false
    }

    fn longest_refusal(&self) -> usize {
        LONGEST
    }

    fn explain(&self, failure: Failure, refusal: &Refusal<'_>) -> Failure {
        let said = Said::of(refusal.body);
        let code = said.as_ref().map_or("", |said| &*said.code);
        let more = said.as_ref().map(|said| match &*self.without_token(&said.message) {
            "" => format!(" {code}"),
            message => format!(" {code}: {message}"),
        });
        let advice = self.advice(said.as_ref(), refusal).map(|advice| format!("; {advice}"));
        let whole =
            |why| format!("{why}{}{}", more.unwrap_or_default(), advice.unwrap_or_default());
        match failure {
            // The next question has another time, and the clock may be set until then.
            Failure::Lasting(why) if code == "RequestTimeTooSkewed" => {
                Failure::Passing(whole(why), None)
            }
            Failure::Lasting(why) => Failure::Lasting(whole(why)),
            Failure::Passing(why, after) => Failure::Passing(whole(why), after),
            Failure::Broken(_) | Failure::Changed(_) => failure,
        }
    }

    fn user(&self) -> &'static str {
        "access-key and secret-key-secret name the key that signs"
    }
}

impl Store {
    /// Returns a message of the store, which may send back what it got.
    fn without_token(&self, message: &str) -> String {
        let secrets = self
            .keys
            .iter()
            .flat_map(|keys| [Some(&keys.secret_key), keys.token.as_ref()].into_iter().flatten());
        // The message may have only the beginning.
        let starts = secrets.filter_map(|secret| std::str::from_utf8(secret.get(..16)?).ok());
        match starts.into_iter().any(|start| message.contains(start)) {
            true => String::new(),
            false => message.to_owned(),
        }
    }

    /// Returns what a user can do.
    fn advice(&self, said: Option<&Said>, refusal: &Refusal<'_>) -> Option<String> {
        let (region, bucket) = (&self.region, &self.bucket);
        let header = |name: &str| refusal.headers.get(name)?.to_str().ok();
        let named = header(BUCKET_REGION).filter(|name| is_region(name));
        let other = named.or_else(|| said?.region.as_deref()).filter(|name| name != region);
        if let Some(other) = other {
            return Some(format!(
                "the store names region '{other}', and region is '{region}': region={other}"
            ));
        }
        let is_moved = matches!(
            refusal.status,
            StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND | StatusCode::TEMPORARY_REDIRECT
        );
        if is_moved {
            return Some(
                "redirects are not followed: region or endpoint name where the bucket is"
                    .to_owned(),
            );
        }
        let key = self
            .keys
            .as_ref()
            .map(|keys| format!("access key '{}' of {}", keys.access_key, keys.origin));
        Some(match (&*said?.code, key) {
            ("NoSuchBucket", _) => format!("bucket '{bucket}' is looked for at this endpoint"),
            ("AccessDenied", None) => "anonymous=on asks without a key".to_owned(),
            ("AccessDenied", Some(key)) => {
                format!("{key} may not read the object, or may not know that there is none")
            }
            ("SignatureDoesNotMatch", Some(key)) => {
                format!(
                    "the secret key is not that of {key}, or region '{region}' is not the store's"
                )
            }
            ("InvalidAccessKeyId", Some(key)) => format!("the store does not know {key}"),
            ("ExpiredToken" | "InvalidToken", Some(key)) => {
                format!("{key} is for a limited time: open the node with a new one")
            }
            ("RequestTimeTooSkewed", _) => {
                let ours = httpdate::fmt_http_date(refusal.asked_at.max(SystemTime::UNIX_EPOCH));
                let date =
                    header(DATE.as_str()).and_then(|date| httpdate::parse_http_date(date).ok());
                let theirs = date.map(httpdate::fmt_http_date);
                let theirs = theirs.or_else(|| said?.server_time.clone());
                let theirs = theirs.unwrap_or_else(|| "another".to_owned());
                format!(
                    "the request was signed at {ours}, and the store's time is {theirs}: set this machine's clock"
                )
            }
            _ => return None,
        })
    }
}

/// Returns the time of a signature: `20130524T000000Z`.
fn timestamp(now: SystemTime) -> String {
    const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
    // `Fri, 24 May 2013 00:00:00 GMT`
    let date = httpdate::fmt_http_date(now.max(SystemTime::UNIX_EPOCH));
    let part = |at| date.get(at).unwrap_or_default();
    let month = MONTHS.find(part(8..11)).unwrap_or_default() / 3 + 1;
    let (day, year) = (part(5..7), part(12..16));
    let (hour, minute, second) = (part(17..19), part(20..22), part(23..25));
    format!("{year}{month:02}{day}T{hour}{minute}{second}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn store(token: Option<&str>) -> Store {
        let keys = Keys {
            access_key: "AKIAIOSFODNN7EXAMPLE".into(),
            secret_key: b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_vec().into(),
            token: token.map(|token| token.as_bytes().to_vec().into()),
            origin: "secret 's'".into(),
        };
        Store { keys: Some(keys), region: "us-east-1".into(), bucket: "images".into() }
    }

    /// 24 May 2013.
    fn may() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_369_353_600)
    }

    #[test]
    fn a_question_is_signed_as_in_the_documentation_of_s3() {
        let url = Url::parse("https://examplebucket.s3.amazonaws.com/test.txt").unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("range", HeaderValue::from_static("bytes=0-9"));
        headers.insert("accept-encoding", HeaderValue::from_static("identity"));
        store(None).authorize(&url, &mut headers, may());
        let signed = headers[AUTHORIZATION].to_str().unwrap();
        assert!(
            signed.ends_with("f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
            "{signed}"
        );
        assert!(headers[AUTHORIZATION].is_sensitive());
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(timestamp(may()), "20130524T000000Z");
        let leap = SystemTime::UNIX_EPOCH + Duration::from_secs(951_868_799);
        assert_eq!(timestamp(leap), "20000229T235959Z");
    }

    /// What becomes of a refusal.
    fn explained(
        status: u16,
        code: &str,
        message: &str,
        headers: &[(&'static str, &str)],
    ) -> Failure {
        let status = StatusCode::from_u16(status).unwrap();
        let headers: HeaderMap = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect();
        let body = format!("<Error><Code>{code}</Code><Message>{message}</Message></Error>");
        let refusal = Refusal { status, headers: &headers, body: body.as_bytes(), asked_at: may() };
        store(Some("token-5ec3e7-token-5ec3e7")).explain(Failure::Lasting("no".into()), &refusal)
    }

    #[test]
    fn an_error_says_what_the_store_says_and_what_to_do() {
        let lasting = |code, headers: &[_]| match explained(403, code, "why", headers) {
            Failure::Lasting(why) => why,
            other => panic!("{other:?}"),
        };
        assert_eq!(lasting("NoSuchKey", &[]), "no NoSuchKey: why");
        let key = "access key 'AKIAIOSFODNN7EXAMPLE' of secret 's'";
        assert!(lasting("InvalidAccessKeyId", &[]).ends_with(&format!("does not know {key}")));
        assert!(
            lasting("SignatureDoesNotMatch", &[])
                .contains(&format!("not that of {key}, or region"))
        );
        let moved = lasting("PermanentRedirect", &[("x-amz-bucket-region", "eu-west-1")]);
        assert!(moved.ends_with("region=eu-west-1"), "{moved}");
        let Failure::Passing(why, None) = explained(
            403,
            "RequestTimeTooSkewed",
            "",
            &[("date", "Fri, 24 May 2013 01:00:00 GMT")],
        ) else {
            panic!("the clock may be set")
        };
        assert!(why.contains("signed at Fri, 24 May 2013 00:00:00 GMT"), "{why}");
        assert!(why.contains("store's time is Fri, 24 May 2013 01:00:00 GMT"), "{why}");
    }

    #[test]
    fn a_store_that_sends_a_secret_back_does_not_get_it_into_a_log() {
        for secret in ["token-5ec3e7-token-5ec3e7", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"] {
            assert_eq!(
                explained(400, "Odd", &format!("is {secret}"), &[]),
                Failure::Lasting("no Odd".into())
            );
        }
    }
}
