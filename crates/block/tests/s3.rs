//! Driver `s3` against stores that do as a test says.

use crate::common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::options::json;
use ::options::table::Context;
use ::options::value::Dialect;
use block::NodeRegistry;
use block::options::*;
use common::nbd::Connected;
use common::web::{self, Answer, Asked, TAG, WebServer, answer, part};
use common::*;
use crypto::sigv4::{self, Signer};
use nix::errno::Errno;

/// Bytes of the image: no whole number of sectors.
const LEN: usize = 100_100;
const ACCESS_KEY: &str = "AKIAIOSFODNN7EXAMPLE";
const SECRET: &str = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
const TOKEN: &str = "5ec3e7-5ec3e7-5ec3e7-5ec3e7";
/// Options of a key that signs.
const SIGNS: &str = "'access-key':'AKIAIOSFODNN7EXAMPLE','secret-key-secret':'key'";

/// An object of a store. The tests name what they wait for.
fn node(server: &WebServer, key: &str, more: &str) -> BlockdevOptions {
    let url = server.url("");
    let text = format!(
        "{{'driver':'s3','node-name':'disk','read-only':true,'readahead':0,'region':'us-east-1','bucket':'images',\
         'key':'{key}','endpoint':'{url}',{more}}}"
    );
    let text = text.replace('\'', "\"");
    let has = |name: &str| text.matches(name).count() > 0;
    let delay = if has("reconnect-delay") { "" } else { ",\"reconnect-delay\":0}" };
    let text = match delay {
        "" => text,
        delay => format!("{}{delay}", text.strip_suffix('}').unwrap()),
    };
    read_blockdev(json::parse(&text).unwrap(), &Context::new(Dialect::Json)).unwrap()
}

fn registry() -> NodeRegistry {
    let mut registry = NodeRegistry::new();
    // A file has a line's end behind the key.
    registry.credentials().add_secret("key", format!("{SECRET}\n").into_bytes().into());
    registry.credentials().add_secret("token", TOKEN.as_bytes().to_vec().into());
    registry
}

fn open(node: &BlockdevOptions) -> Connected {
    Connected::new(registry().open(node).unwrap())
}

fn refused(node: &BlockdevOptions) -> String {
    match registry().open(node) {
        Ok(_) => panic!("it opens"),
        Err(error) => format!("{error} {}", error.hint().unwrap_or_default()),
    }
}

/// Fails unless a question has the signature that a store computes of what has arrived.
fn check_signature(asked: &Asked) {
    let authorization = asked.header("authorization").expect("a signature");
    let names = authorization.split_once("SignedHeaders=").unwrap().1.split_once(',').unwrap().0;
    let value = |name| (name, asked.header(name).unwrap());
    let headers: Vec<_> = names.split(';').map(value).collect();
    for name in ["host", "range", "if-match", "x-amz-date", "x-amz-security-token"] {
        assert_eq!(names.split(';').any(|n| n == name), asked.header(name).is_some(), "{names}");
    }
    let request = sigv4::Request {
        method: "GET",
        path: &asked.path,
        query: "",
        headers: &headers,
        payload: sigv4::EMPTY,
    };
    let signer = Signer {
        access_key: ACCESS_KEY,
        secret_key: SECRET.as_bytes(),
        region: "us-east-1",
        service: "s3",
    };
    let time = asked.header("x-amz-date").unwrap();
    assert_eq!(authorization, signer.authorization(&request, time));
}

fn store() -> (WebServer, Arc<Vec<u8>>) {
    let content = Arc::new(pattern(LEN));
    let image = content.clone();
    (WebServer::start(move |asked| part(asked, &image, TAG)), content)
}

fn after_opening(
    later: impl Fn(&Asked, &[u8]) -> Answer + Send + Sync + 'static,
) -> (WebServer, Arc<Vec<u8>>) {
    web::after_opening(pattern(LEN), later)
}

