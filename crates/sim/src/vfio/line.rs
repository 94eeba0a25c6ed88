//! The VMM's end of a vfio-user socket, which all actors of a guest share.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use exports::vhost_user::fd_passing;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use vcpu::vfio_user::wire;

use super::memory::Part;
use super::reply::{Reply, take_reply, u32_at};
use crate::user::PATIENCE_NS;
use crate::world::World;

/// Interval at which a pending reply is checked, nanoseconds: at first, and at most.
const LOOK_NS: u64 = 2_000;
const MOST_NS: u64 = 100_000;

/// The connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gone;

/// A connection to an export.
pub(crate) struct Line {
    world: Rc<World>,
    disk: usize,
    /// The BAR with the registers.
    bar: u32,
    /// `None` once the VMM has closed it.
    stream: RefCell<Option<UnixStream>>,
    /// Takes no more messages.
    is_over: Cell<bool>,
    /// Number of power cuts before the connection.
    cuts: u64,
    /// One send in so many is in pieces.
    pieces: u64,
    /// The number of the next message.
    next: Cell<u16>,
    output: RefCell<Vec<u8>>,
    input: RefCell<Vec<u8>>,
    /// Numbers of messages without a reply yet.
    awaited: RefCell<BTreeSet<u16>>,
    /// Replies that were not taken yet, with their commands, by number of the message.
    replies: RefCell<BTreeMap<u16, (u16, Reply)>>,
}

impl Drop for Line {
    fn drop(&mut self) {
        self.close();
    }
}

impl Line {
    /// Connects. The connection waits in the listener's queue if no daemon runs, or the export serves an earlier one.
    pub(crate) fn connect(world: &Rc<World>, disk: usize, bar: u32, pieces: u64) -> Rc<Self> {
        let stream = world.listener(disk).connect();
        world.fds.keep(stream.as_raw_fd());
        world.poke_control();
        Rc::new(Line {
            world: world.clone(),
            disk,
            bar,
            stream: RefCell::new(Some(stream)),
            is_over: Cell::new(false),
            cuts: world.cuts(),
            pieces,
            next: Cell::new(1),
            output: RefCell::default(),
            input: RefCell::default(),
            awaited: RefCell::default(),
            replies: RefCell::default(),
        })
    }

    /// Closes the socket without a message, as for a killed VMM.
    pub(crate) fn close(&self) {
        self.is_over.set(true);
        if let Some(stream) = self.stream.take() {
            self.world.fds.forget(stream.as_raw_fd());
            drop(stream);
            self.world.poke_control();
        }
    }

    fn fail(&self, what: &str) -> ! {
        self.world.fail(&format!("VMM of disk {}: {what}", self.disk))
    }

    /// Fails if the connection has ended.
    pub(crate) fn check(&self) -> Result<(), Gone> {
        self.receive()
    }

    fn number(&self) -> u16 {
        let id = self.next.get();
        self.next.set(id.wrapping_add(1));
        id
    }

    /// Sends a message that is not replied to.
    pub(crate) fn post(&self, command: u16, payload: &[u8]) -> Result<(), Gone> {
        if self.is_over.get() {
            return Err(Gone);
        }
        let message = wire::message(self.number(), command, false, payload);
        self.output.borrow_mut().extend(message);
        self.flush()
    }

    /// Sends a message, and waits for the payload of its reply. Fails the run if the reply is an error.
    pub(crate) fn ask(&self, command: u16, payload: &[u8], fds: &[RawFd]) -> Result<Vec<u8>, Gone> {
        let id = self.number();
        let message = wire::message(id, command, true, payload);
        self.awaited.borrow_mut().insert(id);
        match fds {
            [] if self.is_over.get() => return Err(Gone),
            [] => self.output.borrow_mut().extend(message),
            fds => self.send_with(&message, fds)?,
        }
        self.flush()?;
        let machine = &self.world.machine;
        let (until, mut pause_ns) = (machine.now_ns() + PATIENCE_NS, LOOK_NS);
        loop {
            self.receive()?;
            let reply = self.replies.borrow_mut().remove(&id);
            match reply {
                Some((of, Reply { errno: 0, payload })) if of == command => return Ok(payload),
                Some((of, Reply { errno, .. })) => {
                    self.fail(&format!("command {command} got a reply to {of}, errno {errno}"))
                }
                None if machine.now_ns() > until => {
                    self.fail(&format!("no reply to command {command} in {PATIENCE_NS} ns"))
                }
                None => machine.sleep(pause_ns),
            }
            pause_ns = (pause_ns * 2).min(MOST_NS);
        }
    }

