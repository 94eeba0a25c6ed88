//! A TCP port for a daemon.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, setsockopt, socket, sockopt,
};

/// A port of 127.0.0.1 that is the test's until this is dropped.
///
/// A bound socket keeps it: the kernel gives the port to none that takes any. It does not listen, and both it and the
/// daemon's have `SO_REUSEADDR`, so that a daemon that asks for the port by its number has it.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _socket: OwnedFd,
}

impl Port {
    /// Takes one.
    #[expect(clippy::new_without_default, reason = "it is not a value but a socket")]
    pub fn new() -> Self {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None).expect("a socket");
        setsockopt(&socket, sockopt::ReuseAddr, &true).expect("an option of sockets");
        let any = SockaddrIn::new(127, 0, 0, 1, 0);
        bind(socket.as_raw_fd(), &any).expect("a port");
        let address = getsockname::<SockaddrIn>(socket.as_raw_fd());
        Self { number: address.expect("an address").port(), _socket: socket }
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }
}
