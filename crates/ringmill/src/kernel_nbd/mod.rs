//! Devices of the kernel's NBD client, `/dev/nbdN`: made, continued and removed by generic netlink.
//!
//! The client gets one connection to the daemon's own NBD export. Once the connection has ended, requests wait for the
//! next one. A time limit per request is not set: the kernel would close the connection, and a request that the daemon
//! still carries out would be sent again. With several connections, the kernel always has such a limit.

mod handshake;
pub(crate) mod keeper;
mod netlink;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use nbd_wire::flag;
use nix::errno::Errno;
use nix::libc;
use nix::sys::stat::fstat;

use self::handshake::shake_hands;
use self::netlink::{Attributes, Netlink};

/// The name of the family.
const FAMILY: &str = "nbd";

/// Commands, `NBD_CMD_*`.
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;

/// Attributes, `NBD_ATTR_*`.
const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const DEAD_CONN_TIMEOUT: u16 = 8;
const BACKEND_IDENTIFIER: u16 = 10;

/// `NBD_SOCK_ITEM`, a list, and its `NBD_SOCK_FD`.
const SOCKET_ITEM: u16 = 1;
const SOCKET_FD: u16 = 1;

/// Bytes of a sector.
const SECTOR: u64 = 512;
/// How long requests wait for the next connection, seconds: a year. Without a limit, they fail at once.
const PATIENCE: u64 = 365 * 24 * 3600;
/// Milliseconds after which the kernel looks at a request in flight. If its connection has been replaced, the request is
/// sent again.
const LOOK_MS: u32 = 5000;
/// How often, and after what time, a connection is offered to a device that has not noticed the end of the one before.
const OFFERS: u32 = 500;
const OFFER_AGAIN: Duration = Duration::from_millis(20);
/// What the kernel's client can make use of, of what the daemon's export offers.
const KNOWN_FLAGS: u16 = flag::HAS_FLAGS
    | flag::READ_ONLY
    | flag::SEND_FLUSH
    | flag::SEND_FUA
    | flag::SEND_TRIM
    | flag::SEND_WRITE_ZEROES
    | flag::CAN_MULTI_CONN;

/// Returns whether this kernel has the client.
///
/// # Errors
///
/// Those of the netlink socket.
pub(crate) fn is_there() -> io::Result<bool> {
    Netlink::open(FAMILY).map(|found| found.is_some())
}

/// Returns the name of the export that a device belongs to. `None`: the device is not connected, and does not wait for a
/// connection. An empty name: the kernel does not keep it (before 5.14), or another program has made the device.
pub(crate) fn owner(number: u32) -> Option<String> {
    let folder = sysfs(number);
    // The file is there while the device is configured.
    folder.join("pid").exists().then(|| {
        let owner = fs::read_to_string(folder.join("backend")).unwrap_or_default();
        owner.trim_end().to_owned()
    })
}

/// Returns whether a device belongs to an export.
pub(crate) fn is_of(number: u32, id: &str) -> bool {
    owner(number).is_some_and(|owner| owner == id || (owner.is_empty() && !keeps_owners(number)))
}

/// Returns whether the kernel keeps the name, as it does since 5.14.
fn keeps_owners(number: u32) -> bool {
    sysfs(number).join("backend").exists()
}

fn sysfs(number: u32) -> PathBuf {
    format!("/sys/block/nbd{number}").into()
}

fn device(number: u32) -> PathBuf {
    format!("/dev/nbd{number}").into()
}

/// What a device is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted<'a> {
    /// The name of the daemon's export, by which the device is found again.
    pub(crate) id: &'a str,
    pub(crate) number: u32,
    /// The socket of the daemon's NBD server.
    pub(crate) socket: &'a Path,
    /// Requests wait for the next connection when the daemon has ended, instead of failing.
    pub(crate) recovery: bool,
}

