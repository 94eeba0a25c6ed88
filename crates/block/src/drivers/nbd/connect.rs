//! Connecting to a server: addresses, a socket, the handshake. All of it in tasks that never block, except
//! that a thread resolves names, since getaddrinfo(3) blocks.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use event_loop::{EventLoop, LoopHandle, Readiness, oneshot, until};
use nbd_wire::client::{
    EXPORT_LEN, Handshake, MAGIC_LEN, Nonsense, OLDSTYLE_LEN, OPTION_REPLY_LEN, OptionAnswer,
    OptionReplyHeader, PADDING, encode_go, encode_option, encode_set_meta_context, parse_export,
    parse_oldstyle,
};
use nbd_wire::option::{OptionReply, code};
use nbd_wire::reply::ReplyMode;
use nbd_wire::{MAX_PAYLOAD, flag, handshake_flag};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrLike, SockaddrStorage, UnixAddr, VsockAddr, connect,
    getpeername, getsockopt, setsockopt, socket, sockopt,
};

use tls::{Client, Connector, MAX_EXPANSION, MAX_PLAIN, Progress, Session, SessionError};

use super::agreed::Agreed;
use crate::options::{NbdOptions, NbdServerAddr};

/// Time limit of a server from the first packet to the end of the handshake, nanoseconds.
const PATIENCE_NS: u64 = 10_000_000_000;
/// Pause before the next attempt at a UNIX socket with a full backlog, nanoseconds.
const QUEUE_FULL_NS: u64 = 10_000_000;
/// Length of an abstract name that fills its address, bytes.
const ABSTRACT_LEN: usize = 107;
/// Most replies to one option.
const MAX_REPLIES: u32 = 64;
/// `NBD_REP_ERR_UNSUP`.
const UNSUPPORTED: u32 = 0x8000_0001;
/// `NBD_REP_ERR_TLS_REQD`.
const TLS_REQUIRED: u32 = 0x8000_0005;
/// `NBD_REP_ERR_UNKNOWN`.
const NO_SUCH_EXPORT: u32 = 0x8000_0006;
/// The context of the block status.
const ALLOCATION: &str = "base:allocation";

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// The address is invalid, or no process listens there.
    Connect(String, Errno),
    /// The name cannot be resolved.
    Resolve(String),
    /// The server disconnected during the handshake.
    Left,
    /// The server disconnected when it was asked for this export, as it does without one of that name.
    LeftExport(String),
    /// The server disconnected as soon as TLS was there, as it does with a client that it does not trust.
    LeftTls,
    /// The socket failed.
    Socket(Errno),
    /// The server violated the protocol.
    Rules(&'static str),
    /// The server does not answer.
    Silence,
    /// The server refuses, with this text.
    Refused(String),
    /// The offered export cannot be used.
    Unusable(String),
    /// TLS failed.
    Tls(String),
    /// The only connection there can be was inherited, and has been used.
    Used,
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::Connect(to, errno) => {
                write!(f, "Failed to connect to '{to}': {}", errno.desc())
            }
            ConnectError::Resolve(why) => f.write_str(why),
            ConnectError::Left => f.write_str("Failed to read data: the server left"),
            ConnectError::LeftExport(export) => write!(
                f,
                "Failed to read export length: the server left when it was asked for export '{export}': check \
                 that it has one of that name"
            ),
            ConnectError::LeftTls => f.write_str(
                "Failed to read data: the server left after the TLS handshake: check that it accepts the client's \
                 certificate, client-cert.pem in 'dir' of tls-creds",
            ),
            ConnectError::Socket(errno) => write!(f, "the socket failed: {}", errno.desc()),
            ConnectError::Rules(why) => f.write_str(why),
            ConnectError::Silence => write!(
                f,
                "the server has not finished the handshake within {} seconds",
                PATIENCE_NS / 1_000_000_000
            ),
            ConnectError::Refused(why) | ConnectError::Unusable(why) => f.write_str(why),
            ConnectError::Tls(why) => write!(f, "TLS handshake failed: {why}"),
            ConnectError::Used => f.write_str("an inherited socket cannot be connected again"),
        }
    }
}

impl From<Nonsense> for ConnectError {
    fn from(nonsense: Nonsense) -> Self {
        ConnectError::Rules(nonsense.0)
    }
}

