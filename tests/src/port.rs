//! A TCP port for a daemon.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, setsockopt, socket, sockopt,
};

/// A port of 127.0.0.1, reserved until this is dropped.
///
/// A bound socket reserves the port: the kernel does not give it to a process that asks for any port. The
/// socket does not listen, and has `SO_REUSEADDR` like the daemon's. A daemon that asks for this number
/// therefore gets the port.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _socket: OwnedFd,
}

impl Port {
    /// Reserves a free port.
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

    /// Returns the number of the port.
    pub fn number(&self) -> u16 {
        self.number
    }
}
