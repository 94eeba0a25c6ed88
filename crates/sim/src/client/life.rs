//! The life of a client: connects, works, and disturbs the server at random.

use exports::nbd::wire::reply::ReplyMode;
use exports::nbd::wire::request::{CommandType, RequestHeader};

use super::Shared;
use super::connection::{Connection, Gone};
use super::request::{Came, Kind, Request};
use super::socket::Socket;
use crate::machine::FOREVER;
use crate::user::PATIENCE_NS;

/// How a client disturbs the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disturbance {
    /// Waits for all answers, disconnects, and connects again.
    Leave,
    /// Disconnects while requests are in flight.
    LeaveEarly,
    /// Shuts down its sending side and reads the remaining answers.
    HalfClose,
    /// Closes the connection in the middle of a message.
    CutShort,
    /// Closes the connection without a message, as a killed client.
    Vanish,
    /// Does not read for a while.
    Dawdle,
    /// Sends a malformed request.
    Nonsense,
    /// Announces a payload above the limit.
    TooLong,
}

impl Disturbance {
    pub(super) const ALL: &[Disturbance] = &[
        Disturbance::Leave,
        Disturbance::LeaveEarly,
        Disturbance::HalfClose,
        Disturbance::CutShort,
        Disturbance::Vanish,
        Disturbance::Dawdle,
        Disturbance::Nonsense,
        Disturbance::TooLong,
    ];
}

impl Connection {
    /// The actor's main function.
    pub(super) fn run(&self) {
        let Shared { world, left, .. } = &*self.shared;
        while left.get() > 0 {
            self.connect();
            if self.visit() == Err(Gone) {
                self.was_left();
            }
            world.machine.sleep(world.random().pick(&[0, 1_000, 50_000]));
        }
        self.done.set(true);
    }

    fn connect(&self) {
        let world = self.world();
        self.losses.set(world.losses());
        self.upgrades.set(world.upgrades());
        self.socket.replace(Some(Socket::connect(world)));
        world.coverage.nbd_connections.one();
    }

    /// Whether the server may close the connection by itself: its daemon was killed, or replaced while the client was
    /// negotiating.
    fn may_be_left(&self) -> bool {
        let world = self.world();
        let negotiated = self.mode.get().is_some() && !self.late.get();
        let is_replaced = !negotiated && world.upgrades() != self.upgrades.get();
        world.losses() != self.losses.get() || is_replaced
    }

    /// Handles a connection closed by the server.
    fn was_left(&self) {
        self.world().coverage.gone.one();
        if !self.may_be_left() {
            self.fail("the server has closed the connection");
        }
        self.receive_rest();
        self.forget_all(true);
    }

    /// Runs one connection until the client closes it.
    fn visit(&self) -> Result<(), Gone> {
        let Shared { world, plan, left, .. } = &*self.shared;
        if !self.shake_hands()? {
            self.forget_all(true);
            return Ok(());
        }
        let mode = self.mode.get().expect("agreed on");
        // The server may have sent its last answer before an upgrade that has ended since.
        self.late.set(world.is_upgrading() || world.upgrades() != self.upgrades.get());
        world.machine.say(|| {
            format!("client of disk {}, connection {}: {mode:?}", self.shared.disk, self.index)
        });
        self.undisturbed_ns.set(world.machine.now_ns());
        loop {
            self.work(mode, world.random().between(plan.calm_ns / 4, plan.calm_ns))?;
            let what = match left.get() {
                0 => Disturbance::Leave,
                _ if plan.disturbances.is_empty() => continue,
                _ => world.random().pick(&plan.disturbances),
            };
            world.machine.say(|| {
                format!("client of disk {}, connection {}: {what:?}", self.shared.disk, self.index)
            });
            if self.disturb(mode, what)? {
                return Ok(());
            }
        }
    }

    /// Sends requests for `ns` nanoseconds, or until none are left.
    fn work(&self, mode: ReplyMode, ns: u64) -> Result<(), Gone> {
        let Shared { world, plan, left, .. } = &*self.shared;
        let (machine, random) = (&world.machine, world.random());
        let end = machine.now_ns() + ns;
        while machine.now_ns() < end {
            self.receive()?;
            if left.get() == 0 && self.in_flight() == 0 {
                return Ok(());
            }
            let offered = left.get() > 0 && self.offer_some(mode);
            self.send()?;
            if offered && random.one_in(4) {
                machine.wait_until(0);
                continue;
            }
            machine.preempt(8);
            let more = left.get() > 0;
            let until = match more && (self.in_flight() == 0 || random.one_in(2)) {
                true => machine.now_ns() + random.below(plan.think_ns + 1),
                false => FOREVER,
            };
            self.sleep_until(until);
        }
        Ok(())
    }

