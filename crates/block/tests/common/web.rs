//! A web server that answers as a test says.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use event_loop::sync::lock;

/// A question of a client.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Its number, from 0.
    pub nth: usize,
    pub path: String,
    /// By lower-case names.
    pub headers: HashMap<String, String>,
}

impl Asked {
    /// First byte, and the one after the last.
    pub fn range(&self) -> Option<(usize, usize)> {
        let (first, last) = self.headers.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse::<usize>().ok()? + 1))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// What a server does with a question.
#[derive(Debug, Clone)]
pub enum Answer {
    /// Sends bytes, and waits for the next question.
    Keep(Vec<u8>),
    /// Sends bytes, and closes the connection.
    Close(Vec<u8>),
    /// Sends some of the bytes, then the others one by one, with pauses.
    Trickle(Vec<u8>, usize),
}

/// A server on a free port. It ends with its value.
pub struct WebServer {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    answer: Box<dyn Fn(&Asked) -> Answer + Send + Sync>,
    asked: Mutex<Vec<Asked>>,
    connections: AtomicUsize,
    open: Mutex<Vec<TcpStream>>,
    ends: AtomicBool,
}

impl WebServer {
    pub fn start(answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> WebServer {
        let shared = Shared {
            answer: Box::new(answer),
            asked: Mutex::default(),
            connections: AtomicUsize::new(0),
            open: Mutex::default(),
            ends: AtomicBool::new(false),
        };
        WebServer::listen("127.0.0.1:0".parse().unwrap(), Arc::new(shared))
    }

    fn listen(address: SocketAddr, shared: Arc<Shared>) -> WebServer {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let accepts = shared.clone();
        let accepting = thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if accepts.ends.load(Ordering::SeqCst) {
                    break;
                }
                accepts.connections.fetch_add(1, Ordering::SeqCst);
                lock(&accepts.open).push(stream.try_clone().unwrap());
                let shared = accepts.clone();
                thread::spawn(move || shared.serve(stream));
            }
        });
        WebServer { address, shared, accepting: Some(accepting) }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Closes all connections, and listens no more.
    pub fn stop(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            accepting.join().unwrap();
        }
        for stream in lock(&self.shared.open).drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Listens again.
    pub fn go_on(&mut self) {
        self.shared.ends.store(false, Ordering::SeqCst);
        *self = WebServer::listen(self.address, self.shared.clone());
    }

    pub fn asked(&self) -> Vec<Asked> {
        lock(&self.shared.asked).clone()
    }

    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        if self.accepting.is_some() {
            self.stop();
        }
    }
}

impl Shared {
    fn serve(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        while let Some(Ok(first)) = lines.next() {
            let header = |line: String| {
                let (name, value) = line.split_once(':')?;
                Some((name.to_lowercase(), value.trim().to_owned()))
            };
            let headers = lines.by_ref().map_while(Result::ok).take_while(|line| !line.is_empty());
            let headers = headers.filter_map(header).collect();
            let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
            let asked = {
                let mut all = lock(&self.asked);
                let nth = all.len();
                all.push(Asked { nth, path, headers });
                all.last().unwrap().clone()
            };
            match (self.answer)(&asked) {
                Answer::Keep(answer) if stream.write_all(&answer).is_ok() => {}
                Answer::Keep(_) => break,
                Answer::Trickle(answer, first) => {
                    let (first, rest) = answer.split_at(first);
                    let _ = stream.write_all(first);
                    for byte in rest.chunks(1) {
                        thread::sleep(Duration::from_millis(50));
                        if stream.write_all(byte).is_err() {
                            break;
                        }
                    }
                    break;
                }
                Answer::Close(answer) => {
                    let _ = stream.write_all(&answer);
                    break;
                }
            }
        }
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
}

/// An answer with a status, these lines of headers, and a body whose length is told.
pub fn answer(status: &str, headers: &str, body: &[u8]) -> Answer {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
    Answer::Keep([head.as_bytes(), body].concat())
}

/// The `ETag` of [`after_opening`]'s image.
pub const TAG: &str = "\"one\"";

/// A server that opens an image well, and answers the questions after that by `later`. Returns it with the image.
pub fn after_opening(
    content: Vec<u8>,
    later: impl Fn(&Asked, &[u8]) -> Answer + Send + Sync + 'static,
) -> (WebServer, Arc<Vec<u8>>) {
    let content = Arc::new(content);
    let image = content.clone();
    let server = WebServer::start(move |asked| match asked.nth {
        0 => part(asked, &image, TAG),
        _ => later(asked, &image),
    });
    (server, content)
}

/// The range of the content that was asked for, with an ETag.
pub fn part(asked: &Asked, content: &[u8], etag: &str) -> Answer {
    if asked.header("if-match").is_some_and(|known| known != etag) {
        return answer("412 Precondition Failed", "", b"");
    }
    let Some((first, end)) = asked.range() else { return answer("200 OK", "", content) };
    let headers =
        format!("Content-Range: bytes {first}-{}/{}\r\nETag: {etag}\r\n", end - 1, content.len());
    answer("206 Partial Content", &headers, &content[first..end])
}
