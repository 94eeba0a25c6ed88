//! Generic netlink: messages to the kernel's NBD client, and its answers.
//!
//! The layouts are those of linux/netlink.h, linux/genetlink.h and linux/nbd-netlink.h. Integers have the host's byte order.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recvfrom, send, socket,
};

/// Bytes of `struct nlmsghdr`, and of `struct genlmsghdr` after it.
const HEADER_LEN: usize = 16;
const FAMILY_HEADER_LEN: usize = 4;
/// Bytes of `struct nlattr`. Attributes begin at multiples of it.
const ATTRIBUTE_LEN: usize = 4;
/// `NLMSG_ERROR`: the end of an answer, with an errno or 0.
const ERROR: u16 = 2;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const REQUEST: u16 = 1 | 4;
/// `NLA_F_NESTED`: the value is a list of attributes.
const NESTED: u16 = 1 << 15;
/// The bits of an attribute's type, without `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER`.
const KIND: u16 = (1 << 14) - 1;

/// `GENL_ID_CTRL`, its command `CTRL_CMD_GETFAMILY`, and its attributes.
const CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// Room for one message of the kernel, bytes. Descriptions of a family are the longest.
const MAX_MESSAGE: usize = 16 << 10;
/// Messages that an answer may have.
const MAX_MESSAGES: u32 = 64;