    /// Disturbs the server. Returns `true` if the connection is closed.
    fn disturb(&self, mode: ReplyMode, what: Disturbance) -> Result<bool, Gone> {
        let world = self.world();
        let coverage = &world.coverage;
        let (machine, random) = (&world.machine, world.random());
        // Send the rest of a request that was begun.
        self.send_all()?;
        match what {
            Disturbance::Leave => {
                self.receive()?;
                while self.in_flight() > 0 {
                    self.sleep_until(FOREVER);
                    self.receive()?;
                }
                coverage.nbd_left.one();
                self.disconnect(mode);
            }
            Disturbance::LeaveEarly => {
                coverage.nbd_left_early.add(u64::from(self.in_flight() > 0));
                self.disconnect(mode);
            }
            Disturbance::HalfClose => {
                coverage.nbd_half_closed.add(u64::from(self.in_flight() > 0));
                self.end_output();
            }
            Disturbance::CutShort => {
                coverage.nbd_cut_short.one();
                self.begin_write(mode);
                self.say_last();
                machine.sleep(random.pick(&[0, 20_000]));
                self.end_output();
            }
            Disturbance::Vanish => {
                coverage.nbd_vanished.add(u64::from(self.in_flight() > 0));
                self.forget_all(false);
                return Ok(true);
            }
            Disturbance::Dawdle => {
                coverage.nbd_dawdled.one();
                self.offer_some(mode);
                self.send()?;
                machine.sleep(random.pick(&[50_000, 500_000, 3_000_000]));
                self.undisturbed_ns.set(machine.now_ns());
                return Ok(false);
            }
            Disturbance::Nonsense => {
                coverage.nbd_nonsense.one();
                self.output.borrow_mut().extend([0x42; 100]);
                self.say_last();
            }
            Disturbance::TooLong => {
                coverage.nbd_too_long.one();
                let command = CommandType::Write;
                let header =
                    RequestHeader { flags: 0, command, cookie: 1, offset: 0, len: 1 << 30 };
                self.put_header(mode, &header);
                self.say_last();
            }
        }
        self.await_end();
        Ok(true)
    }

    fn put_header(&self, mode: ReplyMode, header: &RequestHeader) {
        let (bytes, len) = header.encode(mode == ReplyMode::Extended);
        self.output.borrow_mut().extend(&bytes[..len]);
    }

    /// `NBD_CMD_DISC`.
    fn disconnect(&self, mode: ReplyMode) {
        let command = CommandType::Disconnect;
        self.put_header(mode, &RequestHeader { flags: 0, command, cookie: 0, offset: 0, len: 0 });
        self.say_last();
    }

    /// Sends the beginning of a write, which the server must not carry out.
    fn begin_write(&self, mode: ReplyMode) {
        let random = self.world().random();
        let request = Request {
            kind: Kind::Write,
            ticket: None,
            first: 0,
            count: random.pick(&[1, 8, 64]),
            fua: false,
            offered_ns: 0,
            came: Came::default(),
        };
        let mut message = Vec::new();
        self.encode(&request, mode, random.next(), &mut message);
        message.truncate(random.between(1, message.len() as u64 - 1) as usize);
        self.output.borrow_mut().extend(message);
    }

    fn end_output(&self) {
        if let Some(socket) = &*self.socket.borrow() {
            socket.end_output();
        }
    }

    /// Sends the last bytes of a connection, perhaps not all of them.
    fn say_last(&self) {
        if self.send_all() == Err(Gone) {
            self.output.borrow_mut().clear();
        }
    }

    /// Sends all pending output and receives replies meanwhile.
    fn send_all(&self) -> Result<(), Gone> {
        loop {
            self.send()?;
            if self.output.borrow().is_empty() {
                return Ok(());
            }
            self.receive()?;
            self.sleep_until(FOREVER);
        }
    }

    /// Waits until the server, which receives no more requests, has answered all and closed the connection.
    fn await_end(&self) {
        let machine = &self.world().machine;
        let until = machine.now_ns() + PATIENCE_NS;
        while self.receive().is_ok() {
            if machine.now_ns() >= until {
                self.fail("the server does not close the connection");
            }
            self.sleep_until(until);
        }
        if self.in_flight() > 0 && !self.may_be_left() {
            self.fail(&format!("{} requests were left unanswered", self.in_flight()));
        }
        self.forget_all(true);
    }
}