/// A connection in the transmission phase.
pub(crate) struct Connected {
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) agreed: Agreed,
    pub(crate) secured: Option<Secured>,
}

/// TLS of a connection in the transmission phase.
pub(crate) struct Secured {
    pub(super) session: Session<Client>,
    /// Received plaintext that was not used yet.
    pub(super) plain: Vec<u8>,
}

/// The address, and credentials for TLS.
#[derive(Clone)]
pub(crate) struct Target {
    pub(super) options: NbdOptions,
    pub(super) tls: Option<Connector>,
    /// With `server.type=fd`, the socket, until the first connection has used it.
    pub(super) inherited: Option<Arc<OwnedFd>>,
}

impl Target {
    /// Whether there can be one connection only, over a socket that the process inherited.
    pub(super) fn is_inherited(&self) -> bool {
        self.options.inherited().is_some()
    }
}

/// Connects and negotiates within a time limit.
pub(crate) async fn connect_to(
    event_loop: &EventLoop,
    target: &Target,
) -> Result<Connected, ConnectError> {
    let Target { options, tls, inherited } = target;
    let connecting = async {
        let fd = match inherited {
            Some(socket) => socket.clone(),
            None => open_socket(event_loop, &options.server).await?,
        };
        let events = (PollFlags::POLLIN | PollFlags::POLLOUT).bits().cast_unsigned().into();
        let ready = Readiness::new(event_loop, fd.clone(), events);
        let mut server = Server { ready, secured: None };
        let agreed = negotiate(&mut server, &options.export, tls.as_ref()).await?;
        Ok(Connected { fd, agreed, secured: server.secured })
    };
    let deadline = event_loop.sleep_until(event_loop.now_ns() + PATIENCE_NS);
    until(connecting, deadline).await.unwrap_or(Err(ConnectError::Silence))
}

/// The same on another loop, for a loop that may not connect.
pub(crate) async fn connect_on(
    connector: &LoopHandle,
    target: &Target,
) -> Result<Connected, ConnectError> {
    let (done, connected) = oneshot::channel();
    let target = target.clone();
    let connecting = move |event_loop: &EventLoop| {
        let on_loop = event_loop.clone();
        event_loop.spawn(async move { done.send(connect_to(&on_loop, &target).await) });
    };
    // This fails only after the node is gone, which keeps the thread.
    connector.spawn(connecting).map_err(|_| ConnectError::Left)?;
    connected.await.unwrap_or(Err(ConnectError::Left))
}

/// Connects as the options of a new node say. With `open-timeout`, repeats that for so
/// long.
pub(crate) async fn open(
    event_loop: &EventLoop,
    target: &Target,
) -> Result<Connected, ConnectError> {
    let timeout_ns = u64::from(target.options.open_timeout) * 1_000_000_000;
    let deadline = event_loop.now_ns() + timeout_ns;
    let mut pause = Pause::default();
    loop {
        let tried = connect_to(event_loop, target).await;
        let again = event_loop.now_ns() + pause.next_ns();
        match tried {
            // A server that refuses will refuse again.
            Err(
                ConnectError::Connect(..)
                | ConnectError::Left
                | ConnectError::LeftExport(_)
                | ConnectError::Socket(_),
            ) if again < deadline && !target.is_inherited() => {
                event_loop.sleep_until(again).await;
            }
            tried => return tried,
        }
    }
}

/// Pauses between attempts: 1, 2, 4, 8, then always 16 seconds, as in QEMU.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Pause(u32);

impl Pause {
    pub(super) fn next_ns(&mut self) -> u64 {
        let seconds = 1u64 << self.0;
        self.0 = (self.0 + 1).min(4);
        seconds * 1_000_000_000
    }
}

// ---- sockets -----------------------------------------------------------------------------------

