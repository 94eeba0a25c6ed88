//! Input in plain text from a peer: a monitor's answers to `ringmill ctl` and `top`, and HTTP requests for
//! the page of metrics.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc;

use control::{CtlSocket, TopSort};
use daemon::fuzzing::http;
use serde_json::Map;

use crate::world;

#[allow(dead_code, missing_docs, unreachable_pub)]
#[path = "../../crates/ringmill/src/ctl/client.rs"]
mod client;
#[allow(dead_code, missing_docs, unreachable_pub)]
#[path = "../../crates/ringmill/src/top/sample.rs"]
mod sample;
#[allow(dead_code, missing_docs, unreachable_pub)]
#[path = "../../crates/ringmill/src/ctl/table.rs"]
mod table;
#[allow(dead_code, missing_docs, unreachable_pub)]
#[path = "../../crates/ringmill/src/ctl/views.rs"]
mod views;

/// A greeting and the answer to `qmp_capabilities`.
const BEGINNING: &[u8] =
    b"{\"QMP\":{\"version\":{\"package\":\"ringmill\"},\"capabilities\":[]}}\n\
                           {\"return\":{},\"id\":1}\n";

/// Commands with answers that `ctl` formats, and one without.
const COMMANDS: [&str; 8] = [
    "query-named-block-nodes",
    "query-block-exports",
    "query-block-jobs",
    "query-jobs",
    "query-iothreads",
    "x-query-export-stats",
    "x-query-iothread-stats",
    "query-version",
];

/// Runs one input. Its first byte selects the kind of the rest.
pub fn run(data: &[u8]) {
    let Some((&what, rest)) = data.split_first() else { return };
    match what & 3 {
        0 => http_request(rest),
        1 => monitor(rest, what & 4 == 0, COMMANDS[usize::from(what >> 4 & 7)]),
        _ => answers(rest, COMMANDS[usize::from(what >> 4 & 7)]),
    }
}

/// The result does not depend on where the stream is divided.
fn http_request(bytes: &[u8]) {
    let whole = http::parse(bytes);
    let mut decided = None;
    for cut in 0..=bytes.len() {
        let asked = http::parse(&bytes[..cut]);
        match decided {
            None => decided = asked,
            // More bytes do not change the request, unless a limit is reached.
            Some(http::Asked::Metrics { .. }) => assert_eq!(asked, decided),
            Some(http::Asked::Refused(_)) => {
                assert!(matches!(asked, Some(http::Asked::Refused(_))), "{asked:?}");
            }
        }
    }
    assert_eq!(whole.is_some(), decided.is_some());
    if let Some(http::Asked::Refused(status)) = whole {
        let said = http::refusal(status);
        assert!(said.starts_with("HTTP/1.1 ") && said.len() < 512);
    }
}

/// Sends fixed bytes to each client, then nothing more.
struct Talker {
    path: PathBuf,
    words: mpsc::Sender<Vec<u8>>,
}

thread_local! {
    static TALKER: Talker = Talker::new();
}

impl Talker {
    fn new() -> Self {
        let path = world::own_path("qmp");
        let listener = UnixListener::bind(&path).expect("a socket");
        let (words, receiver) = mpsc::channel::<Vec<u8>>();
        std::thread::spawn(move || {
            let mut last: Option<UnixStream> = None;
            while let Ok(words) = receiver.recv() {
                let Ok((mut stream, _)) = listener.accept() else { return };
                // The client may be gone already.
                let _ = stream.write_all(&words);
                let _ = stream.shutdown(std::net::Shutdown::Write);
                // Open until the next one comes: a client may still write.
                last.replace(stream);
            }
        });
        Talker { path, words }
    }
}

fn monitor(bytes: &[u8], greeted: bool, command: &str) {
    let beginning = if greeted { BEGINNING } else { b"" };
    TALKER.with(|talker| {
        talker.words.send([beginning, bytes].concat()).expect("it listens");
        let connected = client::Client::connect(&CtlSocket::Unix(talker.path.clone()));
        assert!(!greeted || connected.is_ok(), "it was greeted well");
        let said = |error: client::ClientError| {
            assert!(error.to_string().len() <= 1024 + bytes.len());
        };
        let mut client = match connected {
            Ok(client) => client,
            Err(error) => return said(error),
        };
        match client.execute(command, Map::new()) {
            Ok(answer) => printable(&views::show(command, &answer)),
            Err(error) => said(error),
        }
        while let Ok(Some(event)) = client.next_event() {
            printable(&views::event(&event));
        }
    });
}

/// Text for a terminal must have no control sequences.
fn printable(text: &str) {
    let commands = text.chars().find(|c| c.is_control() && *c != '\n');
    assert_eq!(commands, None, "{text:?}");
}

/// Two answers, as `ctl` shows them and as `top` compares them.
fn answers(bytes: &[u8], command: &str) {
    let mut values = bytes.splitn(2, |byte| *byte == b'\n').map(serde_json::from_slice);
    let (Some(Ok(first)), second) = (values.next(), values.next()) else { return };
    let second = second.and_then(Result::ok).unwrap_or_default();
    printable(&views::show(command, &first));
    let (before, after) =
        (sample::Sample::read(&first, &second), sample::Sample::read(&second, &first));
    for sort in [TopSort::Order, TopSort::Requests] {
        for (new, old) in [(&after, &before), (&before, &after), (&before, &before)] {
            let view = new.since(old, 0.5, sort);
            for work in &view.exports {
                assert!(work.depth >= 0.0 && work.errors >= 0.0 && work.bytes >= 0.0, "{work:?}");
            }
        }
    }
}