#[test]
fn each_question_has_the_signature_of_what_arrives() {
    for (key, path) in [
        ("disk.img", "/images/disk.img"),
        (
            "a b/c+d%20&=?#;@:$,!*().img",
            "/images/a%20b/c%2Bd%2520%26%3D%3F%23%3B%40%3A%24%2C%21%2A%28%29.img",
        ),
        ("ü/ሴ/~-._", "/images/%C3%BC/%E1%88%B4/~-._"),
        ("/a//b/", "/images//a//b/"),
        ("a..b/...", "/images/a..b/..."),
    ] {
        let (server, content) = store();
        let more = format!("{SIGNS},'session-token-secret':'token'");
        let mut rig = open(&node(&server, key, &more));
        assert!(rig.read(4096, 8192, 0).unwrap() == content[4096..][..8192]);
        let last = rig.read(LEN.next_multiple_of(512) as u64 - 512, 512, 0).unwrap();
        assert!(last[..LEN % 512] == content[LEN - LEN % 512..]);
        let asked = server.asked();
        assert_eq!(asked.len(), 3);
        for asked in &asked {
            assert_eq!(asked.path, path);
            assert_eq!(asked.header("x-amz-security-token"), Some(TOKEN));
            check_signature(asked);
        }
        assert!(asked[1..].iter().all(|asked| asked.header("if-match") == Some(TAG)));
        assert_eq!(rig.write(0, &[1; 512], 0), Err(Errno::EROFS));
    }
}

#[test]
fn anonymous_questions_have_no_signature() {
    let (server, content) = store();
    let mut rig = open(&node(&server, "disk.img", "'anonymous':true"));
    assert!(rig.read(0, 512, 0).unwrap() == content[..512]);
    for asked in server.asked() {
        assert_eq!((asked.header("authorization"), asked.header("x-amz-date")), (None, None));
    }
}

#[test]
fn a_repeated_question_is_signed_anew() {
    let (server, content) = after_opening(|asked, image| match asked.nth {
        1 => answer("503 Slow Down", "Retry-After: 2\r\n", b"<Error><Code>SlowDown</Code></Error>"),
        _ => part(asked, image, TAG),
    });
    let mut rig = open(&node(&server, "a", &format!("{SIGNS},'reconnect-delay':600")));
    assert!(rig.read(0, 512, 0).unwrap() == content[..512]);
    let asked = server.asked();
    assert_eq!(asked.len(), 3);
    asked.iter().for_each(check_signature);
    assert_ne!(asked[1].header("x-amz-date"), asked[2].header("x-amz-date"));
}

#[test]
fn a_clock_that_is_wrong_is_waited_for_and_told_with_both_times() {
    const SKEWED: &[u8] =
        b"<Error><Code>RequestTimeTooSkewed</Code><Message>The difference is too large.</Message>\
                            <ServerTime>2001-02-03T04:05:06Z</ServerTime></Error>";
    let server = WebServer::start(|_| answer("403 Forbidden", "", SKEWED));
    let why = refused(&node(&server, "a", SIGNS));
    assert!(why.contains("403 RequestTimeTooSkewed: The difference is too large."), "{why}");
    assert!(why.contains("signed at ") && why.contains("time is 2001-02-03T04:05:06Z"), "{why}");
    let (server, content) = after_opening(|asked, image| match asked.nth {
        1 => answer("403 Forbidden", "", SKEWED),
        _ => part(asked, image, TAG),
    });
    let mut rig = open(&node(&server, "a", &format!("{SIGNS},'reconnect-delay':600")));
    assert!(rig.read(0, 512, 0).unwrap() == content[..512]);
    assert_eq!(server.asked().len(), 3);
}

#[test]
fn what_a_store_refuses_is_told_with_its_reason() {
    for (status, headers, body, reasons) in [
        (
            "404 Not Found",
            "",
            "<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>No such key.</Message></Error>",
            ["returned error: 404 NoSuchKey: No such key.", ""],
        ),
        (
            "404 Not Found",
            "",
            "<Error><Code>NoSuchBucket</Code></Error>",
            ["404 NoSuchBucket", "bucket 'images'"],
        ),
        (
            "403 Forbidden",
            "",
            "<Error><Code>AccessDenied</Code></Error>",
            ["403 AccessDenied", ACCESS_KEY],
        ),
        (
            "403 Forbidden",
            "",
            "<Error><Code>SignatureDoesNotMatch</Code></Error>",
            ["SignatureDoesNotMatch", "region 'us-east-1'"],
        ),
        (
            "301 Moved Permanently",
            "x-amz-bucket-region: eu-west-1\r\n",
            "<Error><Code>PermanentRedirect</Code><Message>Elsewhere</Message></Error>",
            ["301 PermanentRedirect: Elsewhere", "region=eu-west-1"],
        ),
        (
            "400 Bad Request",
            "",
            "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>",
            ["400 AuthorizationHeaderMalformed", "region=eu-west-1"],
        ),
        ("401 Unauthorized", "", "", ["returned error: 401", "access-key and secret-key-secret"]),
        (
            "503 Busy",
            "Retry-After: 1\r\n",
            "<Error><Code>SlowDown</Code></Error>",
            ["503 SlowDown", ""],
        ),
    ] {
        let server = WebServer::start(move |_| answer(status, headers, body.as_bytes()));
        let why = refused(&node(&server, "disk.img", SIGNS));
        assert!(reasons.iter().all(|reason| why.contains(reason)), "{why}");
        assert!(why.contains("/images/disk.img'") && !why.contains(SECRET), "{why}");
    }
}