async fn open_socket(
    event_loop: &EventLoop,
    server: &NbdServerAddr,
) -> Result<Arc<OwnedFd>, ConnectError> {
    match server {
        NbdServerAddr::Unix { path } => {
            let name = path.display().to_string();
            let address =
                UnixAddr::new(path).map_err(|errno| ConnectError::Connect(name.clone(), errno))?;
            connect_one(event_loop, AddressFamily::Unix, &address, &name).await
        }
        NbdServerAddr::Abstract { name, tight } => {
            let mut bytes = name.as_os_str().as_encoded_bytes().to_vec();
            if !tight {
                bytes.resize(ABSTRACT_LEN.max(bytes.len()), 0);
            }
            let name = name.display().to_string();
            let address = UnixAddr::new_abstract(&bytes)
                .map_err(|errno| ConnectError::Connect(name.clone(), errno))?;
            connect_one(event_loop, AddressFamily::Unix, &address, &name).await
        }
        NbdServerAddr::Vsock { cid, port } => {
            let address = VsockAddr::new(*cid, *port);
            connect_one(event_loop, AddressFamily::Vsock, &address, &server.to_string()).await
        }
        NbdServerAddr::Inet { host, port, ipv4, ipv6 } => {
            let name = format!("{host}:{port}");
            let found = resolve(host, *port).await?;
            let usable = found.into_iter().filter(|a| if a.is_ipv4() { *ipv4 } else { *ipv6 });
            let mut last = ConnectError::Resolve(format!(
                "address resolution failed for {name}: no address of that family"
            ));
            for address in usable {
                let family =
                    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
                let address = SockaddrStorage::from(address);
                match connect_one(event_loop, family, &address, &name).await {
                    Ok(fd) => {
                        // Otherwise a request waits for the acknowledgement of earlier ones.
                        let _ = setsockopt(&fd, sockopt::TcpNoDelay, &true);
                        // Otherwise the crash of the server's machine is not noticed.
                        let _ = setsockopt(&fd, sockopt::KeepAlive, &true);
                        return Ok(fd);
                    }
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
        NbdServerAddr::Fd { .. } => Err(ConnectError::Used),
    }
}

async fn connect_one(
    event_loop: &EventLoop,
    family: AddressFamily,
    address: &dyn SockaddrLike,
    name: &str,
) -> Result<Arc<OwnedFd>, ConnectError> {
    let fail = |errno| ConnectError::Connect(name.to_owned(), errno);
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = Arc::new(socket(family, SockType::Stream, flags, None).map_err(fail)?);
    loop {
        match connect(fd.as_raw_fd(), address) {
            Ok(()) => return Ok(fd),
            Err(Errno::EINPROGRESS | Errno::EINTR) => break,
            // The backlog is full; no event reports the end of that.
            Err(Errno::EAGAIN) => {
                event_loop.sleep_until(event_loop.now_ns() + QUEUE_FULL_NS).await;
            }
            Err(errno) => return Err(fail(errno)),
        }
    }
    let events = PollFlags::POLLOUT.bits().cast_unsigned().into();
    let ready = Readiness::new(event_loop, fd.clone(), events);
    loop {
        ready.wait().await;
        match getsockopt(&fd, sockopt::SocketError) {
            Ok(0) => {}
            Ok(errno) => return Err(fail(Errno::from_raw(errno))),
            Err(errno) => return Err(fail(errno)),
        }
        // Vsock wakes pollers when the connecting packet has left, too.
        match getpeername::<SockaddrStorage>(fd.as_raw_fd()) {
            Ok(_) => return Ok(fd),
            Err(Errno::ENOTCONN) => {}
            Err(errno) => return Err(fail(errno)),
        }
    }
}

async fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, ConnectError> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let (sender, receiver) = oneshot::channel();
    let name = host.to_owned();
    let lookup = move || {
        let found = (name.as_str(), port).to_socket_addrs();
        sender.send(found.map(Iterator::collect::<Vec<_>>).map_err(|error| error.to_string()));
    };
    let fail = |why: String| {
        // The standard library's prefix repeats what the message says.
        let why = why.trim_start_matches("failed to lookup address information: ");
        ConnectError::Resolve(format!("address resolution failed for {host}:{port}: {why}"))
    };
    let thread = std::thread::Builder::new().name("nbd-resolve".into()).spawn(lookup);
    thread.map_err(|error| fail(error.to_string()))?;
    let found = receiver.await.unwrap_or_else(|gone| Err(gone.to_string()));
    found.map_err(fail)
}

/// A server's socket during the handshake.
struct Server {
    ready: Readiness,
    secured: Option<Secured>,
}

impl Server {
    async fn fill(&mut self, buf: &mut [u8]) -> Result<(), ConnectError> {
        let mut filled = 0;
        while let Some(rest) = buf.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            filled += match &mut self.secured {
                None => take(&self.ready, rest).await?,
                Some(Secured { plain, .. }) if !plain.is_empty() => {
                    let len = rest.len().min(plain.len());
                    rest[..len].copy_from_slice(&plain[..len]);
                    plain.drain(..len);
                    len
                }
                Some(_) => {
                    self.decrypt().await?;
                    0
                }
            };
        }
        Ok(())
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), ConnectError> {
        let Some(Secured { session, .. }) = &mut self.secured else {
            return put(&self.ready, bytes).await;
        };
        let mut record = vec![0; MAX_PLAIN + MAX_EXPANSION];
        for part in bytes.chunks(MAX_PLAIN) {
            let len = session.encrypt(part, &mut record).map_err(tls_failed)?;
            put(&self.ready, &record[..len]).await?;
        }
        Ok(())
    }

    /// With TLS, receives the next plaintext.
    async fn decrypt(&mut self) -> Result<(), ConnectError> {
        let Server { ready, secured } = self;
        let Some(Secured { session, plain }) = secured else { return Ok(()) };
        let mut out = Vec::new();
        while plain.is_empty() {
            out.clear();
            let progress = session.process(&mut out, &mut |data| plain.extend(data));
            put(ready, &out).await?;
            match progress.map_err(tls_failed)? {
                Progress::Data => {}
                Progress::Closed => return Err(ConnectError::Left),
                Progress::Input => {
                    let bytes = take(ready, session.input()).await?;
                    session.received(bytes);
                }
            }
        }
        Ok(())
    }

    /// Negotiates TLS, and performs the TLS handshake.
    async fn start_tls(&mut self, connector: &Connector) -> Result<(), ConnectError> {
        let mut message = Vec::new();
        encode_option(code::STARTTLS, &[], &mut message);
        if let Some((_, why)) = self.option(code::STARTTLS, &message, |_| {}).await? {
            let mut message = "Denied by server for option 5 (starttls)".to_owned();
            if !why.is_empty() {
                message += &format!(": {why}");
            }
            return Err(ConnectError::Refused(message));
        }
        let Server { ready, secured } = self;
        let mut session = connector.session().map_err(tls_failed)?;
        let (mut out, mut plain) = (Vec::new(), Vec::new());
        loop {
            out.clear();
            let progress = session.process(&mut out, &mut |data| plain.extend(data));
            let sent = put(ready, &out).await;
            let progress = progress.map_err(tls_failed)?;
            sent?;
            if !session.is_handshaking() {
                break;
            }
            match progress {
                Progress::Data => {}
                Progress::Closed => return Err(ConnectError::Left),
                Progress::Input => {
                    let bytes = take(ready, session.input()).await?;
                    session.received(bytes);
                }
            }
        }
        *secured = Some(Secured { session, plain });
        Ok(())
    }

    /// Sends an option and receives its replies up to the last one. `tell` gets each reply. `None`:
    /// success; otherwise the reason of a refusal.
    async fn option(
        &mut self,
        option: u32,
        message: &[u8],
        mut tell: impl FnMut(OptionReply<'_>),
    ) -> Result<Option<(u32, String)>, ConnectError> {
        self.send(message).await?;
        let mut data = Vec::new();
        for _ in 0..MAX_REPLIES {
            let mut header = [0; OPTION_REPLY_LEN];
            self.fill(&mut header).await?;
            let header = OptionReplyHeader::parse(&header)?;
            if header.option != option {
                return Err(ConnectError::Rules("a reply to another option than the one sent"));
            }
            data.resize(header.len as usize, 0);
            self.fill(&mut data).await?;
            match OptionAnswer::parse(header.kind, &data)? {
                OptionAnswer::Reply(OptionReply::Ack) => return Ok(None),
                OptionAnswer::Reply(reply) => tell(reply),
                OptionAnswer::Refused { code, message } => {
                    return Ok(Some((code, message.to_owned())));
                }
                OptionAnswer::Unknown => {}
            }
        }
        Err(ConnectError::Rules("too many replies to an option"))
    }

    /// The same for an optional option. Returns whether the server supports it.
    async fn can(&mut self, option: u32) -> Result<bool, ConnectError> {
        let mut message = Vec::new();
        encode_option(option, &[], &mut message);
        match self.option(option, &message, |_| {}).await? {
            None => Ok(true),
            Some((TLS_REQUIRED, _)) => Err(tls_required()),
            Some(_) => Ok(false),
        }
    }
}

fn tls_failed(error: SessionError) -> ConnectError {
    ConnectError::Tls(error.to_string())
}

/// Receives at least one byte.
async fn take(ready: &Readiness, buf: &mut [u8]) -> Result<usize, ConnectError> {
    match ready.receive(buf).await {
        Ok(0) | Err(Errno::ECONNRESET) => Err(ConnectError::Left),
        received => received.map_err(ConnectError::Socket),
    }
}

async fn put(ready: &Readiness, bytes: &[u8]) -> Result<(), ConnectError> {
    ready.send_all(bytes).await.map_err(|errno| match errno {
        Errno::EPIPE | Errno::ECONNRESET => ConnectError::Left,
        errno => ConnectError::Socket(errno),
    })
}

fn tls_required() -> ConnectError {
    ConnectError::Refused("the server requires TLS: Did you forget a valid tls-creds?".to_owned())
}

// ---- the handshake -----------------------------------------------------------------------------

async fn negotiate(
    server: &mut Server,
    export: &str,
    tls: Option<&Connector>,
) -> Result<Agreed, ConnectError> {
    let mut magic = [0; MAGIC_LEN];
    server.fill(&mut magic).await?;
    if Handshake::parse(&magic)? == Handshake::Oldstyle {
        return oldstyle(server, export, tls).await;
    }
    let mut flags = [0; 2];
    server.fill(&mut flags).await?;
    let flags = u16::from_be_bytes(flags);
    let ours = flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
    server.send(&u32::from(ours).to_be_bytes()).await?;
    if ours & handshake_flag::FIXED_NEWSTYLE == 0 {
        // Such a server knows no other option.
        check_no_tls(tls)?;
        return choose(server, export, ours, (ReplyMode::Simple, None)).await;
    }
    if let Some(connector) = tls {
        server.start_tls(connector).await?;
    }
    let extends = server.can(code::EXTENDED_HEADERS).await.map_err(|error| match error {
        ConnectError::Left if tls.is_some() => ConnectError::LeftTls,
        error => error,
    });
    let mode = if extends? {
        ReplyMode::Extended
    } else if server.can(code::STRUCTURED_REPLY).await? {
        ReplyMode::Structured
    } else {
        ReplyMode::Simple
    };
    let mut message = Vec::new();
    let mut allocation = None;
    if mode != ReplyMode::Simple {
        encode_set_meta_context(export, ALLOCATION, &mut message);
        let context = |reply: OptionReply<'_>| {
            if let OptionReply::MetaContext { id, name: ALLOCATION } = reply {
                allocation = Some(id);
            }
        };
        if server.option(code::SET_META_CONTEXT, &message, context).await?.is_some() {
            allocation = None;
        }
    }
    message.clear();
    encode_go(export, &mut message);
    let (mut found, mut sizes) = (None, None);
    let tell = |reply: OptionReply<'_>| match reply {
        OptionReply::Export { size, flags } => found = Some((size, flags)),
        OptionReply::BlockSize { minimum, preferred, maximum } => {
            sizes = Some((minimum, preferred, maximum));
        }
        _ => {}
    };
    match server.option(code::GO, &message, tell).await? {
        None => {}
        Some((TLS_REQUIRED, _)) => return Err(tls_required()),
        // With extended headers, there is no other option to choose an export with.
        Some((UNSUPPORTED, _)) if mode != ReplyMode::Extended => {
            return choose(server, export, ours, (mode, allocation)).await;
        }
        Some((NO_SUCH_EXPORT, _)) => {
            return Err(ConnectError::Refused("Requested export not available".to_owned()));
        }
        Some((code, said)) => {
            let said = if said.is_empty() { String::new() } else { format!(": {said:?}") };
            return Err(ConnectError::Refused(format!(
                "the server refuses export '{export}' (error {code:#x}){said}"
            )));
        }
    }
    let Some((size, flags)) = found else {
        return Err(ConnectError::Rules("the server did not tell of the export"));
    };
    if flags & flag::HAS_FLAGS == 0 {
        return Err(ConnectError::Unusable("Export flags are not set".to_owned()));
    }
    describe(size, flags, sizes, mode, allocation).map_err(ConnectError::Unusable)
}

