//! A socket that front ends connect to, whether there is a daemon or not.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::rc::Rc;

use crate::fds::Fds;

thread_local! {
    /// Of the next one.
    static NUMBER: Cell<u64> = const { Cell::new(0) };
}

/// As a service manager keeps it for a daemon that may die.
pub(crate) struct Socket {
    fds: Rc<Fds>,
    listener: UnixListener,
    address: SocketAddr,
}

impl Socket {
    pub(crate) fn new(fds: &Rc<Fds>) -> Self {
        // The socket of an earlier world may still exist: leaked memory of its killed daemons refers to that world.
        let number = NUMBER.replace(NUMBER.get() + 1);
        let name = format!("ringmill-sim-{}-{number}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("a short name");
        let listener = UnixListener::bind_addr(&address).expect("a socket");
        fds.keep(listener.as_raw_fd());
        Socket { fds: fds.clone(), listener, address }
    }

    /// The daemon's copy.
    pub(crate) fn for_daemon(&self) -> OwnedFd {
        self.listener.as_fd().try_clone_to_owned().expect("a descriptor")
    }

    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect_addr(&self.address).expect("the listener exists")
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.fds.forget(self.listener.as_raw_fd());
    }
}
