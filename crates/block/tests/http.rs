//! Drivers `http` and `https` against servers that do as a test says.

use crate::common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use block::NodeRegistry;
use block::options::*;
use block::request::Op;
use common::nbd::Connected;
use common::web::{self, Answer, Asked, TAG, WebServer, answer, part};
use common::*;
use event_loop::sync::lock;
use nix::errno::Errno;

const KIB: usize = 1 << 10;
/// Bytes of the image: no whole number of sectors.
const LEN: usize = 1000 * KIB + 100;

fn options(url: &str) -> HttpOptions {
    // The tests name what they wait for.
    let mut http = HttpOptions::of_url(url).unwrap();
    http.web = WebOptions { reconnect_delay: 0, readahead: 0, ..http.web };
    http
}

fn with(url: &str, change: impl FnOnce(&mut WebOptions)) -> HttpOptions {
    let mut http = options(url);
    change(&mut http.web);
    http
}

fn node(http: HttpOptions) -> BlockdevOptions {
    BlockdevOptions { read_only: true, ..blockdev("disk", http.driver()) }
}

fn open(http: HttpOptions) -> Connected {
    Connected::new(NodeRegistry::new().open(&node(http)).unwrap())
}

fn refused(http: HttpOptions) -> String {
    match NodeRegistry::new().open(&node(http)) {
        Ok(_) => panic!("it opens"),
        Err(error) => error.to_string(),
    }
}

fn content() -> Arc<Vec<u8>> {
    Arc::new(pattern(LEN))
}

/// A server of the image that does nothing wrong.
fn good() -> (WebServer, Arc<Vec<u8>>) {
    let content = content();
    let image = content.clone();
    (WebServer::start(move |asked| part(asked, &image, TAG)), content)
}

/// A server that opens the image well, and answers the questions after that by `later`.
fn after_opening(
    later: impl Fn(&Asked, &[u8]) -> Answer + Send + Sync + 'static,
) -> (WebServer, Arc<Vec<u8>>) {
    web::after_opening(pattern(LEN), later)
}

#[test]
fn ranges_come_over_one_connection_and_the_end_reads_as_zeroes() {
    let (server, content) = good();
    let mut rig = open(options(&server.url("/disk.img")));
    for (offset, len) in [(0, 512), (4096, 64 * KIB), (LEN - 1000, 1000), (512, 512)] {
        let end = (offset + len).min(LEN);
        let read = rig.read(offset as u64, len, 0).unwrap();
        assert!(read[..end - offset] == content[offset..end]);
    }
    let size = LEN.next_multiple_of(512);
    let last = rig.read((size - 512) as u64, 512, 0).unwrap();
    let within = LEN - (size - 512);
    assert!(last[..within] == content[size - 512..] && last[within..].iter().all(|b| *b == 0));
    assert_eq!(server.connections(), 1);
    let asked = server.asked();
    assert!(asked[1..].iter().all(|asked| asked.header("if-match") == Some(TAG)));
    assert!(asked.iter().all(|asked| asked.header("accept-encoding") == Some("identity")));

    assert_eq!(rig.read(size as u64, 512, 0), Err(Errno::EIO));
    assert_eq!(rig.write(0, &[1; 512], 0), Err(Errno::EROFS));
    assert_eq!(rig.op(Op::Discard, 0, 512), Err(Errno::EROFS));
    assert_eq!(rig.op(Op::Flush, 0, 0), Ok(()));
    let extents = rig.extents(0, size as u64);
    assert!(matches!(extents[..], [extent] if extent.len == size as u64), "{extents:?}");
}

#[test]
fn servers_that_cannot_serve_an_image_are_refused_with_the_reason() {
    let of = |answer: Answer| {
        let server = WebServer::start(move |_| answer.clone());
        let why = refused(options(&server.url("/disk.img?signature=5ec3e7")));
        assert!(!why.contains("5ec3e7"), "{why}");
        why
    };
    let range = "Content-Range: bytes 0-511/1000\r\n";
    assert!(
        of(answer("200 OK", "Accept-Ranges: bytes\r\n", b"image"))
            .ends_with("Server does not support 'range' (byte ranges).")
    );
    let gzip = format!("{range}Content-Encoding: gzip\r\n");
    assert!(of(answer("206 Partial Content", &gzip, b"1")).contains("encoded (gzip)"));
    assert!(of(answer("404 Not Found", "", b"")).ends_with("returned error: 404"));
    assert!(of(answer("503 Busy", "Retry-After: 1\r\n", b"")).ends_with("returned error: 503"));
    assert!(of(answer("206 Partial Content", "", b"1")).contains("which range"));
    assert!(of(Answer::Close(Vec::new())).starts_with("Could not open 'http://127.0.0.1:"));
    assert!(of(Answer::Close(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec())).contains("invalid HTTP"));
    let nowhere = "Location: ftp://127.0.0.1/disk.img\r\n";
    assert!(of(answer("302 Found", nowhere, b"")).contains("something else than http"));
    let loops = "Location: /disk.img\r\n";
    assert!(of(answer("302 Found", loops, b"")).contains("too many redirects"));

    let empty = "Content-Range: bytes */0\r\n";
    let server = WebServer::start(move |_| answer("416 Range Not Satisfiable", empty, b""));
    let opened = NodeRegistry::new().open(&node(options(&server.url("/")))).unwrap();
    assert_eq!(opened.geometry().size, 0);
}

