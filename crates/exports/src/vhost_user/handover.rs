//! What a device is handed over as to another process: its listening socket, and for the front end
//! that is connected the messages that bring a back end which knows nothing to where this one is. They
//! are vhost-user's own, so whoever takes over needs no second way to be told of memory and rings, and
//! checks them as it checks a stranger's.

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

/// A session, its rings still running: what does not change while no message is taken from the
/// front end.
#[derive(Debug)]
pub struct SavedSession {
    /// The connection. Nothing of a message has been read from it.
    pub socket: OwnedFd,
    /// What the front end has said, but what starts rings.
    pub messages: Vec<Saved>,
}

/// A device that is about to be handed over.
#[derive(Debug)]
pub struct SavedServer {
    /// The socket that it listens on,
    pub listener: OwnedFd,
    /// and its file, if that is to be removed in the end.
    pub file: Option<PathBuf>,
    /// With the front end that is connected.
    pub session: Option<SavedSession>,
}

/// What is known once all rings have stopped.
#[derive(Debug, Default)]
pub struct SavedRings {
    /// What starts them again.
    pub messages: Vec<Saved>,
    /// What the device has to remember (see [`Device::save`](super::device::Device::save)).
    pub device: Vec<u8>,
}

impl Saved {
    pub(super) fn u64(request: Request, value: u64) -> Self {
        Saved { code: request as u32, payload: value.to_ne_bytes().to_vec(), fds: Vec::new() }
    }

    /// Of a ring: its index and a number.
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

    /// Reading the configuration space: whoever has read it goes by what it has seen.
    pub(super) fn config_seen() -> Self {
        let size = MAX_CONFIG as u32;
        let words = [0, size, 0].map(u32::to_ne_bytes);
        let mut saved = Self::words(Request::GetConfig, &words);
        saved.payload.resize(12 + MAX_CONFIG, 0);
        saved
    }

    /// SET_VRING_KICK, _CALL or _ERR.
    pub(super) fn ring_fd(request: Request, index: u16, fd: Option<&EventFd>) -> io::Result<Self> {
        /// There is no descriptor.
        const NOFD: u64 = 1 << 8;
        let flag = if fd.is_none() { NOFD } else { 0 };
        let mut saved = Self::u64(request, u64::from(index) | flag);
        if let Some(fd) = fd {
            saved.fds.push(fd.fd().as_fd().try_clone_to_owned()?);
        }
        Ok(saved)
    }
}
