//! The front end: a VMM at the other end of a vhost-user socket.
//!
//! The VMM awaits the acknowledgement of each message. The VMM is a separate actor, so the queues' drivers run
//! meanwhile.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use exports::vhost_user::fd_passing;
use exports::vhost_user::wire::{HEADER_LEN, Request};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};

use crate::fds::{Fds, Kept};
use crate::user::PATIENCE_NS;
use crate::world::World;

const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;

/// Interval at which a pending answer is checked, nanoseconds: at first, and at most.
const LOOK_NS: u64 = 5_000;
const MOST_NS: u64 = 100_000;

/// The daemon has closed the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gone;

/// A connection to an export.
pub(super) struct Connection {
    world: Rc<World>,
    stream: UnixStream,
    fds: Rc<Fds>,
    reply_ack: bool,
    /// Number of power cuts before the connection.
    cuts: u64,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.fds.forget(self.stream.as_raw_fd());
        self.world.poke_control();
    }
}

impl Connection {
    /// Connects. The connection waits in the listener's queue if no daemon runs.
    pub(super) fn new(world: &Rc<World>, guest: usize) -> Self {
        let stream = world.listener(guest).connect();
        stream.set_nonblocking(true).expect("a socket");
        let fds = world.fds.clone();
        fds.keep(stream.as_raw_fd());
        world.poke_control();
        let cuts = world.cuts();
        Connection { world: world.clone(), stream, fds, reply_ack: false, cuts }
    }

    /// Enables acknowledgements (`REPLY_ACK`).
    pub(super) fn has_reply_ack(&mut self) {
        self.reply_ack = true;
    }

    /// Sends a message.
    fn send(&self, request: Request, payload: &[u8], fds: &[RawFd]) -> Result<(), Gone> {
        self.check_power()?;
        let ack = self.reply_ack && !request.has_reply();
        let flags = VERSION | if ack { NEED_REPLY } else { 0 };
        let mut bytes = Vec::with_capacity(HEADER_LEN + payload.len());
        for field in [request as u32, flags, payload.len() as u32] {
            bytes.extend(field.to_ne_bytes());
        }
        bytes.extend(payload);
        let iov = [IoSlice::new(&bytes)];
        let sent = fd_passing::send(self.stream.as_fd(), &iov, fds, MsgFlags::empty());
        self.world.poke_control();
        match sent {
            Ok(n) if n == bytes.len() => Ok(()),
            _ => Err(Gone),
        }
    }

    /// Sends a message and waits until it is acknowledged.
    pub(super) fn tell(&self, request: Request, payload: &[u8], fds: &[RawFd]) -> Result<(), Gone> {
        self.send(request, payload, fds)?;
        if self.reply_ack {
            let (answer, _) = self.receive(request)?;
            if answer != 0u64.to_ne_bytes() {
                self.world.fail(&format!("{request:?} was refused"));
            }
        }
        Ok(())
    }

    /// Sends a message and waits for its answer.
    pub(super) fn ask(&self, request: Request, payload: &[u8]) -> Result<Vec<u8>, Gone> {
        Ok(self.ask_with_fd(request, payload)?.0)
    }

    /// Sends a message and waits for its answer, with its descriptor.
    pub(super) fn ask_with_fd(
        &self,
        request: Request,
        payload: &[u8],
    ) -> Result<(Vec<u8>, Option<Rc<Kept>>), Gone> {
        self.send(request, payload, &[])?;
        self.receive(request)
    }

    /// Sends a message and waits for its answer, a number.
    pub(super) fn ask_number(&self, request: Request) -> Result<u64, Gone> {
        let answer = self.ask(request, &[])?;
        Ok(u64::from_ne_bytes(answer.try_into().expect("8 bytes")))
    }

    /// Fails if a power cut has ended the VMM.
    fn check_power(&self) -> Result<(), Gone> {
        if self.world.cuts() == self.cuts { Ok(()) } else { Err(Gone) }
    }

    /// Fails if the daemon has closed the connection.
    pub(super) fn check(&self) -> Result<(), Gone> {
        self.check_power()?;
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        match recv(self.stream.as_raw_fd(), &mut [0], flags) {
            Err(Errno::EAGAIN) => Ok(()),
            Ok(1..) => self.world.fail("the daemon sent a message without a request"),
            Ok(0) | Err(_) => Err(Gone),
        }
    }

    fn receive(&self, request: Request) -> Result<(Vec<u8>, Option<Rc<Kept>>), Gone> {
        let (mut header, mut fd) = ([0; HEADER_LEN], None);
        self.fill(&mut header, &mut fd)?;
        let field = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&header[at..at + 4]);
            u32::from_ne_bytes(bytes)
        };
        assert_eq!(field(0), request as u32, "the answer to {request:?}");
        let mut payload = vec![0; field(8) as usize];
        self.fill(&mut payload, &mut fd)?;
        Ok((payload, fd))
    }

    fn fill(&self, into: &mut [u8], fd: &mut Option<Rc<Kept>>) -> Result<(), Gone> {
        let (mut filled, mut pause_ns) = (0, LOOK_NS);
        let machine = &self.world.machine;
        let until = machine.now_ns() + PATIENCE_NS;
        while filled < into.len() {
            self.check_power()?;
            match fd_passing::receive(self.stream.as_fd(), &mut into[filled..]) {
                Ok(received) if received.len == 0 => return Err(Gone),
                Ok(received) => {
                    filled += received.len;
                    if let Some(owned) = received.fds.into_iter().next() {
                        *fd = Some(Kept::new(&self.fds, owned));
                    }
                }
                Err(Errno::EAGAIN) => {
                    if machine.now_ns() > until {
                        self.world.fail(&format!("no answer in {PATIENCE_NS} ns"));
                    }
                    machine.sleep(pause_ns);
                    pause_ns = (pause_ns * 2).min(MOST_NS);
                }
                Err(_) => return Err(Gone),
            }
        }
        Ok(())
    }
}