#[test]
fn opening_waits_for_a_server_as_long_as_open_timeout_says() {
    let content = content();
    let image = content.clone();
    let server = WebServer::start(move |asked| match asked.nth {
        0 => answer("503 Busy", "", b""),
        1 => Answer::Close(Vec::new()),
        _ => part(asked, &image, TAG),
    });
    let mut rig = open(with(&server.url("/a"), |web| web.open_timeout = 600));
    assert!(rig.read(0, 512, 0).unwrap() == content[..512]);
    // What stays as it is, or takes longer, is an error at once.
    for (status, headers) in [("404 Not Found", ""), ("503 Busy", "Retry-After: 601\r\n")] {
        let server = WebServer::start(move |_| answer(status, headers, b""));
        let why = refused(with(&server.url("/a"), |web| web.open_timeout = 600));
        assert!(why.contains("returned error: "), "{why}");
        assert_eq!(server.asked().len(), 1);
    }
}

#[test]
fn a_node_is_for_reading() {
    let (server, _) = good();
    let http = options(&server.url("/disk.img"));
    let writable = blockdev("disk", http.clone().driver());
    let error = NodeRegistry::new().open(&writable).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "curl driver does not support writes");
    let either = BlockdevOptions { auto_read_only: true, ..writable };
    assert!(NodeRegistry::new().open(&either).unwrap().geometry().read_only);
}

#[test]
fn user_and_cookies_go_to_the_server_and_not_where_it_redirects_to() {
    let (other, content) = good();
    let there = format!("Location: {}\r\n", other.url("/mirror.img"));
    let server = WebServer::start(move |asked| match asked.header("authorization") {
        // "user:pass word".
        Some("Basic dXNlcjpwYXNzIHdvcmQ=") => answer("302 Found", &there, b""),
        _ => answer("401 Unauthorized", "", b""),
    });
    let http = options(&server.url("/disk.img"));
    assert!(refused(http.clone()).ends_with("returned error: 401"));

    let mut registry = NodeRegistry::new();
    registry.credentials().add_secret("password", b"pass word".to_vec().into());
    registry.credentials().add_secret("cookies", b"session=5ec3e7".to_vec().into());
    let http = HttpOptions {
        username: Some("user".into()),
        password_secret: Some("password".into()),
        cookie_secret: Some("cookies".into()),
        ..http
    };
    let mut rig = Connected::new(registry.open(&node(http)).unwrap());
    assert!(rig.read(0, 64 * KIB, 0).unwrap() == content[..64 * KIB]);
    let asked = server.asked();
    assert_eq!(asked.len(), 2, "the second read goes where the first was led to");
    assert_eq!(asked[1].header("cookie"), Some("session=5ec3e7"));
    let led = other.asked();
    assert_eq!(led.len(), 2);
    for asked in led {
        assert_eq!((asked.header("authorization"), asked.header("cookie")), (None, None));
    }
}

#[test]
fn where_a_redirect_led_to_is_asked_for_again_once_that_has_expired() {
    let content = content();
    let image = content.clone();
    let expired = AtomicUsize::new(0);
    let mirror = WebServer::start(move |asked| match &*asked.path {
        "/disk.img?signature=1" if expired.fetch_add(1, Ordering::SeqCst) > 0 => {
            answer("403 Forbidden", "", b"")
        }
        _ => part(asked, &image, TAG),
    });
    let to = mirror.url("/disk.img?signature=");
    let server = WebServer::start(move |asked| {
        answer("307 Temporary", &format!("Location: {to}{}\r\n", asked.nth + 1), b"")
    });
    let mut rig = open(options(&server.url("/disk.img")));
    for offset in [0, 512, 1024] {
        assert!(rig.read(offset as u64, 512, 0).unwrap() == content[offset..offset + 512]);
    }
    assert_eq!(server.asked().len(), 2);
    let paths: Vec<_> = mirror.asked().iter().map(|asked| asked.path.clone()).collect();
    assert_eq!(paths.iter().filter(|path| path.ends_with("=1")).count(), 2, "{paths:?}");
    assert_eq!(paths.iter().filter(|path| path.ends_with("=2")).count(), 3, "{paths:?}");
}

