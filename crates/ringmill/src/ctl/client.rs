//! A QMP client: blocking, one command after the other.

use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use control::CtlSocket;
use options::json::{MAX_DEPTH, Nesting};
use serde_json::{Deserializer, Map, Value as Json, json};

/// Time limit for the greeting. A daemon that serves another client on that monitor sends none.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest accepted message in bytes.
const MAX_MESSAGE: u64 = 64 << 20;
/// Most characters of a message that is not QMP in an error.
const MAX_SHOWN: usize = 80;

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum ClientError {
    /// The connection failed.
    Connect(String, io::Error),
    /// The socket failed, or was closed.
    Socket(io::Error),
    /// There is no greeting.
    Silence(String),
    /// The answer is not QMP.
    NotQmp(String),
    /// The command failed, with the daemon's error.
    Refused(String),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientError::Connect(socket, error) => {
                write!(f, "{socket}: connect failed: {error}")
            }
            ClientError::Socket(error) => write!(f, "the monitor: {error}"),
            ClientError::Silence(socket) => write!(
                f,
                "{socket}: no greeting within {} seconds: another client may be connected, or this \
                 is not a QMP monitor",
                PATIENCE.as_secs()
            ),
            ClientError::NotQmp(text) => write!(f, "this is not QMP: {text}"),
            ClientError::Refused(description) => f.write_str(description),
        }
    }
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        ClientError::Socket(error)
    }
}

/// A socket of either kind.
trait Stream: Read + Write {
    fn set_patience(&self, patience: Option<Duration>) -> io::Result<()>;
}

impl Stream for UnixStream {
    fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(patience)
    }
}

impl Stream for TcpStream {
    fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(patience)
    }
}

/// A conversation, past the negotiation.
pub(crate) struct Client {
    stream: BufReader<Box<dyn Stream>>,
    /// The greeting's `package`.
    package: String,
    next_id: u64,
}

impl Client {
    /// Connects and negotiates.
    pub(crate) fn connect(socket: &CtlSocket) -> Result<Self, ClientError> {
        let fail = |error| ClientError::Connect(socket.to_string(), error);
        let stream: Box<dyn Stream> = match socket {
            CtlSocket::Unix(path) => Box::new(UnixStream::connect(path).map_err(fail)?),
            CtlSocket::Inet(address) => Box::new(TcpStream::connect(address).map_err(fail)?),
        };
        stream.set_patience(Some(PATIENCE))?;
        let stream = BufReader::new(stream);
        let mut client = Client { stream, package: String::new(), next_id: 0 };
        let greeting = client.receive().map_err(|error| match error {
            ClientError::Socket(error)
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
            {
                ClientError::Silence(socket.to_string())
            }
            error => error,
        })?;
        if let Some(refused) = greeting.pointer("/error/desc").and_then(Json::as_str) {
            return Err(ClientError::Refused(refused.to_owned()));
        }
        if greeting.get("QMP").is_none() {
            return Err(ClientError::NotQmp(greeting.to_string()));
        }
        let package = greeting["QMP"]["version"]["package"].as_str();
        client.package = package.unwrap_or_default().to_owned();
        client.stream.get_ref().set_patience(None)?;
        client.execute("qmp_capabilities", Map::new())?;
        Ok(client)
    }

    /// Sets how long an answer or an event is waited for; `None`: without limit.
    pub(crate) fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        self.stream.get_ref().set_patience(patience)
    }

    /// Whether the daemon has this program's version. Then this program's table has exactly the daemon's
    /// commands.
    pub(crate) fn is_this_version(&self) -> bool {
        self.package == concat!("ringmill ", env!("CARGO_PKG_VERSION"))
    }

    /// Executes a command and returns its result. Events that arrive meanwhile are dropped.
    pub(crate) fn execute(
        &mut self,
        name: &str,
        arguments: Map<String, Json>,
    ) -> Result<Json, ClientError> {
        self.next_id += 1;
        let id = Json::from(self.next_id);
        let mut command = json!({"execute": name, "id": id});
        if !arguments.is_empty() {
            command["arguments"] = arguments.into();
        }
        let mut line = command.to_string();
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        loop {
            let mut answer = self.receive()?;
            if let Some(error) = answer.get("error") {
                let description = error["desc"].as_str().unwrap_or("the command failed");
                return Err(ClientError::Refused(description.to_owned()));
            }
            if answer.get("id") == Some(&id) {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Waits for the next event; `None`: the daemon has ended.
    pub(crate) fn next_event(&mut self) -> Result<Option<Json>, ClientError> {
        loop {
            match self.receive() {
                Ok(message) if message.get("event").is_some() => return Ok(Some(message)),
                Ok(_) => {}
                Err(ClientError::Socket(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Receives an object, which may have several lines (`pretty=on`).
    fn receive(&mut self) -> Result<Json, ClientError> {
        let mut read =
            Recorded { from: &mut self.stream, beginning: Vec::new(), nesting: Nesting::default() };
        let mut deserializer = Deserializer::from_reader((&mut read).take(MAX_MESSAGE));
        // That limit is 128, and the description of a chain of images has more levels.
        deserializer.disable_recursion_limit();
        let mut values = deserializer.into_iter();
        let received: Option<serde_json::Result<Json>> = values.next();
        match received {
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) if error.is_io() => Err(io::Error::from(error).into()),
            Some(Err(error)) if error.is_syntax() => {
                let mut text = read.beginning;
                text.extend_from_slice(self.stream.buffer());
                Err(ClientError::NotQmp(shown(&text)))
            }
            Some(Err(_)) | None => {
                let gone = "the daemon has closed the connection";
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, gone).into())
            }
        }
    }
}

/// A reader that keeps the beginning of what it has read, and refuses text with too many levels.
struct Recorded<R> {
    from: R,
    beginning: Vec<u8>,
    nesting: Nesting,
}

impl<R: Read> Read for Recorded<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.from.read(buf)?;
        let room = MAX_SHOWN.saturating_sub(self.beginning.len());
        self.beginning.extend(buf.iter().take(len.min(room)));
        let mut read = buf.iter().take(len);
        if read.any(|byte| self.nesting.step(*byte) > MAX_DEPTH) {
            let why = format!("a message has more than {MAX_DEPTH} nested levels");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(len)
    }
}

/// The first line of a foreign peer's text. Control characters would change the terminal.
fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let line = text.trim_start().lines().next().unwrap_or_default();
    line.chars().take(MAX_SHOWN).flat_map(char::escape_debug).collect()
}
