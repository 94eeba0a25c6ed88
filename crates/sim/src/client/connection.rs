//! A connection from the client's side: sends requests, receives replies, checks both.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use exports::nbd::wire::reply::ReplyMode;
use nix::poll::PollFlags;

use super::Shared;
use super::request::{Came, Kind, Request, any_count};
use super::socket::Socket;
use crate::machine::ActorId;
use crate::model::{self, SECTOR};
use crate::random::area;
use crate::user::PATIENCE_NS;
use crate::world::World;

/// The connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gone;

/// A client's connection, reused for one session after the other.
pub(super) struct Connection {
    pub(super) shared: Rc<Shared>,
    pub(super) index: u16,
    pub(super) actor: Cell<Option<ActorId>>,
    pub(super) socket: RefCell<Option<Rc<Socket>>>,
    /// The number of losses at the time of the connect.
    pub(super) losses: Cell<u64>,
    /// The number of upgrades at that time.
    pub(super) upgrades: Cell<u64>,
    /// Negotiated during an upgrade: the old daemon may not have admitted the client to the export.
    pub(super) late: Cell<bool>,
    /// The form of the server's replies; `None` during option negotiation.
    pub(super) mode: Cell<Option<ReplyMode>>,
    /// Sectors of the disk, as reported by the server.
    pub(super) sectors: Cell<u32>,
    /// `base:allocation` was chosen.
    pub(super) allocation: Cell<bool>,
    /// Bytes received of an incomplete message.
    pub(super) input: RefCell<Vec<u8>>,
    /// Bytes still to be sent.
    pub(super) output: RefCell<Vec<u8>>,
    /// By cookie.
    pub(super) requests: RefCell<BTreeMap<u64, Request>>,
    /// The readiness that the actor sleeps for.
    asleep: Cell<Option<PollFlags>>,
    /// The actor fell asleep after the last check of its socket.
    fresh: Cell<bool>,
    /// Time of the last disturbance that delays requests.
    pub(super) undisturbed_ns: Cell<u64>,
    /// All requests are sent and answered.
    pub(super) done: Cell<bool>,
    /// Receive buffer.
    buffer: RefCell<Vec<u8>>,
}

impl Connection {
    pub(super) fn new(shared: &Rc<Shared>, index: u16) -> Rc<Self> {
        Rc::new(Connection {
            shared: shared.clone(),
            index,
            actor: Cell::new(None),
            socket: RefCell::default(),
            losses: Cell::new(0),
            upgrades: Cell::new(0),
            late: Cell::new(false),
            mode: Cell::new(None),
            sectors: Cell::new(0),
            allocation: Cell::new(false),
            input: RefCell::default(),
            output: RefCell::default(),
            requests: RefCell::default(),
            asleep: Cell::new(None),
            fresh: Cell::new(false),
            undisturbed_ns: Cell::new(0),
            done: Cell::new(false),
            buffer: RefCell::new(vec![0; shared.plan.sip]),
        })
    }

    pub(super) fn world(&self) -> &Rc<World> {
        &self.shared.world
    }

    pub(super) fn in_flight(&self) -> usize {
        self.requests.borrow().len()
    }

    pub(super) fn fail(&self, what: &str) -> ! {
        let Shared { disk, world, .. } = &*self.shared;
        world.fail(&format!("client of disk {disk}, connection {}: {what}", self.index))
    }

    // ---- waiting -------------------------------------------------------------------------------

    /// Waits until `ns`, or until the socket has input, or room for pending output.
    pub(super) fn sleep_until(&self, ns: u64) {
        let mut events = PollFlags::POLLIN;
        if !self.output.borrow().is_empty() {
            events |= PollFlags::POLLOUT;
        }
        self.asleep.set(Some(events));
        self.fresh.set(true);
        self.world().machine.wait_until(ns);
        self.asleep.set(None);
    }

    /// The readiness that the actor waits for, if its socket needs a check. `sockets`: the daemon may have used its sockets.
    pub(super) fn awaits(
        self: &Rc<Self>,
        sockets: bool,
    ) -> Option<(Rc<Self>, Rc<Socket>, PollFlags)> {
        let events = self.asleep.get()?;
        let look = self.fresh.take() || sockets;
        let socket = self.socket.borrow().clone().filter(|_| look)?;
        Some((self.clone(), socket, events))
    }

    /// Wakes the actor a moment after its socket became ready.
    pub(super) fn wake_soon(&self) {
        if let Some(actor) = self.actor.get() {
            let world = self.world();
            self.asleep.set(None);
            world.machine.wake_at(actor, world.machine.now_ns() + world.random().below(2_000));
        }
    }

