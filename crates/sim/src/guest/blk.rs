//! Requests as a driver of virtio-blk makes them (virtio 1.3, 5.2.6).

use super::request::{Kind, Parts};
use crate::model::SECTOR;

/// Bytes that the device writes after the data: the status.
pub(super) const ANSWER: u32 = 1;

/// The parts of a request, without the data to write.
pub(super) fn parts(kind: Kind, first: u32, count: u32) -> Parts {
    let number: u32 = match kind {
        Kind::Read | Kind::OutOfRange => 0,
        Kind::Write => 1,
        Kind::Flush => 4,
        Kind::GetId => 8,
        Kind::Discard => 11,
        Kind::Zeroes(_) => 13,
        Kind::Unknown => 77,
    };
    let sector = match kind {
        Kind::Read | Kind::Write => first,
        // However large the disk becomes.
        Kind::OutOfRange => u32::MAX,
        _ => 0,
    };
    let mut header = vec![0; 16];
    header[..4].copy_from_slice(&number.to_le_bytes());
    header[8..].copy_from_slice(&u64::from(sector).to_le_bytes());
    let from_device = match kind {
        Kind::Read => count * SECTOR as u32,
        Kind::OutOfRange => SECTOR as u32,
        Kind::GetId => 20,
        _ => 0,
    };
    let mut parameters = Vec::new();
    if let Kind::Zeroes(_) | Kind::Discard = kind {
        parameters.extend(u64::from(first).to_le_bytes());
        parameters.extend(count.to_le_bytes());
        parameters.extend([u8::from(kind == Kind::Zeroes(true)), 0, 0, 0]);
    }
    Parts { header, parameters, from_device, fua: false }
}