#[test]
fn no_byte_of_another_content_is_read() {
    let changed = pattern(LEN).iter().map(|byte| byte ^ 0x55).collect::<Vec<_>>();
    // As servers that heed conditions, that do not, and that have lost the length.
    let answers: [fn(&Asked, &[u8]) -> Answer; 3] = [
        |asked, image| part(asked, image, "\"two\""),
        |asked, image| {
            let mut asked = asked.clone();
            asked.headers.remove("if-match");
            part(&asked, image, "\"two\"")
        },
        |asked, image| part(asked, &image[..LEN - 512], TAG),
    ];
    for other in answers {
        let changed = changed.clone();
        let (server, content) = after_opening(move |asked, image| match &*asked.path {
            _ if asked.nth == 1 => part(asked, image, TAG),
            _ => other(asked, &changed),
        });
        // Waiting does not help.
        let mut rig = open(with(&server.url("/a"), |web| web.reconnect_delay = 600));
        assert!(rig.read(0, 4096, 0).unwrap() == content[..4096]);
        assert_eq!(rig.read(4096, 4096, 0), Err(Errno::EIO));
        assert_eq!(rig.read(0, 4096, 0), Err(Errno::EIO));
    }
}

/// An overlay has some blocks of its own, and the others come from the server: never from another content.
#[test]
fn an_overlay_refuses_another_content() {
    let image = content();
    let tag = Arc::new(Mutex::new(TAG));
    let now = tag.clone();
    let server = WebServer::start(move |asked| part(asked, &image, *lock(&now)));
    let overlay = TempFile::new(&disk(), "http-overlay", 0);
    std::fs::remove_file(&overlay.0).unwrap();
    let size = LEN.next_multiple_of(512) as u64;
    block::create_qcow2(&overlay.0, &block::CreateQcow2::new(size)).unwrap();
    let open = |backing_changed, read_only| {
        let unnamed = |driver| BlockdevOptions { node_name: None, ..blockdev("", driver) };
        let template =
            BlockdevOptions { read_only: true, ..unnamed(options(&server.url("/a")).driver()) };
        let driver = Driver::from(Qcow2Options {
            file: BlockdevRef::Inline(Box::new(BlockdevOptions {
                read_only,
                ..unnamed(file(&overlay.0, None))
            })),
            backing: Backing::Node(BlockdevRef::Inline(Box::new(template))),
            backing_changed,
            ..Qcow2Options::default()
        });
        NodeRegistry::new().open(&BlockdevOptions { read_only, ..blockdev("disk", driver) })
    };
    let works = |backing_changed| {
        let mut rig = Connected::new(open(backing_changed, false).unwrap());
        rig.write(4096, &[7; 512], 0).unwrap();
        assert!(rig.read(0, 4096, 0).unwrap() == content()[..4096]);
    };
    works(false);
    works(false);
    *lock(&tag) = "\"two\"";
    for read_only in [false, true] {
        let refused = open(false, read_only).map(drop).unwrap_err().to_string();
        assert!(refused.contains("ETag \"one\"") && refused.contains("ETag \"two\""), "{refused}");
    }
    // Other programs keep what they do not know.
    let rebase = ["rebase", "-u", "-b", "", overlay.0.to_str().unwrap()];
    let rebased = std::process::Command::new("qemu-img").args(rebase).status();
    assert!(rebased.unwrap().success());
    assert!(open(false, false).is_err());
    works(true);
    works(false);
    *lock(&tag) = TAG;
    assert!(open(false, false).is_err());
}