    /// How long a request has been in flight without disturbance, nanoseconds.
    fn took_ns(&self, request: &Request) -> u64 {
        let now = self.world().machine.now_ns();
        now.saturating_sub(self.undisturbed_ns.get().max(request.offered_ns))
    }

    /// Fails the run if a request has been in flight for too long.
    pub(super) fn check_patience(&self) {
        for request in self.requests.borrow().values() {
            let took = self.took_ns(request);
            if took > PATIENCE_NS {
                self.fail(&format!("{request:?} has been waiting for {took} ns"));
            }
        }
    }

    // ---- bytes ---------------------------------------------------------------------------------

    fn open_socket(&self) -> Result<Rc<Socket>, Gone> {
        self.socket.borrow().clone().ok_or(Gone)
    }

    /// Receives and checks replies. Fails with `Gone` at the end of the connection.
    pub(super) fn receive(&self) -> Result<(), Gone> {
        let socket = self.open_socket()?;
        let mut buffer = self.buffer.borrow_mut();
        let result = loop {
            match socket.receive(&mut buffer) {
                Ok(0) => break Ok(()),
                Ok(bytes) => {
                    let random = self.world().random();
                    self.input.borrow_mut().extend(&buffer[..bytes]);
                    // Let other actors run before the next receive.
                    if bytes < buffer.len() || random.one_in(4) {
                        break Ok(());
                    }
                }
                Err(Gone) => break Err(Gone),
            }
        };
        drop(buffer);
        if let Some(mode) = self.mode.get() {
            self.take_replies(mode);
        }
        result
    }

    /// Receives the rest of a connection that has ended or is to be dropped.
    pub(super) fn receive_rest(&self) {
        loop {
            let Ok(socket) = self.open_socket() else { return };
            let mut buffer = [0; 4096];
            match socket.receive(&mut buffer) {
                Ok(0) | Err(Gone) => break,
                Ok(bytes) => self.input.borrow_mut().extend(&buffer[..bytes]),
            }
        }
        if let Some(mode) = self.mode.get() {
            self.take_replies(mode);
        }
    }

