//! The handshake: a task on the control loop that never blocks.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use event_loop::{EventLoop, Lane, Readiness};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{Shutdown, shutdown};
use tls::{Acceptor, MAX_EXPANSION, MAX_PLAIN, Progress, Session, SessionError};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::origins::{Origin, Turns};
use super::server::{first, has_hung_up};
use super::session::handshake::{ExportInfo, HandshakeError, Negotiation, Next, Tls};
use super::session::transmission::Agreed;
use super::wire::option::{HEADER_LEN, MAX_DATA, OptionHeader};

/// Most options, or receives, in a row before other tasks of the loop get their turn.
const TURN: u32 = 16;

/// Bytes of data of options that any number of clients may send at once. Options of usual clients have less.
const SMALL: usize = 4 << 10;

/// Clients that may send larger options at once.
const LARGE_OPTIONS: usize = 16;

/// Time for the data of a larger option, nanoseconds.
const LARGE_NS: u64 = 10_000_000_000;

/// Time for a client to read an error before its connection is closed, in nanoseconds.
const LAST_WORDS_NS: u64 = 2_000_000_000;

/// Why there is no transmission phase.
#[derive(Debug)]
pub(super) enum Failure {
    /// The client disconnected.
    Left,
    /// The client disconnected during the TLS handshake, as clients do that refuse the certificate.
    LeftTls,
    /// The client violated the protocol.
    Rules(HandshakeError),
    /// The socket failed.
    Socket(Errno),
    /// The client took too long.
    Late,
    /// TLS failed; the client received an alert.
    Tls(SessionError),
}

impl From<HandshakeError> for Failure {
    fn from(error: HandshakeError) -> Self {
        Failure::Rules(error)
    }
}

/// What the clients of a server may do a few times at once.
pub(super) struct Limits {
    /// Send an option of more than [`SMALL`] bytes.
    large: Semaphore,
    /// Have a thread of the pool compute the server's part of TLS's handshake. The others wait, so that half of the
    /// processors remain for requests. Hosts take turns: one that begins many handshakes delays its own.
    crypto: Turns,
    /// TLS's turn on the pool.
    lane: Lane,
}

impl Limits {
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let crypto = Turns::new((processors / 2).max(1));
        Limits { large: Semaphore::new(LARGE_OPTIONS), crypto, lane: Lane::default() }
    }
}

/// Waits for a permit, in the order of arrival.
async fn permit(permits: &Semaphore) -> Result<SemaphorePermit<'_>, Failure> {
    // They are never closed.
    permits.acquire().await.map_err(|_| Failure::Left)
}

/// TLS of a client in the transmission phase.
pub(super) struct Secured {
    pub(super) session: Session,
    /// Plaintext that arrived with the end of the handshake and belongs to the transmission phase.
    pub(super) plain: Vec<u8>,
}

/// The result of the negotiation.
pub(super) struct Negotiated {
    pub(super) export: Arc<ExportInfo>,
    pub(super) agreed: Agreed,
    pub(super) secured: Option<Box<Secured>>,
}

/// A client's socket during the handshake.
struct Client<'a> {
    limits: &'a Limits,
    socket: Arc<OwnedFd>,
    ready: Readiness,
    pace: Pace,
    tls: Option<Box<Secured>>,
}

/// The result of a step of TLS's handshake.
struct Step {
    session: Session,
    plain: Vec<u8>,
    /// Bytes to send.
    out: Vec<u8>,
    progress: Result<Progress, SessionError>,
}

/// Yields to other tasks of the loop now and then.
struct Pace {
    event_loop: EventLoop,
    left: u32,
}

impl Pace {
    async fn step(&mut self) {
        self.left -= 1;
        if self.left == 0 {
            self.left = TURN;
            self.event_loop.sleep_until(self.event_loop.now_ns()).await;
        }
    }
}

/// Negotiates with a client until it has chosen an export, with TLS if there is an acceptor. Reads nothing
/// beyond the handshake from the socket, except what is in `secured`.
pub(super) async fn negotiate(
    event_loop: &EventLoop,
    socket: &Arc<OwnedFd>,
    acceptor: Option<&Acceptor>,
    limits: &Limits,
    exports: impl Fn() -> Vec<Arc<ExportInfo>>,
) -> Result<Negotiated, Failure> {
    let events = (PollFlags::POLLIN | PollFlags::POLLOUT).bits().cast_unsigned().into();
    let ready = Readiness::new(event_loop, socket.clone(), events);
    let pace = Pace { event_loop: event_loop.clone(), left: TURN };
    let mut client = Client { limits, socket: socket.clone(), ready, pace, tls: None };
    let mut negotiation = Negotiation::new(acceptor.map_or(Tls::Off, |_| Tls::Required));
    client.send(&Negotiation::greeting()).await?;
    let mut flags = [0; 4];
    client.fill(&mut flags).await?;
    negotiation.client_flags(u32::from_be_bytes(flags))?;
    let (mut data, mut out) = (Vec::new(), Vec::new());
    loop {
        let mut header = [0; HEADER_LEN];
        client.fill(&mut header).await?;
        let OptionHeader { option, len } =
            OptionHeader::parse(&header).map_err(|_| HandshakeError::BadMagic)?;
        if len > MAX_DATA {
            return Err(HandshakeError::TooLong { option, len }.into());
        }
        let is_large = len as usize > SMALL;
        let permit = if is_large { Some(permit(&limits.large).await?) } else { None };
        data.resize(len as usize, 0);
        match permit {
            None => client.fill(&mut data).await?,
            Some(_) => {
                let late = event_loop.sleep_until(event_loop.now_ns() + LARGE_NS);
                first(client.fill(&mut data), late).await.ok_or(Failure::Late)??;
            }
        }
        out.clear();
        let exports = exports();
        let next = negotiation.option(option, &data, &exports, &mut out)?;
        if permit.is_some() {
            data = Vec::new();
        }
        drop(permit);
        client.send(&out).await?;
        match (next, acceptor) {
            (Next::Option, _) => {}
            (Next::StartTls, Some(acceptor)) => client.start_tls(acceptor).await?,
            (Next::Leave | Next::StartTls, _) => return Err(Failure::Left),
            (Next::Transmission(index, agreed), _) => match exports.get(index) {
                Some(export) => {
                    let (export, secured) = (export.clone(), client.tls);
                    return Ok(Negotiated { export, agreed, secured });
                }
                None => return Err(Failure::Left),
            },
        }
        client.pace.step().await;
    }
}