impl Wanted<'_> {
    /// Makes the device, or continues with the one that a daemon has left. The daemon has to serve meanwhile.
    ///
    /// # Errors
    ///
    /// Those of the connection and of the kernel.
    pub(crate) fn make(self) -> io::Result<()> {
        let mut netlink = Netlink::open(FAMILY)?.ok_or(io::ErrorKind::Unsupported)?;
        if is_of(self.number, self.id) {
            self.reconnect(&mut netlink)?;
        } else {
            let (_socket, attributes) = self.connect()?;
            netlink.request(CONNECT, &attributes)?;
        }
        // Kernels before 5.0 look after 30 s.
        let _ = fs::write(sysfs(self.number).join("queue/io_timeout"), LOOK_MS.to_string());
        // The kernel looks for partitions when the device is opened.
        File::open(device(self.number))?;
        Ok(())
    }

    /// Connects to the daemon. Returns the connection, and the attributes of a device that uses it.
    fn connect(self) -> io::Result<(OwnedFd, Attributes)> {
        let socket = UnixStream::connect(self.socket)?;
        let export = shake_hands(&socket, self.id)?;
        let socket = OwnedFd::from(socket);
        let item = Attributes::default().u32(SOCKET_FD, socket.as_raw_fd().cast_unsigned());
        let attributes = Attributes::default()
            .u32(INDEX, self.number)
            .u64(SIZE_BYTES, export.size / SECTOR * SECTOR)
            .u64(BLOCK_SIZE_BYTES, SECTOR)
            .u64(TIMEOUT, 0)
            .u64(SERVER_FLAGS, (export.flags & KNOWN_FLAGS).into())
            .u64(DEAD_CONN_TIMEOUT, if self.recovery { PATIENCE } else { 0 })
            .text(BACKEND_IDENTIFIER, self.id)
            .list(SOCKETS, Attributes::default().list(SOCKET_ITEM, item));
        Ok((socket, attributes))
    }

    /// Gives a device a new connection.
    ///
    /// The kernel ignores a connection, without an error, until it has noticed the end of the one before.
    fn reconnect(self, netlink: &mut Netlink) -> io::Result<()> {
        for _ in 0..OFFERS {
            let (socket, attributes) = self.connect()?;
            netlink.request(RECONFIGURE, &attributes)?;
            let inode = fstat(&socket)?.st_ino;
            drop(socket);
            if is_open(inode)? {
                return Ok(());
            }
            sleep(OFFER_AGAIN);
        }
        Err(Errno::EBUSY.into())
    }
}

/// Returns whether a UNIX socket is open.
fn is_open(inode: u64) -> io::Result<bool> {
    Ok(lists(&fs::read_to_string("/proc/net/unix")?, inode))
}

/// The inode is the seventh column.
fn lists(sockets: &str, inode: u64) -> bool {
    let inode = inode.to_string();
    sockets.lines().any(|line| line.split_whitespace().nth(6) == Some(inode.as_str()))
}

/// Disconnects a device. Its requests fail.
///
/// # Errors
///
/// The kernel's.
pub(crate) fn disconnect(number: u32) -> io::Result<()> {
    let mut netlink = Netlink::open(FAMILY)?.ok_or(io::ErrorKind::Unsupported)?;
    netlink.request(DISCONNECT, &Attributes::default().u32(INDEX, number))?;
    Ok(())
}

/// Disconnects a device, unless something uses it: it is mounted, or part of another device, or a partition is. Returns
/// whether it is disconnected.
///
/// `flush`: writes what the kernel has in memory, which takes a daemon that serves.
///
/// # Errors
///
/// Those of the device and of the kernel.
pub(crate) fn disconnect_unused(number: u32, flush: bool) -> io::Result<bool> {
    let mut options = File::options();
    // Nothing can begin to use the device while it is open this way.
    let alone = match options.read(true).custom_flags(libc::O_EXCL).open(device(number)) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Ok(false),
        alone => alone?,
    };
    if flush {
        alone.sync_all()?;
    }
    disconnect(number)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_found_by_its_inode() {
        let text = "Num       RefCount Protocol Flags    Type St Inode Path\n\
                    0000000000000000: 00000003 00000000 00000000 0001 03  5123\n\
                    0000000000000000: 00000002 00000000 00010000 0001 01   512 /run/x\n";
        assert!(lists(text, 5123));
        assert!(lists(text, 512));
        assert!(!lists(text, 51));
        // The socket of this process.
        let (one, other) = UnixStream::pair().expect("a pair");
        let inode = fstat(&one).expect("a status").st_ino;
        assert!(is_open(inode).expect("a list"));
        drop((one, other));
        assert!(!is_open(inode).expect("a list"));
    }
}
