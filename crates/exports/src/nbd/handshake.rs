//! The handshake's bytes: a task on the control loop, which never blocks and takes what comes.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use event_loop::{EventLoop, Readiness};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{MsgFlags, recv, send};

use super::session::handshake::{ExportInfo, HandshakeError, Negotiation, Next};
use super::session::transmission::Agreed;
use super::wire::option::{HEADER_LEN, MAX_DATA, OptionHeader};

/// Options taken in a row before other tasks of the loop get their turn.
const TURN: u32 = 16;

/// Why there is no transmission phase.
#[derive(Debug)]
pub(super) enum Failure {
    /// The client left.
    Left,
    /// It broke the rules.
    Rules(HandshakeError),
    /// Its socket failed.
    Socket(Errno),
}

impl From<HandshakeError> for Failure {
    fn from(error: HandshakeError) -> Self {
        Failure::Rules(error)
    }
}

/// A client's socket during the handshake.
struct Client {
    socket: Arc<OwnedFd>,
    ready: Readiness,
}

/// Negotiates with a client until it has chosen an export. Nothing beyond the handshake has been taken
/// from the socket then.
pub(super) async fn negotiate(
    event_loop: &EventLoop,
    socket: &Arc<OwnedFd>,
    exports: impl Fn() -> Vec<Arc<ExportInfo>>,
) -> Result<(Arc<ExportInfo>, Agreed), Failure> {
    let events = (PollFlags::POLLIN | PollFlags::POLLOUT).bits().cast_unsigned().into();
    let ready = Readiness::new(event_loop, socket.clone(), events);
    let client = Client { socket: socket.clone(), ready };
    let mut negotiation = Negotiation::default();
    client.send(&Negotiation::greeting()).await?;
    let mut flags = [0; 4];
    client.fill(&mut flags).await?;
    negotiation.client_flags(u32::from_be_bytes(flags))?;
    let (mut data, mut out) = (Vec::new(), Vec::new());
    let mut turn = TURN;
    loop {
        let mut header = [0; HEADER_LEN];
        client.fill(&mut header).await?;
        let OptionHeader { option, len } =
            OptionHeader::parse(&header).map_err(|_| HandshakeError::BadMagic)?;
        if len > MAX_DATA {
            return Err(HandshakeError::TooLong { option, len }.into());
        }
        data.resize(len as usize, 0);
        client.fill(&mut data).await?;
        out.clear();
        let exports = exports();
        let next = negotiation.option(option, &data, &exports, &mut out)?;
        client.send(&out).await?;
        match next {
            Next::Option => {}
            Next::Leave => return Err(Failure::Left),
            Next::Transmission(index, agreed) => match exports.get(index) {
                Some(export) => return Ok((export.clone(), agreed)),
                None => return Err(Failure::Left),
            },
        }
        turn -= 1;
        if turn == 0 {
            turn = TURN;
            event_loop.sleep_until(event_loop.now_ns()).await;
        }
    }
}

impl Client {
    async fn fill(&self, buf: &mut [u8]) -> Result<(), Failure> {
        let mut filled = 0;
        while let Some(rest) = buf.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match recv(self.socket.as_raw_fd(), rest, MsgFlags::MSG_DONTWAIT) {
                Ok(0) | Err(Errno::ECONNRESET) => return Err(Failure::Left),
                Ok(bytes) => filled += bytes,
                Err(Errno::EAGAIN) => self.ready.wait().await,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(Failure::Socket(errno)),
            }
        }
        Ok(())
    }

    async fn send(&self, mut bytes: &[u8]) -> Result<(), Failure> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while !bytes.is_empty() {
            match send(self.socket.as_raw_fd(), bytes, flags) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(Errno::EAGAIN) => self.ready.wait().await,
                Err(Errno::EINTR) => {}
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(Failure::Left),
                Err(errno) => return Err(Failure::Socket(errno)),
            }
        }
        Ok(())
    }
}