impl Client<'_> {
    /// Receives exactly that many bytes.
    async fn fill(&mut self, buf: &mut [u8]) -> Result<(), Failure> {
        let mut filled = 0;
        while let Some(rest) = buf.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let Client { ready, pace, tls, .. } = self;
            let Some(tls) = tls else {
                filled += take(ready, rest).await?;
                continue;
            };
            if tls.plain.is_empty() {
                let Secured { session, plain } = &mut **tls;
                let mut out = Vec::new();
                let progress = session.process(&mut out, &mut |data| plain.extend(data));
                put(ready, &out).await?;
                match progress.map_err(Failure::Tls)? {
                    Progress::Data => {}
                    Progress::Input => {
                        let bytes = take(ready, session.input()).await?;
                        session.received(bytes);
                        pace.step().await;
                    }
                    Progress::Closed => return Err(Failure::Left),
                }
            }
            let part = rest.len().min(tls.plain.len());
            rest[..part].copy_from_slice(&tls.plain[..part]);
            tls.plain.drain(..part);
            filled += part;
        }
        Ok(())
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let Some(tls) = &mut self.tls else {
            return put(&self.ready, bytes).await;
        };
        let mut out = vec![0; bytes.len().min(MAX_PLAIN) + MAX_EXPANSION];
        for part in bytes.chunks(MAX_PLAIN) {
            let len = tls.session.encrypt(part, &mut out).map_err(Failure::Tls)?;
            put(&self.ready, &out[..len]).await?;
        }
        Ok(())
    }

    /// Performs the TLS handshake, its computations on threads of the pool.
    async fn start_tls(&mut self, acceptor: &Acceptor) -> Result<(), Failure> {
        let mut session = acceptor.session().map_err(Failure::Tls)?;
        let mut plain = Vec::new();
        self.receive_tls(&mut session).await?;
        // A client that has left after its hello costs no signature.
        let mut may_have_left = true;
        let origin = Origin::of(&self.socket);
        loop {
            let permit = self.limits.crypto.turn(origin).await;
            if std::mem::take(&mut may_have_left) && has_hung_up(&self.socket) {
                return Err(Failure::LeftTls);
            }
            let step = self.step(session, plain).await?;
            drop(permit);
            let sent = put(&self.ready, &step.out).await;
            (session, plain) = (step.session, step.plain);
            match step.progress {
                Err(error) => {
                    self.part().await;
                    return Err(Failure::Tls(error));
                }
                Ok(_) if !session.is_handshaking() => {
                    sent?;
                    break;
                }
                Ok(Progress::Input) => {
                    sent?;
                    self.receive_tls(&mut session).await?;
                }
                Ok(Progress::Data) => {}
                Ok(Progress::Closed) => return Err(Failure::LeftTls),
            }
        }
        self.tls = Some(Box::new(Secured { session, plain }));
        Ok(())
    }

    /// Receives a part of TLS's handshake.
    async fn receive_tls(&mut self, session: &mut Session) -> Result<(), Failure> {
        let taken = take(&self.ready, session.input()).await;
        let left = |failure| match failure {
            Failure::Left => Failure::LeftTls,
            other => other,
        };
        session.received(taken.map_err(left)?);
        self.pace.step().await;
        Ok(())
    }

    /// Has a thread process what has arrived: a signature of RSA takes a millisecond or more.
    ///
    /// If the future is dropped before the thread begins, the thread computes nothing.
    async fn step(&self, mut session: Session, mut plain: Vec<u8>) -> Result<Step, Failure> {
        let step = self.pace.event_loop.compute(&self.limits.lane, move || {
            let mut out = Vec::new();
            let progress = session.process(&mut out, &mut |data| plain.extend(data));
            Step { session, plain, out, progress }
        });
        step.await.map_err(|_| Failure::LeftTls)
    }

    /// Gives the client time to read the last message: closing a socket with unread input discards
    /// sent data.
    async fn part(&mut self) {
        let Client { socket, ready, pace, .. } = self;
        let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
        let event_loop = pace.event_loop.clone();
        let read = async {
            let mut rest = [0; 512];
            while take(ready, &mut rest).await.is_ok() {
                pace.step().await;
            }
        };
        first(read, event_loop.sleep_until(event_loop.now_ns() + LAST_WORDS_NS)).await;
    }
}

/// Receives at least one byte.
async fn take(ready: &Readiness, buf: &mut [u8]) -> Result<usize, Failure> {
    match ready.receive(buf).await {
        Ok(0) | Err(Errno::ECONNRESET) => Err(Failure::Left),
        received => received.map_err(Failure::Socket),
    }
}

async fn put(ready: &Readiness, bytes: &[u8]) -> Result<(), Failure> {
    ready.send_all(bytes).await.map_err(|errno| match errno {
        Errno::EPIPE | Errno::ECONNRESET => Failure::Left,
        errno => Failure::Socket(errno),
    })
}