    /// Sends a message with descriptors as a whole.
    fn send_with(&self, message: &[u8], fds: &[RawFd]) -> Result<(), Gone> {
        loop {
            self.flush()?;
            if self.is_over.get() {
                return Err(Gone);
            }
            let sent = {
                let stream = self.stream.borrow();
                let Some(stream) = &*stream else { return Err(Gone) };
                let iov = [IoSlice::new(message)];
                fd_passing::send(stream.as_fd(), &iov, fds, MsgFlags::MSG_DONTWAIT)
            };
            match sent {
                Ok(sent) => {
                    self.world.poke_control();
                    self.output.borrow_mut().extend(&message[sent..]);
                    return Ok(());
                }
                Err(Errno::EAGAIN) => self.world.machine.sleep(LOOK_NS),
                Err(_) => return Err(Gone),
            }
        }
    }

    /// Sends pending output, sometimes in pieces. Other actors may add to it meanwhile.
    fn flush(&self) -> Result<(), Gone> {
        let (machine, random) = (&self.world.machine, self.world.random());
        loop {
            if self.world.cuts() != self.cuts {
                return Err(Gone);
            }
            if self.output.borrow().is_empty() {
                return Ok(());
            }
            let in_pieces = random.one_in(self.pieces);
            let sent = {
                let (stream, output) = (self.stream.borrow(), self.output.borrow());
                let Some(stream) = &*stream else { return Err(Gone) };
                let len = match in_pieces {
                    true => random.between(1, output.len() as u64) as usize,
                    false => output.len(),
                };
                let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
                send(stream.as_raw_fd(), &output[..len], flags)
            };
            match sent {
                Ok(sent) => {
                    self.output.borrow_mut().drain(..sent);
                    self.world.poke_control();
                    if in_pieces {
                        self.world.coverage.vfio_pieces.one();
                        machine.sleep(random.pick(&[0, 500, 20_000]));
                    }
                }
                Err(Errno::EAGAIN) => {
                    self.receive()?;
                    machine.sleep(LOOK_NS);
                }
                Err(_) => return Err(Gone),
            }
        }
    }

    fn receive(&self) -> Result<(), Gone> {
        if self.world.cuts() != self.cuts {
            return Err(Gone);
        }
        let mut buffer = [0; 4096];
        loop {
            let received = {
                let stream = self.stream.borrow();
                let Some(stream) = &*stream else { return Err(Gone) };
                recv(stream.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT)
            };
            match received {
                Ok(len @ 1..) => self.input.borrow_mut().extend(&buffer[..len]),
                Err(Errno::EAGAIN) => break,
                Ok(0) | Err(_) => return Err(Gone),
            }
            // The daemon may wait for room in the socket.
            self.world.poke_control();
        }
        let mut input = self.input.borrow_mut();
        while let Some((id, command, reply)) = take_reply(&mut input) {
            if !self.awaited.borrow_mut().remove(&id) {
                self.fail(&format!("message {id} of command {command} is replied to"));
            }
            self.replies.borrow_mut().insert(id, (command, reply));
        }
        Ok(())
    }

    /// Ends the connection within a message: the beginning of one that must not be carried out.
    pub(crate) fn cut_short(&self, command: u16, payload: &[u8]) -> Result<(), Gone> {
        let random = self.world.random();
        let message = wire::message(self.number(), command, false, payload);
        self.flush()?;
        self.is_over.set(true);
        let len = random.between(1, message.len() as u64 - 1) as usize;
        self.output.borrow_mut().extend(&message[..len]);
        self.flush()?;
        self.world.machine.sleep(random.pick(&[0, 20_000]));
        self.close();
        Ok(())
    }

    /// Shares a part of the memory.
    pub(crate) fn map(&self, part: &Part) -> Result<(), Gone> {
        let map = wire::map(part.offset, part.address, part.len);
        self.ask(wire::DMA_MAP, &map, &[part.file.as_raw_fd()]).map(drop)
    }

    // ---- registers -----------------------------------------------------------------------------

    /// Reads a register of 4 bytes.
    pub(crate) fn read(&self, register: u64) -> Result<u32, Gone> {
        let place = wire::region(self.bar, register, 4);
        let payload = self.ask(wire::REGION_READ, &place, &[])?;
        if payload.len() != 20 || payload[..16] != place {
            self.fail(&format!("a register is read as {payload:?}"));
        }
        Ok(u32_at(&payload, 16))
    }

    /// Writes registers. `is_answered`: waits for the reply.
    pub(crate) fn write(&self, offset: u64, data: &[u8], is_answered: bool) -> Result<(), Gone> {
        let payload = wire::write(self.bar, offset, data);
        match is_answered {
            true => self.ask(wire::REGION_WRITE, &payload, &[]).map(drop),
            false => self.post(wire::REGION_WRITE, &payload),
        }
    }

    /// Writes registers of 4 bytes with one message.
    pub(crate) fn write_multi(&self, writes: &[(u64, u32)]) -> Result<(), Gone> {
        self.post(wire::REGION_WRITE_MULTI, &wire::write_multi(writes))
    }
}
