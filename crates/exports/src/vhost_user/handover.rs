//! The state of a device for a handover to another process: its listening socket and, for the connected
//! front end, the messages that bring a new back end to the same state. They are messages of vhost-user
//! itself. So the new process needs no second parser for memory and rings, and checks these messages like
//! those of a front end.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use super::eventfd::EventFd;
use super::wire::{MAX_CONFIG, Request};

/// A message as a front end would send it.
#[derive(Debug)]
pub struct Saved {
    /// The request's number.
    pub code: u32,
    /// Its payload.
    pub payload: Vec<u8>,
    /// The descriptors that go with it.
    pub fds: Vec<OwnedFd>,
}

/// The state of a session with running rings, until the next message.
///
/// The state changes only when a message of the front end is received.
#[derive(Debug)]
pub struct SavedSession {
    /// The connection, between two messages.
    pub socket: OwnedFd,
    /// The messages of the front end, without those that start rings.
    pub messages: Vec<Saved>,
}

/// The state of a device before its rings stop.
#[derive(Debug)]
pub struct SavedServer {
    /// The listening socket.
    pub listener: OwnedFd,
    /// The socket's file, if it has to be removed at the end.
    pub file: Option<PathBuf>,
    /// The session with the connected front end.
    pub session: Option<SavedSession>,
}

/// The state after all rings have stopped.
#[derive(Debug, Default)]
pub struct SavedRings {
    /// The messages that start the rings again.
    pub messages: Vec<Saved>,
    /// Data of the device (see [`Device::save`](super::device::Device::save)).
    pub device: Vec<u8>,
}

impl Saved {
    pub(super) fn u64(request: Request, value: u64) -> Self {
        Saved { code: request as u32, payload: value.to_ne_bytes().to_vec(), fds: Vec::new() }
    }

    /// A message with the index of a ring and a number.
    pub(super) fn ring(request: Request, index: u16, value: u32) -> Self {
        let words = [u32::from(index), value];
        Self::words(request, &words.map(u32::to_ne_bytes))
    }

    fn words(request: Request, words: &[[u8; 4]]) -> Self {
        Saved { code: request as u32, payload: words.concat(), fds: Vec::new() }
    }

    pub(super) fn fields(request: Request, fields: &[u64], fds: Vec<OwnedFd>) -> Self {
        let payload = fields.iter().flat_map(|field| field.to_ne_bytes()).collect();
        Saved { code: request as u32, payload, fds }
    }

    /// A read of the configuration space: the front end relies on what it has read before.
    pub(super) fn config_seen() -> Self {
        let size = MAX_CONFIG as u32;
        let words = [0, size, 0].map(u32::to_ne_bytes);
        let mut saved = Self::words(Request::GetConfig, &words);
        saved.payload.resize(12 + MAX_CONFIG, 0);
        saved
    }

    /// SET_VRING_KICK, _CALL or _ERR.
    pub(super) fn ring_fd(request: Request, index: u16, fd: Option<&EventFd>) -> io::Result<Self> {
        /// The message has no descriptor.
        const NOFD: u64 = 1 << 8;
        let flag = if fd.is_none() { NOFD } else { 0 };
        let mut saved = Self::u64(request, u64::from(index) | flag);
        if let Some(fd) = fd {
            saved.fds.push(fd.fd().as_fd().try_clone_to_owned()?);
        }
        Ok(saved)
    }
}