/// Fails if TLS is required.
fn check_no_tls(tls: Option<&Connector>) -> Result<(), ConnectError> {
    match tls {
        Some(_) => Err(ConnectError::Rules("Server does not support STARTTLS")),
        None => Ok(()),
    }
}

/// Reads the description of the only export, after an oldstyle magic.
async fn oldstyle(
    server: &mut Server,
    export: &str,
    tls: Option<&Connector>,
) -> Result<Agreed, ConnectError> {
    check_no_tls(tls)?;
    if !export.is_empty() {
        return Err(ConnectError::Rules("Server does not support non-empty export names"));
    }
    let mut description = [0; OLDSTYLE_LEN];
    server.fill(&mut description).await?;
    let (size, flags) = parse_oldstyle(&description)?;
    server.fill(&mut [0; PADDING]).await?;
    describe(size, flags, None, ReplyMode::Simple, None).map_err(ConnectError::Unusable)
}

/// Chooses an export by `NBD_OPT_EXPORT_NAME`, the only way with old servers. `flags`: the client's handshake flags. `agreed`:
/// the form of replies, and the context `base:allocation`.
async fn choose(
    server: &mut Server,
    export: &str,
    flags: u16,
    agreed: (ReplyMode, Option<u32>),
) -> Result<Agreed, ConnectError> {
    let mut message = Vec::new();
    encode_option(code::EXPORT_NAME, export.as_bytes(), &mut message);
    server.send(&message).await?;
    let mut description = [0; EXPORT_LEN];
    server.fill(&mut description).await.map_err(|error| match error {
        ConnectError::Left => ConnectError::LeftExport(export.to_owned()),
        error => error,
    })?;
    if flags & handshake_flag::NO_ZEROES == 0 {
        server.fill(&mut [0; PADDING]).await?;
    }
    let (size, flags) = parse_export(&description);
    let (mode, allocation) = agreed;
    describe(size, flags, None, mode, allocation).map_err(ConnectError::Unusable)
}

