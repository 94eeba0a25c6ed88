//! An NBD client: a disk, and connections to its export.

pub(crate) mod connection;
mod handshake;
mod life;
mod plan;
mod replies;
mod request;
mod socket;

use std::cell::{Cell, RefCell};
use std::os::fd::AsFd;
use std::rc::Rc;

use nix::poll::{PollFd, PollTimeout, poll};

use self::connection::Connection;
pub(crate) use self::plan::Plan;
pub(crate) use self::socket::Socket;
use crate::model::{Model, Ticket};
use crate::user::{PATIENCE_NS, User};
use crate::world::World;

/// The export name of a disk.
pub(crate) fn export_name(disk: usize) -> String {
    format!("disk{disk}")
}

/// A client.
pub(crate) struct Client {
    shared: Rc<Shared>,
    connections: Vec<Rc<Connection>>,
}

/// State shared by a client's connections.
struct Shared {
    world: Rc<World>,
    disk: usize,
    plan: Plan,
    model: RefCell<Model>,
    /// Requests still to be sent, over all connections.
    left: Cell<u64>,
    /// Writes of closed connections, which the daemon may still carry out.
    orphans: RefCell<Vec<Orphan>>,
}

/// A write of a closed connection: the client cannot receive the answer.
struct Orphan {
    ticket: Ticket,
    /// The write has ended by this time.
    until_ns: u64,
}

impl Client {
    pub(crate) fn new(world: &Rc<World>, disk: usize, plan: Plan, requests: u64) -> Rc<Self> {
        let shared = Rc::new(Shared {
            world: world.clone(),
            disk,
            model: RefCell::new(Model::new(plan.sectors, world.is_volatile(disk))),
            left: Cell::new(requests),
            orphans: RefCell::default(),
            plan,
        });
        let connections = 0..shared.plan.connections;
        let connections = connections.map(|index| Connection::new(&shared, index)).collect();
        Rc::new(Client { shared, connections })
    }
}

impl Shared {
    /// Forgets a request that will not be answered. `over`: the daemon will not carry it out.
    fn forget(&self, ticket: &Ticket, writes: bool, over: bool) {
        let mut model = self.model.borrow_mut();
        match (writes, over) {
            (true, true) => model.end_write(ticket, false, false),
            (true, false) => {
                // The time limit of a request, with a margin.
                let until_ns = self.world.machine.now_ns() + 2 * PATIENCE_NS;
                self.orphans.borrow_mut().push(Orphan { ticket: *ticket, until_ns });
            }
            (false, _) => model.end_read(ticket, None).expect("nothing is checked"),
        }
    }

    /// Ends all orphans past their time. `all`: ends every orphan, because the daemon is gone.
    fn end_orphans(&self, all: bool) {
        let now = self.world.machine.now_ns();
        let mut model = self.model.borrow_mut();
        self.orphans.borrow_mut().retain(|orphan| {
            let over = all || orphan.until_ns <= now;
            if over {
                model.end_write(&orphan.ticket, false, false);
            }
            !over
        });
    }
}

impl User for Client {
    fn start(self: Rc<Self>) {
        let machine = &self.shared.world.machine;
        for connection in &self.connections {
            let me = connection.clone();
            let name = format!("client of disk {}, connection {}", self.shared.disk, me.index);
            connection.actor.set(Some(machine.spawn(name, move || me.run())));
        }
    }

    fn is_done(&self) -> bool {
        self.connections.iter().all(|connection| connection.done.get())
    }

    fn model(&self) -> &RefCell<Model> {
        &self.shared.model
    }

    fn in_flight(&self) -> u64 {
        self.connections.iter().map(|connection| connection.in_flight() as u64).sum()
    }

    fn check_disk(&self, bytes: &[u8]) -> Result<(), String> {
        self.shared.model.borrow().check_disk(bytes)
    }

    fn lose(&self, bytes: &[u8], anew: bool) -> Result<(), String> {
        self.connections.iter().for_each(|connection| connection.lose(anew));
        self.shared.end_orphans(true);
        self.shared.model.borrow_mut().lose(bytes, anew)
    }

    fn look(&self, sockets: bool) {
        let asleep = self.connections.iter().filter_map(|connection| connection.awaits(sockets));
        let asleep: Vec<_> = asleep.collect();
        if asleep.is_empty() {
            return;
        }
        let fds = asleep.iter().map(|(_, socket, events)| PollFd::new(socket.as_fd(), *events));
        let mut fds: Vec<_> = fds.collect();
        poll(&mut fds, PollTimeout::ZERO).expect("sockets");
        for (fd, (connection, ..)) in fds.iter().zip(&asleep) {
            if fd.any().unwrap_or(true) {
                connection.wake_soon();
            }
        }
    }

    fn check_patience(&self) {
        self.shared.end_orphans(false);
        self.connections.iter().for_each(|connection| connection.check_patience());
    }
}
