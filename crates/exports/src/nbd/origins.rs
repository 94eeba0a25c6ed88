//! Turns of clients at what a server does a few times at once, fair by the clients' origins.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage, getpeername, getsockopt};

/// Where clients come from that count as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// A host: an IPv4 address, or the first 64 bits of an IPv6 address.
    Host(IpAddr),
    /// A guest, over vsock.
    Guest(u32),
    /// A user of this host, over a unix socket.
    User(u32),
    /// None of them.
    Other,
}

impl Origin {
    /// The origin of a connected client.
    pub(super) fn of(socket: &OwnedFd) -> Origin {
        let Ok(peer) = getpeername::<SockaddrStorage>(socket.as_raw_fd()) else {
            return Origin::Other;
        };
        match peer.family() {
            Some(AddressFamily::Unix) => match getsockopt(socket, PeerCredentials) {
                Ok(peer) => Origin::User(peer.uid()),
                Err(_) => Origin::Other,
            },
            Some(AddressFamily::Vsock) => match peer.as_vsock_addr() {
                Some(peer) => Origin::Guest(peer.cid()),
                None => Origin::Other,
            },
            _ => match (peer.as_sockaddr_in(), peer.as_sockaddr_in6()) {
                (Some(peer), _) => Origin::Host(peer.ip().into()),
                (None, Some(peer)) => Origin::of_v6(peer.ip().to_canonical()),
                (None, None) => Origin::Other,
            },
        }
    }

    fn of_v6(address: IpAddr) -> Origin {
        Origin::Host(match address {
            // A host has 64 bits of addresses.
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                [a, b, c, d, 0, 0, 0, 0].into()
            }
            IpAddr::V4(_) => address,
        })
    }
}

/// Permits of which a number is out at once. Origins that wait are served in turns, clients of one origin in their order.
pub(super) struct Turns {
    free: Cell<usize>,
    /// None of the queues is empty. The first one has the next turn.
    waiting: RefCell<VecDeque<(Origin, VecDeque<Rc<Waiter>>)>>,
}

#[derive(Default)]
struct Waiter {
    has_turn: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// A permit, until it is dropped.
pub(super) struct Permit<'a>(&'a Turns);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

impl Turns {
    /// Returns so many permits.
    pub(super) fn new(permits: usize) -> Turns {
        Turns { free: Cell::new(permits), waiting: RefCell::default() }
    }

    /// Waits for a permit.
    pub(super) fn turn(&self, origin: Origin) -> Turn<'_> {
        Turn { turns: self, origin, waiter: None }
    }

    /// The next client has the permit.
    fn give_back(&self) {
        let next = {
            let mut waiting = self.waiting.borrow_mut();
            waiting.pop_front().and_then(|(origin, mut clients)| {
                let next = clients.pop_front();
                if !clients.is_empty() {
                    waiting.push_back((origin, clients));
                }
                next
            })
        };
        match next {
            Some(waiter) => {
                waiter.has_turn.set(true);
                waiter.waker.take().into_iter().for_each(Waker::wake);
            }
            None => self.free.set(self.free.get() + 1),
        }
    }

    fn enqueue(&self, origin: Origin, waiter: Rc<Waiter>) {
        let mut waiting = self.waiting.borrow_mut();
        match waiting.iter_mut().find(|(other, _)| *other == origin) {
            Some((_, clients)) => clients.push_back(waiter),
            None => waiting.push_back((origin, VecDeque::from([waiter]))),
        }
    }

    fn dequeue(&self, waiter: &Rc<Waiter>) {
        let mut waiting = self.waiting.borrow_mut();
        for (_, clients) in waiting.iter_mut() {
            clients.retain(|other| !Rc::ptr_eq(other, waiter));
        }
        waiting.retain(|(_, clients)| !clients.is_empty());
    }
}

/// Waits for a permit, see [`Turns::turn`].
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    origin: Origin,
    /// Of a client that waits.
    waiter: Option<Rc<Waiter>>,
}