#[test]
fn whatever_is_in_a_refusal_the_error_is_short() {
    let long = format!("<Error><Code>Odd</Code><Message>{}", "m".repeat(4 << 20));
    let echo = format!("<Error><Code>Odd</Code><Message>{SECRET} {TOKEN}</Message></Error>");
    let bodies: [Vec<u8>; 6] = [
        long.into_bytes(),
        vec![0xff; 1 << 20],
        b"<!DOCTYPE a [<!ENTITY b \"c\">]><Error><Code>&b;</Code></Error>".to_vec(),
        b"<html><body>Not found</body></html>".to_vec(),
        format!("<Error><Code>{}</Code></Error>", "C".repeat(70_000)).into_bytes(),
        echo.into_bytes(),
    ];
    for body in bodies {
        let head = format!("HTTP/1.1 403 Forbidden\r\nContent-Length: {}\r\n\r\n", body.len());
        let whole = [head.as_bytes(), &body].concat();
        let server = WebServer::start(move |_| Answer::Keep(whole.clone()));
        let why = refused(&node(&server, "a", &format!("{SIGNS},'session-token-secret':'token'")));
        assert!(why.contains("returned error: 403") && why.len() < 500, "{why}");
        assert!(!why.contains(SECRET) && !why.contains(TOKEN), "{why}");
    }
    // A body that does not come.
    let head =
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 5000\r\n\r\n<Error><Code>NoSuchKey</Code>";
    let server = WebServer::start(move |_| Answer::Trickle(head.to_vec(), head.len() - 1));
    let begun = Instant::now();
    let why = refused(&node(&server, "a", &format!("{SIGNS},'timeout':1")));
    assert!(why.contains("returned error: 404"), "{why}");
    assert!(begun.elapsed() < Duration::from_secs(60));
}

/// A redirect would take the signature, and the token, to another host.
#[test]
fn redirects_are_not_followed() {
    let (other, _) = store();
    let there = format!("Location: {}\r\n", other.url("/images/a"));
    let server = WebServer::start(move |_| answer("307 Temporary Redirect", &there, b""));
    let why = refused(&node(&server, "a", SIGNS));
    assert!(why.contains("307; redirects are not followed"), "{why}");
    assert!(other.asked().is_empty());
}

#[test]
fn no_byte_of_another_object_is_read() {
    let (server, content) = after_opening(|asked, image| match asked.nth {
        1 => part(asked, image, TAG),
        _ => part(asked, image, "\"two\""),
    });
    let mut rig = open(&node(&server, "a", SIGNS));
    assert!(rig.read(0, 4096, 0).unwrap() == content[..4096]);
    assert_eq!(rig.read(4096, 4096, 0), Err(Errno::EIO));
}

#[test]
fn a_node_is_for_reading_and_needs_a_key() {
    let (server, _) = store();
    let writable = BlockdevOptions { read_only: false, ..node(&server, "a", SIGNS) };
    assert!(refused(&writable).starts_with("s3 driver does not support writes"));
    let half = node(&server, "a", "'access-key':'AKIA'");
    assert!(refused(&half).contains("access-key and secret-key-secret go together"));
    let both = node(&server, "a", &format!("{SIGNS},'anonymous':true"));
    assert!(refused(&both).contains("anonymous=on"));
    assert!(server.asked().is_empty());
}
