//! Replies, from bytes to the requests that they answer.

use exports::nbd::wire::client::{ChunkKind, ReplyHeader};
use exports::nbd::wire::reply::ReplyMode;

use super::connection::Connection;
use super::request::{Kind, Request};

impl Connection {
    /// Takes all replies that have come whole.
    pub(super) fn take_replies(&self, mode: ReplyMode) {
        let mut input = self.input.take();
        let mut taken = 0;
        while let Some(len) = self.take_reply(mode, &input[taken..]) {
            taken += len;
        }
        input.drain(..taken);
        self.input.replace(input);
    }

    /// Takes one, or a chunk of one: its length. `None`: it has not come whole.
    fn take_reply(&self, mode: ReplyMode, bytes: &[u8]) -> Option<usize> {
        let (header, len) = match ReplyHeader::parse(bytes, mode)? {
            Ok(header) => header,
            Err(nonsense) => self.fail(nonsense.0),
        };
        let rest = &bytes[len..];
        match header {
            ReplyHeader::Simple { cookie, error } => {
                let came = self.with(cookie, |request| match error {
                    0 => request.answer_bytes(),
                    _ => 0,
                });
                let data = rest.get(..came)?;
                if mode != ReplyMode::Simple {
                    self.fail("a simple reply where structured ones are agreed on");
                }
                self.with(cookie, |request| {
                    request.came.data = data.to_vec();
                    request.came.count = came;
                    request.came.error = error;
                });
                self.is_whole(cookie);
                Some(len + came)
            }
            ReplyHeader::Chunk { cookie, kind, done, len: payload } => {
                let payload = rest.get(..usize::try_from(payload).expect("an address"))?;
                self.with(cookie, |request| {
                    if let Err(wrong) = take_chunk(request, kind, payload) {
                        self.fail(&format!("{request:?} gets {kind:?}: {wrong}"));
                    }
                });
                if done {
                    self.is_whole(cookie);
                }
                Some(len + payload.len())
            }
        }
    }

    /// The request with that cookie.
    fn with<T>(&self, cookie: u64, call: impl FnOnce(&mut Request) -> T) -> T {
        match self.requests.borrow_mut().get_mut(&cookie) {
            Some(request) => call(request),
            None => self.fail(&format!("a reply to {cookie:#x}, which is not under way")),
        }
    }

    fn is_whole(&self, cookie: u64) {
        let request = self.requests.borrow_mut().remove(&cookie).expect("it was there");
        let error = request.came.error;
        self.answered(request, error);
    }
}

/// Adds the contents of a chunk to the request.
fn take_chunk(request: &mut Request, kind: ChunkKind, payload: &[u8]) -> Result<(), &'static str> {
    match kind {
        ChunkKind::None if payload.is_empty() => {}
        ChunkKind::OffsetData if request.kind == Kind::Read && payload.len() > 8 => {
            let (offset, data) = payload.split_at(8);
            place(request, offset, data.len())?.copy_from_slice(data);
        }
        ChunkKind::OffsetHole if request.kind == Kind::Read && payload.len() == 12 => {
            let (offset, len) = payload.split_at(8);
            let len = u32::from_be_bytes(len.try_into().expect("4 bytes"));
            place(request, offset, len as usize)?.fill(0);
        }
        ChunkKind::BlockStatus if payload.len() > 4 => {
            let extents = payload[4..].chunks_exact(8);
            request.came.extents.extend(extents.map(pair));
        }
        ChunkKind::BlockStatusExt if payload.len() > 8 => {
            let extents = payload[8..].chunks_exact(16);
            request.came.extents.extend(extents.map(pair));
        }
        ChunkKind::Error if payload.len() >= 6 => {
            request.came.error = u32::from_be_bytes(payload[..4].try_into().expect("4 bytes"));
            if request.came.error == 0 {
                return Err("an error that is none");
            }
        }
        _ => return Err("that makes no sense"),
    }
    Ok(())
}

/// Returns the place in the request's buffer for `len` bytes read at `offset`. Counts these bytes as received.
fn place<'a>(
    request: &'a mut Request,
    offset: &[u8],
    len: usize,
) -> Result<&'a mut [u8], &'static str> {
    let offset = u64::from_be_bytes(offset.try_into().expect("8 bytes"));
    let begin = offset.wrapping_sub(request.offset()) as usize;
    let whole = request.bytes();
    if begin > whole || len > whole - begin {
        return Err("data that are not of its range");
    }
    request.came.data.resize(whole, 0);
    request.came.count += len;
    Ok(&mut request.came.data[begin..begin + len])
}

/// The two integers that bytes are halves of.
fn pair(bytes: &[u8]) -> (u64, u64) {
    let (a, b) = bytes.split_at(bytes.len() / 2);
    let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    (number(a), number(b))
}