#[test]
fn answers_against_the_rules_fail_at_once() {
    let answers: [fn(&Asked, &[u8]) -> Answer; 5] = [
        // Another range, with its length.
        |asked, image| {
            let mut asked = asked.clone();
            asked.headers.insert("range".into(), "bytes=8192-12287".into());
            part(&asked, image, TAG)
        },
        // The whole image.
        |_, image| answer("200 OK", "ETag: \"one\"\r\n", image),
        // Another length than the range has.
        |_, image| {
            let head = format!("Content-Range: bytes 4096-8191/{LEN}\r\nETag: {TAG}\r\n");
            answer("206 Partial Content", &head, &image[4096..8000])
        },
        // More than the range, without a length.
        |_, image| {
            let head = format!(
                "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 4096-8191/{LEN}\r\nETag: {TAG}\r\n\
                 Transfer-Encoding: chunked\r\n\r\n2000\r\n"
            );
            Answer::Keep([head.as_bytes(), &image[..0x2000], b"\r\n0\r\n\r\n"].concat())
        },
        |_, _| answer("403 Forbidden", "", b"no"),
    ];
    for (nth, wrong) in answers.into_iter().enumerate() {
        let (server, content) = after_opening(move |asked, image| match asked.nth {
            1 => wrong(asked, image),
            _ => part(asked, image, TAG),
        });
        let mut rig = open(with(&server.url("/a"), |web| web.reconnect_delay = 600));
        assert_eq!(rig.read(4096, 4096, 0), Err(Errno::EIO), "answer {nth}");
        assert_eq!(server.asked().len(), 2, "answer {nth} is not asked for again");
        assert!(rig.read(4096, 4096, 0).unwrap() == content[4096..8192], "answer {nth}");
    }
}

#[test]
fn a_broken_answer_is_asked_for_again() {
    let (server, content) = after_opening(|asked, image| match asked.nth {
        // A connection that ends before the answer, and one that ends in it.
        1 => Answer::Close(Vec::new()),
        3 => match part(asked, image, TAG) {
            Answer::Keep(all) | Answer::Close(all) | Answer::Trickle(all, _) => {
                Answer::Close(all[..all.len() - 1000].into())
            }
        },
        _ => part(asked, image, TAG),
    });
    // At once, also without a delay.
    let mut rig = open(options(&server.url("/a")));
    for offset in [0, 4096] {
        assert!(rig.read(offset as u64, 4096, 0).unwrap() == content[offset..offset + 4096]);
    }
}

#[test]
fn a_busy_server_is_asked_again_when_it_says() {
    let (server, content) = after_opening(|asked, image| match asked.nth {
        1 => answer("503 Slow Down", "Retry-After: 2\r\n", b"later"),
        2 => answer("429 Too Many Requests", "Retry-After: 0\r\n", b""),
        _ => part(asked, image, TAG),
    });
    let mut rig = open(with(&server.url("/a"), |web| web.reconnect_delay = 600));
    let begun = Instant::now();
    assert!(rig.read(0, 4096, 0).unwrap() == content[..4096]);
    assert!(begun.elapsed() >= Duration::from_secs(2));
    assert_eq!(server.asked().len(), 4);

    // A server does not make a loop of it.
    let (server, _) = after_opening(|_, _| answer("503 Slow Down", "Retry-After: 0\r\n", b""));
    let mut rig = open(with(&server.url("/a"), |web| web.reconnect_delay = 2));
    assert_eq!(rig.read(0, 4096, 0), Err(Errno::EIO));
    assert!(server.asked().len() <= 5, "{:?}", server.asked());

    let (server, _) = after_opening(|_, _| answer("503 Slow Down", "Retry-After: 900\r\n", b""));
    let mut rig = open(with(&server.url("/a"), |web| web.reconnect_delay = 600));
    let begun = Instant::now();
    assert_eq!(rig.read(0, 4096, 0), Err(Errno::EIO), "that is later than the delay");
    assert!(begun.elapsed() < Duration::from_secs(300));
}

#[test]
fn requests_wait_for_a_server_that_is_away_and_then_fail() {
    let (mut server, content) = good();
    let mut rig = open(with(&server.url("/a"), |web| web.reconnect_delay = 600));
    rig.read(0, 512, 0).unwrap();
    server.stop();
    let tags: Vec<_> =
        (0..40).map(|nth| rig.submit(Op::Read, nth * 512, 512, memory(512, 0))).collect();
    for _ in 0..20 {
        rig.event_loop.run_once(false).unwrap();
    }
    assert!(!rig.has_answers() && rig.channel.in_flight() == tags.len());
    server.go_on();
    for (nth, tag) in tags.into_iter().enumerate() {
        let (result, bufs) = rig.wait(tag);
        assert_eq!(result, Ok(()));
        assert!(bytes(&bufs) == content[nth * 512..][..512]);
    }

    let mut rig = open(with(&server.url("/a"), |web| web.reconnect_delay = 2));
    let mut hasty = open(options(&server.url("/a")));
    server.stop();
    let begun = Instant::now();
    assert_eq!(hasty.read(0, 512, 0), Err(Errno::EIO), "at once");
    let begun_patiently = Instant::now();
    assert_eq!(rig.read(0, 512, 0), Err(Errno::EIO));
    assert!(begun_patiently.elapsed() >= Duration::from_secs(2), "it waited to the end");
    assert!(begun.elapsed() < Duration::from_secs(60));
    server.go_on();
    assert!(hasty.read(0, 512, 0).is_ok() && rig.read(0, 512, 0).is_ok());
}

