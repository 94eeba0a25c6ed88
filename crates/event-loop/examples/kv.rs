//! A key-value server. A request is a line: `get KEY` or `set KEY VALUE`. The answer is a line, too.
//!
//!     cargo run -p ringmill-event-loop --example kv 127.0.0.1:7777

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::rc::Rc;
use std::time::Duration;

use event_loop::{EventLoop, LoopConfig, LoopFile, Part};

/// A client that sends nothing for so long is left.
const IDLE: Duration = Duration::from_secs(60);
/// Bytes of the longest request.
const LONGEST: usize = 64 << 10;

/// One thread has the map, so it needs no lock.
type Map = Rc<RefCell<HashMap<String, String>>>;

fn answer(map: &Map, request: &str) -> String {
    let mut words = request.splitn(3, ' ');
    match (words.next(), words.next(), words.next()) {
        (Some("get"), Some(key), None) => match map.borrow().get(key) {
            Some(value) => format!("value {value}\n"),
            None => "none\n".into(),
        },
        (Some("set"), Some(key), Some(value)) => {
            map.borrow_mut().insert(key.into(), value.into());
            "ok\n".into()
        }
        _ => "error: get KEY, or set KEY VALUE\n".into(),
    }
}

/// Answers a client's requests, several at a time if they have come together.
async fn serve(event_loop: EventLoop, client: LoopFile, map: Map) -> io::Result<()> {
    let (mut buf, mut filled) = (vec![0; LONGEST], 0);
    while filled < LONGEST {
        let received = client.recv(Part::new(buf, filled..LONGEST));
        let (len, part) = event_loop.timeout(IDLE, received).await??;
        if len == 0 {
            return Ok(());
        }
        (buf, filled) = (part.into_inner(), filled + len);
        let whole = buf[..filled].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines = String::from_utf8_lossy(&buf[..whole]);
        let answers: String = lines.lines().map(|line| answer(&map, line)).collect();
        client.send_all(answers).await?;
        buf.copy_within(whole..filled, 0);
        filled -= whole;
    }
    Err(io::Error::other("a request is too long"))
}

/// Accepts clients until that fails.
async fn accept(event_loop: EventLoop, listener: TcpListener) -> io::Result<()> {
    let (listener, map) = (event_loop.file(listener), Map::default());
    loop {
        let client = serve(event_loop.clone(), listener.accept().await?, map.clone());
        event_loop.spawn(async { client.await.unwrap_or_else(|error| eprintln!("{error}")) });
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:7777".to_owned());
    let event_loop = EventLoop::new(LoopConfig::default())?;
    Ok(event_loop.block_on(accept(event_loop.clone(), TcpListener::bind(address)?))??)
}

#[test]
fn clients_share_a_map() {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpStream;

    use event_loop::{IoThread, IoThreadConfig};

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = IoThread::spawn(IoThreadConfig::default()).unwrap();
    let serving = thread.handle().run(|event_loop| accept(event_loop, listener));
    let [mut one, mut other] =
        [(); 2].map(|()| BufReader::new(TcpStream::connect(address).unwrap()));
    let ask = |client: &mut BufReader<TcpStream>, requests: &str| {
        client.get_mut().write_all(requests.as_bytes()).unwrap();
        let answers = requests.matches('\n').map(|_| {
            let mut line = String::new();
            client.read_line(&mut line).unwrap();
            line
        });
        answers.collect::<String>()
    };
    assert_eq!(ask(&mut one, "set a b c\nget a\nget "), "ok\nvalue b c\n");
    assert_eq!(ask(&mut one, "b\n"), "none\n");
    assert_eq!(ask(&mut other, "get a\nput\n"), "value b c\nerror: get KEY, or set KEY VALUE\n");
    let long = format!("set a {}\n", "x".repeat(10_000));
    assert_eq!(ask(&mut other, &long), "ok\n");
    assert_eq!(ask(&mut one, "get a\n").len(), 10_007);
    thread.stop().unwrap();
    assert!(serving.wait().is_err());
}
