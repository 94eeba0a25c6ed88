//! Packets and documents on the socket between the two processes.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use event_loop::{EventLoop, Readiness};
use exports::vhost_user::fd_passing;
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::MsgFlags;
use serde_json::Value as Json;

use super::document::{DESCRIPTORS, Document, content, memory};
use crate::host::{Host, OperatingSystem};

/// Most descriptors of one packet; less than SCM_MAX_FD.
const FDS_AT_ONCE: usize = 200;
/// Longest packet in bytes.
const MAX_PACKET: usize = 4096;

/// A packet: its letter, its contents, its descriptors.
pub(super) type Packet = (u8, Vec<u8>, Vec<OwnedFd>);

/// The end of the old process, on the control loop.
pub(super) struct Packets {
    socket: Arc<OwnedFd>,
    ready: Readiness,
}

impl Packets {
    pub(super) fn new(event_loop: &EventLoop, socket: OwnedFd) -> Self {
        let socket = Arc::new(socket);
        let events = (PollFlags::POLLIN | PollFlags::POLLOUT).bits().cast_unsigned().into();
        let ready = Readiness::new(event_loop, socket.clone(), events);
        Packets { socket, ready }
    }

    pub(super) async fn send(&self, kind: u8, bytes: &[u8], fds: &[OwnedFd]) -> io::Result<()> {
        loop {
            match try_send(&self.socket, kind, bytes, fds) {
                Err(Errno::EAGAIN) => self.ready.wait().await,
                Err(Errno::EINTR) => {}
                result => return Ok(result?),
            }
        }
    }

    pub(super) async fn send_document(
        &self,
        kind: u8,
        json: &Json,
        fds: &[OwnedFd],
    ) -> io::Result<()> {
        let (count, memory) = pack(json, fds.len())?;
        self.send(kind, &count, &[memory]).await?;
        for part in fds.chunks(FDS_AT_ONCE) {
            self.send(DESCRIPTORS, &[], part).await?;
        }
        Ok(())
    }

    /// Waits for a packet.
    ///
    /// # Errors
    ///
    /// The other process has ended.
    pub(super) async fn receive(&self) -> io::Result<Packet> {
        loop {
            match try_receive(&self.socket) {
                Err(Errno::EAGAIN) => self.ready.wait().await,
                Err(Errno::EINTR) => {}
                result => return Ok(result?),
            }
        }
    }
}

/// Sends a packet; blocks until it is sent.
pub(super) fn send(socket: &OwnedFd, kind: u8, bytes: &[u8]) -> io::Result<()> {
    loop {
        match try_send(socket, kind, bytes, &[]) {
            Err(Errno::EAGAIN) => OperatingSystem.wait(socket.as_fd(), PollFlags::POLLOUT),
            Err(Errno::EINTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Waits for a packet; blocks the thread.
pub(super) fn receive_blocking(host: &dyn Host, socket: &OwnedFd) -> io::Result<Packet> {
    loop {
        match try_receive(socket) {
            Err(Errno::EAGAIN) => host.wait(socket.as_fd(), PollFlags::POLLIN),
            Err(Errno::EINTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Waits for a document of that kind; blocks the thread.
///
/// # Errors
///
/// Those of recvmsg(2); `InvalidData`: the packets are no document of that kind.
pub fn receive_document(host: &dyn Host, socket: &OwnedFd, kind: u8) -> io::Result<Document> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, "not what was expected");
    let (found, count, mut memory) = receive_blocking(host, socket)?;
    let (Some(memory), Ok(count)) = (memory.pop(), count.try_into()) else { return Err(wrong()) };
    if found != kind {
        return Err(wrong());
    }
    let count = u32::from_ne_bytes(count) as usize;
    let text = content(memory)?;
    let mut fds = Vec::new();
    while fds.len() < count {
        let (found, _, more) = receive_blocking(host, socket)?;
        if found != DESCRIPTORS || more.is_empty() {
            return Err(wrong());
        }
        fds.extend(more);
    }
    Ok(Document::new(options::json::from_slice(&text)?, fds))
}

fn pack(json: &Json, fds: usize) -> io::Result<([u8; 4], OwnedFd)> {
    let text = memory(json.to_string().as_bytes())?;
    let count = u32::try_from(fds).map_err(io::Error::other)?;
    Ok((count.to_ne_bytes(), text))
}

fn try_send(socket: &OwnedFd, kind: u8, bytes: &[u8], fds: &[OwnedFd]) -> Result<(), Errno> {
    let fds: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let iov = [IoSlice::new(std::slice::from_ref(&kind)), IoSlice::new(bytes)];
    fd_passing::send(socket.as_fd(), &iov, &fds, MsgFlags::MSG_DONTWAIT).map(drop)
}

fn try_receive(socket: &OwnedFd) -> Result<Packet, Errno> {
    let mut buf = [0; MAX_PACKET];
    let received = fd_passing::receive(socket.as_fd(), &mut buf)?;
    match buf.get(..received.len).and_then(<[u8]>::split_first) {
        Some((kind, rest)) => Ok((*kind, rest.to_vec(), received.fds)),
        None => Err(Errno::ECONNRESET),
    }
}
