//! Replies of a vfio-user server.

use vcpu::vfio_user::wire::HEADER;

/// The header's flag of a reply with an errno.
const ERROR: u32 = 1 << 5;

/// A reply: its errno, 0 for none, and its payload.
pub(crate) struct Reply {
    pub(crate) errno: u32,
    pub(crate) payload: Vec<u8>,
}

/// Takes a complete reply off `input`, with the numbers of its message and command.
pub(super) fn take_reply(input: &mut Vec<u8>) -> Option<(u16, u16, Reply)> {
    let size = u32_at(input.get(..HEADER)?, 4) as usize;
    if input.len() < size {
        return None;
    }
    let bytes: Vec<u8> = input.drain(..size.max(HEADER)).collect();
    let ids = u32_at(&bytes, 0);
    let errno = if u32_at(&bytes, 8) & ERROR != 0 { u32_at(&bytes, 12) } else { 0 };
    let payload = bytes[HEADER..].to_vec();
    Some((ids as u16, (ids >> 16) as u16, Reply { errno, payload }))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}