#[test]
fn a_request_that_is_not_to_wait_fails() {
    let (mut server, _) = good();
    let http = with(&server.url("/a"), |web| web.reconnect_delay = 600);
    let opened = NodeRegistry::new().open(&node(http)).unwrap();
    let mut rig = Connected::new(opened.clone());
    rig.read(0, 512, 0).unwrap();
    server.stop();
    let tag = rig.submit(Op::Read, 0, 512, memory(512, 0));
    rig.event_loop.run_once(false).unwrap();
    let hurry = opened.remote_image().unwrap().stop_waiting().unwrap();
    assert_eq!(rig.wait(tag).0, Err(Errno::EIO));
    assert_eq!(rig.read(0, 512, 0), Err(Errno::EIO));
    drop(hurry);
}

#[test]
fn a_server_that_says_nothing_is_given_up() {
    let silence = Arc::new((Mutex::new(true), Condvar::new()));
    let lasts = silence.clone();
    let (server, content) = after_opening(move |asked, image| {
        let (state, changed) = &*lasts;
        drop(changed.wait_while(lock(state), |silent| *silent).unwrap());
        part(asked, image, TAG)
    });
    let mut rig = open(with(&server.url("/a"), |web| web.timeout = 1));
    let begun = Instant::now();
    assert_eq!(rig.read(0, 512, 0), Err(Errno::EIO));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    *lock(&silence.0) = false;
    silence.1.notify_all();
    assert!(rig.read(0, 512, 0).unwrap() == content[..512]);
}

#[test]
fn a_server_that_sends_byte_by_byte_is_given_up() {
    let (server, content) =
        after_opening(|asked, image| match (asked.nth, part(asked, image, TAG)) {
            (1, Answer::Keep(all)) => {
                let first = all.len() - 8192 + 100;
                Answer::Trickle(all, first)
            }
            (_, answer) => answer,
        });
    let mut rig = open(with(&server.url("/a"), |web| web.timeout = 1));
    assert_eq!(rig.read(0, 8192, 0), Err(Errno::EIO));
    assert!(rig.read(0, 8192, 0).unwrap() == content[..8192]);
}

#[test]
fn no_more_than_sixteen_ranges_are_in_flight() {
    #[derive(Default)]
    struct Ranges {
        arrived: usize,
        in_flight: usize,
        most: usize,
    }
    let ranges = Arc::new((Mutex::<Ranges>::default(), Condvar::new()));
    let counted = ranges.clone();
    let (server, content) = after_opening(move |asked, image| {
        let (state, changed) = &*counted;
        let mut ranges = lock(state);
        ranges.arrived += 1;
        ranges.in_flight += 1;
        ranges.most = ranges.most.max(ranges.in_flight);
        changed.notify_all();
        // The first ones are answered once so many are there.
        let mut ranges = changed.wait_while(ranges, |ranges| ranges.arrived < 16).unwrap();
        ranges.in_flight -= 1;
        part(asked, image, TAG)
    });
    let mut rig = open(options(&server.url("/a")));
    let tags: Vec<_> =
        (0..200).map(|nth| rig.submit(Op::Read, nth * 4096, 4096, memory(4096, 0))).collect();
    for (nth, tag) in tags.into_iter().enumerate() {
        let (result, bufs) = rig.wait(tag);
        assert_eq!(result, Ok(()));
        assert!(bytes(&bufs) == content[nth * 4096..][..4096]);
    }
    assert_eq!(lock(&ranges.0).most, 16);
}

#[test]
fn a_sequential_reader_finds_its_bytes_read_ahead() {
    let (server, content) = good();
    let read_all = |readahead| {
        let before = server.asked().len();
        let mut rig = open(with(&server.url("/a"), |web| web.readahead = readahead));
        let mut at = 0;
        while at < LEN.next_multiple_of(512) {
            let len = (4 * KIB).min(LEN.next_multiple_of(512) - at);
            let read = rig.read(at as u64, len, 0).unwrap();
            let end = LEN.min(at + len);
            assert!(read[..end - at] == content[at..end], "at {at}");
            at += len;
        }
        server.asked().len() - before - 1
    };
    assert_eq!(read_all(0), LEN.div_ceil(4 * KIB));
    // Two reads until the stream is seen, and then windows.
    let windows = read_all(256 * KIB as u64);
    assert!((4..=7).contains(&windows), "{windows}");
}