impl<'a> Future for Turn<'a> {
    type Output = Permit<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Permit<'a>> {
        let turns = self.turns;
        match &self.waiter {
            None if turns.free.get() > 0 => {
                turns.free.set(turns.free.get() - 1);
                Poll::Ready(Permit(turns))
            }
            None => {
                let waiter = Rc::new(Waiter::default());
                waiter.waker.replace(Some(cx.waker().clone()));
                turns.enqueue(self.origin, waiter.clone());
                self.waiter = Some(waiter);
                Poll::Pending
            }
            Some(waiter) if waiter.has_turn.get() => {
                self.waiter = None;
                Poll::Ready(Permit(turns))
            }
            Some(waiter) => {
                waiter.waker.replace(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        match self.waiter.take() {
            Some(waiter) if waiter.has_turn.get() => self.turns.give_back(),
            Some(waiter) => self.turns.dequeue(&waiter),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::pin::pin;

    use super::*;

    fn host(last: u8) -> Origin {
        Origin::Host([192, 0, 2, last].into())
    }

    /// Polls once.
    fn now<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    /// A flood of one host delays a client of another one by one turn.
    #[test]
    fn hosts_take_turns() {
        let turns = Turns::new(1);
        let mut under_way = now(pin!(turns.turn(host(1))));
        let flood = [host(1); 50];
        let clients = flood.into_iter().chain([host(2), host(3), host(2)]);
        let mut waiting: Vec<_> =
            clients.map(|origin| (origin, Box::pin(turns.turn(origin)))).collect();
        for (_, turn) in &mut waiting {
            assert!(now(turn.as_mut()).is_none());
        }
        // Some of the flood leave.
        waiting.drain(..20);
        let mut order = Vec::new();
        while !waiting.is_empty() {
            drop(under_way.take());
            let (place, permit) = (0..waiting.len())
                .find_map(|place| Some((place, now(waiting[place].1.as_mut())?)))
                .expect("a free permit is for one who waits");
            under_way = Some(permit);
            order.push(waiting.remove(place).0);
        }
        assert_eq!(order[..6], [host(1), host(2), host(3), host(1), host(2), host(1)]);
        assert_eq!(order.len(), 33);
    }

    /// A client that leaves with its turn gives it to the next.
    #[test]
    fn no_turn_is_lost() {
        let turns = Turns::new(1);
        let first = now(pin!(turns.turn(host(1)))).expect("free");
        let mut leaves = Box::pin(turns.turn(host(2)));
        let mut next = Box::pin(turns.turn(host(3)));
        assert!(now(leaves.as_mut()).is_none() && now(next.as_mut()).is_none());
        drop(first);
        drop(leaves);
        drop(now(next.as_mut()).expect("its turn"));
        assert!(now(pin!(turns.turn(host(1)))).is_some());
    }

    #[test]
    fn clients_of_a_host_or_a_user_are_of_one_origin() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let mut origins = (0..2).map(|_| {
            let client = TcpStream::connect(address).expect("it listens");
            let (served, _) = listener.accept().expect("a client");
            drop(client);
            Origin::of(&served.into())
        });
        let local = Origin::Host([127, 0, 0, 1].into());
        assert_eq!([origins.next(), origins.next()], [Some(local); 2]);
        let (one, _other) = UnixStream::pair().expect("sockets");
        assert_eq!(Origin::of(&one.into()), Origin::User(nix::unistd::geteuid().as_raw()));
        let v6 =
            |text: &str| Origin::of_v6(text.parse::<IpAddr>().expect("an address").to_canonical());
        assert_eq!(v6("2001:db8::1"), v6("2001:db8::2:3"));
        assert_ne!(v6("2001:db8::1"), v6("2001:db8:0:1::1"));
        assert_eq!(v6("::ffff:192.0.2.7"), host(7));
    }
}