/// A list of attributes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    fn put(mut self, kind: u16, value: &[u8]) -> Self {
        let Attributes(bytes) = &mut self;
        // No value is longer than a name of a device.
        let len = u16::try_from(ATTRIBUTE_LEN + value.len()).unwrap_or(u16::MAX);
        bytes.extend(len.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(ATTRIBUTE_LEN), 0);
        self
    }

    /// Adds a number.
    pub(super) fn u32(self, kind: u16, value: u32) -> Self {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds a number.
    pub(super) fn u64(self, kind: u16, value: u64) -> Self {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds a text.
    pub(super) fn text(self, kind: u16, value: &str) -> Self {
        self.put(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds a list.
    pub(super) fn list(self, kind: u16, Attributes(value): Attributes) -> Self {
        self.put(kind | NESTED, &value)
    }

    /// Returns the value of the first attribute of this type.
    fn value(&self, kind: u16) -> Option<&[u8]> {
        let mut rest = self.0.as_slice();
        while let Some((header, _)) = rest.split_first_chunk::<ATTRIBUTE_LEN>() {
            let [len, found] = pair(*header);
            let value = rest.get(ATTRIBUTE_LEN..len.into())?;
            if found & KIND == kind {
                return Some(value);
            }
            rest = rest.get(usize::from(len).next_multiple_of(ATTRIBUTE_LEN)..)?;
        }
        None
    }

    /// Returns a number.
    fn find_u16(&self, kind: u16) -> Option<u16> {
        self.value(kind)?.try_into().ok().map(u16::from_ne_bytes)
    }
}

fn pair([a, b, c, d]: [u8; 4]) -> [u16; 2] {
    [[a, b], [c, d]].map(u16::from_ne_bytes)
}

/// A message to a family.
fn message(
    family: u16,
    command: u8,
    sequence: u32,
    Attributes(attributes): &Attributes,
) -> Vec<u8> {
    let len = HEADER_LEN + FAMILY_HEADER_LEN + attributes.len();
    let mut bytes = Vec::with_capacity(len);
    bytes.extend((len as u32).to_ne_bytes());
    bytes.extend(family.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    // The sender: the kernel knows.
    bytes.extend(0u32.to_ne_bytes());
    // The version of the family, and two reserved bytes.
    bytes.extend([command, 1, 0, 0]);
    bytes.extend(attributes);
    bytes
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// The end: success, or an errno.
    End(Result<(), Errno>),
    /// What was asked for.
    Reply(Attributes),
    /// The answer to another message.
    Foreign,
}

/// Reads the first message in `bytes`, and returns it with what follows. `None`: it is cut off.
fn parse(bytes: &[u8], sequence: u32) -> Option<(Part, &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let (kind, rest) = rest.split_first_chunk::<4>()?;
    let (of, _) = rest.split_first_chunk::<4>()?;
    let len = usize::try_from(u32::from_ne_bytes(*len)).ok()?;
    let payload = bytes.get(HEADER_LEN..len)?;
    let following = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    let [kind, _flags] = pair(*kind);
    let part = match kind {
        _ if u32::from_ne_bytes(*of) != sequence => Part::Foreign,
        ERROR => {
            let errno = i32::from_ne_bytes(*payload.first_chunk::<4>()?);
            Part::End(match errno {
                0 => Ok(()),
                negative => Err(Errno::from_raw(negative.wrapping_neg())),
            })
        }
        _ => Part::Reply(Attributes(payload.get(FAMILY_HEADER_LEN..)?.to_vec())),
    };
    Some((part, following))
}

/// A socket to the kernel, for one family.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket to a family. `None`: the kernel does not have it.
    ///
    /// # Errors
    ///
    /// Those of socket(2), and what the kernel answers.
    pub(super) fn open(family: &str) -> io::Result<Option<Self>> {
        let (kind, flags) = (SockType::Raw, SockFlag::SOCK_CLOEXEC);
        let protocol = SockProtocol::NetlinkGeneric;
        let socket = match socket(AddressFamily::Netlink, kind, flags, protocol) {
            // No generic netlink.
            Err(Errno::EAFNOSUPPORT | Errno::EPROTONOSUPPORT) => return Ok(None),
            socket => socket?,
        };
        let mut netlink = Netlink { socket, family: CONTROLLER, sequence: 0 };
        let name = Attributes::default().text(FAMILY_NAME, family);
        match netlink.request(GET_FAMILY, &name) {
            Ok(found) => {
                netlink.family = found.find_u16(FAMILY_ID).ok_or(Errno::EBADMSG)?;
                Ok(Some(netlink))
            }
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sends a command, and waits for the answer.
    ///
    /// # Errors
    ///
    /// The kernel's. `EBADMSG`: its answer cannot be understood.
    pub(super) fn request(
        &mut self,
        command: u8,
        attributes: &Attributes,
    ) -> Result<Attributes, Errno> {
        self.sequence = self.sequence.wrapping_add(1);
        let message = message(self.family, command, self.sequence, attributes);
        send(self.socket.as_raw_fd(), &message, MsgFlags::empty())?;
        let mut reply = Attributes::default();
        let mut buf = vec![0; MAX_MESSAGE];
        for _ in 0..MAX_MESSAGES {
            let received = recvfrom::<NetlinkAddr>(self.socket.as_raw_fd(), &mut buf);
            let (len, from) = match received {
                Err(Errno::EINTR) => continue,
                received => received?,
            };
            // Any process can send to this socket.
            if from.is_none_or(|from| from.pid() != 0) {
                continue;
            }
            let mut rest = buf.get(..len).unwrap_or_default();
            while !rest.is_empty() {
                let (part, following) = parse(rest, self.sequence).ok_or(Errno::EBADMSG)?;
                match part {
                    Part::End(result) => return result.map(|()| reply),
                    Part::Reply(attributes) => reply = attributes,
                    Part::Foreign => {}
                }
                rest = following;
            }
        }
        Err(Errno::EBADMSG)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_where_they_were_put() {
        let inner = Attributes::default().u32(1, 7);
        let all = Attributes::default().text(10, "abc").u64(2, 1 << 40).list(7, inner.clone());
        let all = all.u32(1, 99);
        assert_eq!(all.0.len() % ATTRIBUTE_LEN, 0);
        assert_eq!(all.value(10), Some(&b"abc\0"[..]));
        assert_eq!(all.value(2), Some(&(1u64 << 40).to_ne_bytes()[..]));
        assert_eq!(all.value(7), Some(&*inner.0));
        assert_eq!(all.value(1), Some(&99u32.to_ne_bytes()[..]));
        // Another length than that of a number.
        assert_eq!(all.find_u16(1), None);
        assert_eq!(all.value(3), None);
    }

    #[test]
    fn answers_are_read_to_their_end() {
        let reply = Attributes::default().u32(1, 3);
        let mut bytes = message(30, 1, 5, &reply);
        let mut end = message(ERROR, 0, 5, &Attributes::default());
        // In the place of the family's header.
        end[HEADER_LEN..].copy_from_slice(&(-16i32).to_ne_bytes());
        bytes.extend(end);
        let (part, rest) = parse(&bytes, 5).expect("a reply");
        assert_eq!(part, Part::Reply(reply));
        assert_eq!(parse(rest, 5), Some((Part::End(Err(Errno::EBUSY)), &[][..])));
        assert_eq!(parse(rest, 6), Some((Part::Foreign, &[][..])));
    }

    #[test]
    fn no_bytes_make_the_parser_panic() {
        let whole = message(30, 1, 5, &Attributes::default().u32(1, 3).text(2, "name"));
        for len in 0..whole.len() {
            assert_eq!(parse(&whole[..len], 5), None);
        }
        for place in 0..whole.len() {
            for byte in [0, 1, 3, 4, 5, 127, 128, 255] {
                let mut bytes = whole.clone();
                bytes[place] = byte;
                if let Some((Part::Reply(attributes), _)) = parse(&bytes, 5) {
                    for kind in 0..4 {
                        let _ = attributes.find_u16(kind);
                    }
                }
            }
        }
    }
}