    /// Sends pending output while the socket has room, sometimes in pieces.
    pub(super) fn send(&self) -> Result<(), Gone> {
        let Shared { world, plan, .. } = &*self.shared;
        let (machine, random) = (&world.machine, world.random());
        loop {
            let socket = self.open_socket()?;
            let mut output = self.output.borrow_mut();
            if output.is_empty() {
                return Ok(());
            }
            let in_pieces = random.one_in(plan.pieces);
            let len = if in_pieces {
                random.between(1, output.len() as u64)
            } else {
                output.len() as u64
            };
            let sent = socket.send(&output[..len as usize], self.mode.get().is_none())?;
            output.drain(..sent);
            if sent == 0 {
                world.coverage.nbd_full.one();
                return Ok(());
            }
            drop((output, socket));
            if in_pieces {
                world.coverage.nbd_pieces.one();
                machine.wait_until(machine.now_ns() + random.pick(&[0, 500, 20_000]));
            }
        }
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Queues a batch for [`send`](Self::send). Returns `false` if enough requests are in flight.
    pub(super) fn offer_some(&self, mode: ReplyMode) -> bool {
        let Shared { world, plan, left, .. } = &*self.shared;
        let room = plan.depth.saturating_sub(self.in_flight()) as u64;
        let count = world.random().between(1, plan.batch).min(left.get()).min(room);
        (0..count).for_each(|_| self.offer(mode));
        left.set(left.get() - count);
        world.coverage.nbd_crowded.add(u64::from(self.in_flight() > 128));
        count > 0
    }

    fn offer(&self, mode: ReplyMode) {
        let world = self.world();
        let (random, model) = (world.random(), &self.shared.model);
        let kind = Kind::any(random, self.allocation.get());
        let sectors = self.sectors.get().min(model.borrow().sectors());
        let area = area(random, sectors);
        let count = any_count(random, self.shared.plan.large).min(area);
        let first = random.below(u64::from(area - count + 1)) as u32;
        let mut model = model.borrow_mut();
        let ticket = match kind {
            Kind::Read | Kind::Status { .. } => Some(model.begin_read(first, count)),
            Kind::Write => Some(model.begin_write(first, count, false)),
            Kind::Trim | Kind::Zeroes { .. } => Some(model.begin_write(first, count, true)),
            Kind::Flush => Some(model.begin_flush()),
            _ => None,
        };
        drop(model);
        let request = Request {
            kind,
            ticket,
            first,
            count,
            fua: kind.writes() && random.one_in(8),
            offered_ns: world.machine.now_ns(),
            came: Came::default(),
        };
        let cookie = random.next();
        let mut output = self.output.borrow_mut();
        self.encode(&request, mode, cookie, &mut output);
        self.requests.borrow_mut().insert(cookie, request);
    }

    /// Appends a request's message to `output`.
    pub(super) fn encode(
        &self,
        request: &Request,
        mode: ReplyMode,
        cookie: u64,
        output: &mut Vec<u8>,
    ) {
        let (header, payload) = request.header(self.world().random(), mode, cookie);
        let (bytes, len) = header.encode(mode == ReplyMode::Extended);
        output.extend(&bytes[..len]);
        let begin = output.len();
        output.resize(begin + payload, 0xdb);
        if let Some(ticket) = request.ticket.as_ref().filter(|_| payload > 0) {
            for (at, sector) in output[begin..].chunks_exact_mut(SECTOR).enumerate() {
                model::fill(ticket.version, request.first + at as u32, sector);
            }
        }
    }

    /// Handles the answer to a request; `error` is 0 for success.
    pub(super) fn answered(&self, request: Request, error: u32) {
        let Shared { world, model, disk, .. } = &*self.shared;
        let coverage = &world.coverage;
        let now = world.machine.now_ns();
        world
            .machine
            .note((*disk as u64) << 48 ^ u64::from(self.index) << 32 ^ u64::from(error) ^ now << 1);
        world.machine.say(|| {
            format!("disk {disk}, connection {}: {request:?} is answered {error}", self.index)
        });
        world.count_request(*disk);
        coverage.nbd_requests.one();
        if !request.may_get(error, || world.has_failed()) {
            self.fail(&format!("{request:?} was answered {error}"));
        }
        let took = self.took_ns(&request);
        if took > PATIENCE_NS {
            self.fail(&format!("{request:?} took {took} ns"));
        }
        let good = error == 0;
        match request.kind {
            Kind::Read => coverage.reads.one(),
            Kind::Write => coverage.writes.one(),
            Kind::Flush => coverage.flushes.one(),
            Kind::Trim => coverage.discards.one(),
            Kind::Zeroes { .. } => coverage.zeroes.one(),
            Kind::Status { .. } => coverage.nbd_statuses.one(),
            Kind::Cache | Kind::Nothing => {}
            _ => coverage.refused.one(),
        }
        coverage.nbd_fua.add(u64::from(request.fua && good));
        coverage.failed.add(u64::from(!good && !request.kind.is_refused()));
        if good && request.came.count != request.answer_bytes() {
            self.fail(&format!("{request:?}: {} bytes have come", request.came.count));
        }
        let zeroes = match request.kind {
            Kind::Status { .. } if good => {
                request.zeroes().unwrap_or_else(|wrong| self.fail(&wrong))
            }
            _ => Vec::new(),
        };
        let Some(ticket) = &request.ticket else { return };
        let mut model = model.borrow_mut();
        let checked = if request.kind.writes() {
            // Discarded sectors may have their old contents or zeroes.
            model.end_write(ticket, good && request.kind != Kind::Trim, request.fua);
            Ok(())
        } else if request.kind == Kind::Flush {
            if good {
                model.flushed(ticket);
            }
            Ok(())
        } else if matches!(request.kind, Kind::Status { .. }) {
            let within = |sector: &Range<u64>, zeroes: &Range<u64>| {
                zeroes.start <= sector.start && sector.end <= zeroes.end
            };
            model.end_status(ticket, |at| {
                let begin = u64::from(at) * SECTOR as u64;
                let sector = begin..begin + SECTOR as u64;
                zeroes.iter().any(|zeroes| within(&sector, zeroes))
            })
        } else {
            model.end_read(ticket, good.then_some(&request.came.data))
        };
        drop(model);
        if let Err(wrong) = checked {
            self.fail(&format!("{request:?}: {wrong}"));
        }
    }

    // ---- the end -------------------------------------------------------------------------------

    /// Forgets all requests in flight: none is answered. `over`: none is carried out from now on either.
    pub(super) fn forget_all(&self, over: bool) {
        for request in std::mem::take(&mut *self.requests.borrow_mut()).into_values() {
            self.world().coverage.nbd_unanswered.one();
            if let Some(ticket) = &request.ticket {
                self.shared.forget(ticket, request.kind.writes(), over);
            }
        }
        self.mode.set(None);
        self.socket.replace(None);
        self.input.borrow_mut().clear();
        self.output.borrow_mut().clear();
    }

    /// Handles the kill of the daemon. `anew`: the client was killed along with it.
    pub(super) fn lose(&self, anew: bool) {
        // Answers sent before the kill still count.
        self.receive_rest();
        if anew {
            self.forget_all(true);
            if self.asleep.get().is_some() {
                self.wake_soon();
            }
        }
    }
}
