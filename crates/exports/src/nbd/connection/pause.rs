//! Pausing a connection, to continue it here or in another process.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use event_loop::{AlignedBuf, IoBufs, oneshot};
use nix::errno::Errno;

use super::Connection;
use crate::nbd::session::transmission::Agreed;
use crate::nbd::state::{End, append};
use crate::nbd::wire::MAX_PAYLOAD;

/// Most bytes of unfinished messages that all connections of a thread hand over. Connections beyond that are
/// not handed over, because all requests wait while the bytes are copied.
pub(in crate::nbd) const MAX_LEFT: usize = 2 * MAX_PAYLOAD as usize;

/// A client in the transmission phase, for a handover to another process.
///
/// No request of the client is in flight.
#[derive(Debug)]
pub struct SavedClient {
    /// The connection.
    pub socket: OwnedFd,
    /// The negotiated options.
    pub agreed: Agreed,
    /// Received bytes that were not parsed yet, starting with a request.
    pub input: Vec<u8>,
    /// Replies, or parts of replies, that have to be sent first. Shared with a connection that continues here,
    /// because all requests wait for each copy.
    pub output: Arc<Vec<u8>>,
}

#[derive(Default)]
pub(super) struct Pause {
    paused: Cell<bool>,
    /// Informed once nothing is in flight.
    quiet: Cell<Option<oneshot::Sender<()>>>,
    /// Dropped at the end of the connection.
    end: Cell<Option<oneshot::Sender<()>>>,
    /// Cancelled operations of the socket.
    pub(super) receive_called_back: Cell<bool>,
    pub(super) send_called_back: Cell<bool>,
    /// The list of segments to send contains bytes that have to be sent first.
    unsent: Cell<bool>,
    /// Received bytes from the previous process, from the second request on.
    input: RefCell<(Vec<u8>, usize)>,
    /// Bytes from the previous process that have to be sent first.
    output: RefCell<Arc<Vec<u8>>>,
}

impl Pause {
    pub(super) fn new(input: Vec<u8>, output: Arc<Vec<u8>>) -> Self {
        let (input, output) = (RefCell::new((input, 0)), RefCell::new(output));
        Pause { input, output, ..Pause::default() }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused.get()
    }

    /// Whether there are bytes to send before the ready replies.
    pub(super) fn has_output(&self) -> bool {
        self.unsent.get() || !self.output.borrow().is_empty()
    }
}

impl Connection {
    /// Takes no more requests, and cancels the socket's operations. The answer comes when nothing is in
    /// flight. Replies that the client does not take are not waited for. With TLS, sending
    /// continues.
    pub(in crate::nbd) fn pause(&self) -> oneshot::Receiver<()> {
        let (quiet, is_quiet) = oneshot::channel();
        self.pause.quiet.set(Some(quiet));
        self.pause.paused.set(true);
        let (receiving, sending) = (self.receiving.get(), self.sending.get());
        self.pause.receive_called_back.set(receiving);
        self.pause.send_called_back.set(sending);
        if receiving || sending {
            self.event_loop.cancel(&self.socket);
        }
        self.reply_later();
        is_quiet
    }

    /// Continues as before [`pause`](Self::pause).
    pub(in crate::nbd) fn resume(&self) {
        if self.pause.paused.replace(false) {
            drop(self.pause.quiet.take());
            self.go_on();
        }
    }

    pub(super) fn go_on(&self) {
        if self.pause.unsent.take() {
            let bufs = self.send_bufs.take();
            self.send_when_ready(bufs);
        }
        let output = self.pause.output.take();
        if !output.is_empty() {
            match AlignedBuf::io_bufs(output.len(), 64) {
                Some(mut bufs) => {
                    bufs.copy_in(0, &output);
                    self.send(bufs);
                }
                None => self.end_input(End::Socket(Errno::ENOMEM)),
            }
        }
        // The result of a cancelled operation may still come.
        if !self.receiving.get() {
            self.take_requests();
        }
    }

    /// The connection's state for a handover. `None`: it cannot be handed over, because it ends, has TLS, has
    /// been resumed, or has more bytes than `room`, from which its bytes are subtracted.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(in crate::nbd) fn save(&self, room: &mut usize) -> io::Result<Option<SavedClient>> {
        let ends = self.end.get().is_some() || self.deaf.get() || self.secure.is_some();
        if ends || !self.pause.is_paused() || !self.is_quiet() {
            return Ok(None);
        }
        let mut state = self.state.borrow_mut();
        let mut kept = self.pause.output.borrow_mut();
        let output = Arc::make_mut(&mut kept);
        let (left, at) = &*self.pause.input.borrow();
        let left = left.get(*at..).unwrap_or_default();
        let unsent = if self.pause.unsent.get() { self.send_bufs.borrow().len() } else { 0 };
        // Checked before copying, because all requests wait for it.
        let bytes = output.len() + unsent + state.left_len() + left.len();
        let Some(rest) = room.checked_sub(bytes) else { return Ok(None) };
        *room = rest;
        output.reserve_exact(unsent + state.left_len());
        if self.pause.unsent.take() {
            let mut bufs = self.send_bufs.take();
            append(output, &bufs);
            state.sent();
            bufs.clear();
            self.send_bufs.replace(bufs);
        }
        state.take_replies(output);
        self.publish();
        let mut input = state.unparsed();
        input.extend_from_slice(left);
        let socket = self.fd.try_clone()?;
        Ok(Some(SavedClient { socket, agreed: self.service.agreed, input, output: kept.clone() }))
    }

    /// Gives received bytes of the previous process to the state. `false`: there are no more.
    pub(super) fn give_input(&self) -> bool {
        let (input, at) = &mut *self.pause.input.borrow_mut();
        let Some(rest) = input.get(*at..).filter(|rest| !rest.is_empty()) else { return false };
        let mut state = self.state.borrow_mut();
        let mut place = IoBufs::with_capacity(2);
        state.input_memory(&mut place);
        let given = place.copy_in(0, rest);
        state.received(given);
        *at += given;
        if *at == input.len() {
            (*input, *at) = (Vec::new(), 0);
        }
        given > 0
    }

    /// Whether bytes that the socket does not accept at once are kept.
    pub(super) fn holds_output(&self) -> bool {
        self.pause.is_paused() && self.secure.is_none()
    }

    pub(super) fn hold_output(&self, bufs: IoBufs) {
        self.send_bufs.replace(bufs);
        self.pause.unsent.set(true);
        self.reply_later();
    }

    fn is_quiet(&self) -> bool {
        let sending = self.sending.get() && self.secure.is_none();
        !self.receiving.get() && !sending && self.under_way.get() == 0
    }

    pub(super) fn tell_if_quiet(&self) {
        if self.pause.is_paused()
            && self.is_quiet()
            && let Some(quiet) = self.pause.quiet.take()
        {
            quiet.send(());
        }
    }

    /// Ends a connection here after a handover. A connection that was handed over ends at once. One with TLS is
    /// stopped, and one that was ending sends its remaining replies; completes when it has ended. `None`:
    /// nothing is left to do here.
    pub(in crate::nbd) fn part(&self) -> Option<oneshot::Receiver<()>> {
        if self.secure.is_some() {
            self.stop();
        } else if self.end.get().is_some() {
            // It takes no more requests, but sends.
            self.resume();
        } else {
            return None;
        }
        let (end, ended) = oneshot::channel();
        self.pause.end.set(Some(end));
        Some(ended)
    }
}