/// Negotiates on a connected socket.
#[cfg(feature = "fuzzing")]
pub(super) async fn shake_hands(
    event_loop: &EventLoop,
    socket: OwnedFd,
    export: &str,
) -> Result<Agreed, ConnectError> {
    let fd = Arc::new(socket);
    let events = (PollFlags::POLLIN | PollFlags::POLLOUT).bits().cast_unsigned().into();
    let ready = Readiness::new(event_loop, fd, events);
    let mut server = Server { ready, secured: None };
    negotiate(&mut server, export, None).await
}

/// Checks the server's description of an export.
fn describe(
    size: u64,
    flags: u16,
    sizes: Option<(u32, u32, u32)>,
    mode: ReplyMode,
    allocation: Option<u32>,
) -> Result<Agreed, String> {
    if size > i64::MAX as u64 - 511 {
        return Err(format!("export length {size} is too large"));
    }
    // QEMU's defaults: sectors, if the export's size is a multiple of them.
    let usual = (if size.is_multiple_of(512) { 512 } else { 1 }, 4096, MAX_PAYLOAD);
    let (minimum, preferred, maximum) = sizes.unwrap_or(usual);
    if !minimum.is_power_of_two() || minimum > 64 << 10 {
        return Err(format!("server minimum block size {minimum} is not valid"));
    }
    if !preferred.is_power_of_two() || preferred < minimum {
        return Err(format!("server preferred block size {preferred} is not valid"));
    }
    if maximum < minimum {
        return Err(format!("server maximum block size {maximum} is not valid"));
    }
    if !size.is_multiple_of(u64::from(minimum)) {
        return Err(format!(
            "export length {size} is not multiple of minimum block size {minimum}"
        ));
    }
    let maximum = maximum.min(MAX_PAYLOAD);
    let maximum = maximum - maximum % minimum;
    Ok(Agreed { size, flags, mode, allocation, minimum, preferred, maximum })
}
