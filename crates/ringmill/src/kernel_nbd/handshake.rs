//! The handshake with the NBD export of this host's own daemon, before the kernel gets the connection.
//!
//! The kernel knows simple replies only, so nothing else is negotiated.

use std::io::{self, Read, Write};

use nbd_wire::client::{
    Handshake, MAGIC_LEN, Nonsense, OPTION_REPLY_LEN, OptionAnswer, OptionReplyHeader, encode_go,
};
use nbd_wire::option::{OptionReply, code};
use nbd_wire::{flag, handshake_flag};

/// Replies that the server may send to the choice of an export.
const MAX_REPLIES: u32 = 16;

/// The export, as the server describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Export {
    /// Its size, bytes.
    pub(super) size: u64,
    /// Its transmission flags, `NBD_FLAG_*`.
    pub(super) flags: u16,
}

/// Chooses an export. From then on, the connection has requests and simple replies.
///
/// # Errors
///
/// Those of the connection. `InvalidData`: it is no such server, or the server refuses.
pub(super) fn shake_hands(mut socket: impl Read + Write, export: &str) -> io::Result<Export> {
    let mut magic = [0; MAGIC_LEN];
    socket.read_exact(&mut magic)?;
    if Handshake::parse(&magic).map_err(nonsense)? != Handshake::Newstyle {
        return Err(wrong("the server has no names of exports"));
    }
    let mut flags = [0; 2];
    socket.read_exact(&mut flags)?;
    let wanted = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    if u16::from_be_bytes(flags) & wanted != wanted {
        return Err(wrong("the server is too old"));
    }
    let mut message = u32::from(wanted).to_be_bytes().to_vec();
    encode_go(export, &mut message);
    socket.write_all(&message)?;
    let mut found = None;
    let mut data = Vec::new();
    for _ in 0..MAX_REPLIES {
        let mut header = [0; OPTION_REPLY_LEN];
        socket.read_exact(&mut header)?;
        let header = OptionReplyHeader::parse(&header).map_err(nonsense)?;
        if header.option != code::GO {
            return Err(wrong("a reply to another option than the one sent"));
        }
        data.resize(header.len as usize, 0);
        socket.read_exact(&mut data)?;
        match OptionAnswer::parse(header.kind, &data).map_err(nonsense)? {
            OptionAnswer::Reply(OptionReply::Export { size, flags }) => {
                found = Some(Export { size, flags });
            }
            OptionAnswer::Reply(OptionReply::Ack) => {
                let found = found.filter(|found| found.flags & flag::HAS_FLAGS != 0);
                return found.ok_or_else(|| wrong("the server did not describe the export"));
            }
            OptionAnswer::Reply(_) | OptionAnswer::Unknown => {}
            OptionAnswer::Refused { code, message } => {
                return Err(wrong(&format!("the server refuses (error {code:#x}): {message}")));
            }
        }
    }
    Err(wrong("too many replies to an option"))
}

fn nonsense(Nonsense(why): Nonsense) -> io::Error {
    wrong(why)
}

fn wrong(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nbd_wire::{INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC};

    /// A server whose words are known beforehand.
    struct Said<'a>(&'a [u8]);

    impl Read for Said<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.0.read(buf)
        }
    }

    impl Write for Said<'_> {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            Ok(buf.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn reply(kind: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        for number in [code::GO, kind, data.len() as u32] {
            bytes.extend(number.to_be_bytes());
        }
        bytes.extend(data);
        bytes
    }

    fn greeting() -> Vec<u8> {
        let mut bytes = INIT_MAGIC.to_be_bytes().to_vec();
        bytes.extend(OPTION_MAGIC.to_be_bytes());
        bytes.extend(3u16.to_be_bytes());
        bytes
    }

    #[test]
    fn the_export_is_as_the_server_describes_it() {
        let mut info = 0u16.to_be_bytes().to_vec();
        info.extend((64u64 << 20).to_be_bytes());
        info.extend(0x16du16.to_be_bytes());
        let mut said = greeting();
        said.extend(reply(3, &info));
        said.extend(reply(1, &[]));
        let export = Export { size: 64 << 20, flags: 0x16d };
        assert_eq!(shake_hands(Said(&said), "disk").expect("an export"), export);
        // At each place where the server may leave.
        for len in 0..said.len() {
            assert!(shake_hands(Said(&said[..len]), "disk").is_err());
        }
    }

    #[test]
    fn a_server_that_refuses_is_quoted() {
        let mut said = greeting();
        said.extend(reply(1 << 31 | 6, b"no such export"));
        let error = shake_hands(Said(&said), "disk").expect_err("a refusal");
        assert!(error.to_string().ends_with("no such export"), "{error}");
    }
}
