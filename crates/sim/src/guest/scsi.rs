//! Requests as virtio-scsi's driver encodes them (virtio 1.3, 5.6.6; SBC-3, SPC-4).

use super::request::{ENDED, IO_ERROR, Kind, OK, Parts, UNIT_ATTENTION, UNSUPPORTED};
use crate::model::SECTOR;
use crate::random::Random;

/// Length of the response, which precedes data, bytes.
pub(super) const ANSWER: u32 = 108;

/// Number of queues before the request queues: control and event.
pub(super) const FIRST_QUEUE: u16 = 2;

/// A status that is always wrong.
const WRONG: u8 = 0xee;

/// Offsets in a response: SCSI status, virtio response, sense data.
const STATUS: usize = 10;
const RESPONSE: usize = 11;
const SENSE: usize = 12;

/// Encodes a request, except the data of a write. `id` is unique among requests in flight.
pub(super) fn parts(random: &Random, id: u64, kind: Kind, first: u32, count: u32) -> Parts {
    let long = random.one_in(2);
    let mut cdb = [0; 32];
    let (mut parameters, mut from_device, mut fua) = (Vec::new(), 0, false);
    match kind {
        Kind::Read => {
            range(&mut cdb, [0x28, 0x88], long, first.into(), count);
            from_device = count * SECTOR as u32;
        }
        Kind::Write => {
            range(&mut cdb, [0x2a, 0x8a], long, first.into(), count);
            fua = random.one_in(8);
            cdb[1] = u8::from(fua) << 3;
        }
        // SYNCHRONIZE CACHE of the whole disk.
        Kind::Flush => range(&mut cdb, [0x35, 0x91], long, 0, 0),
        // WRITE SAME of a block of zeroes; the longer form may omit the block.
        Kind::Zeroes(unmap) => {
            range(&mut cdb, [0x41, 0x93], long, first.into(), count);
            let no_data = long && random.one_in(2);
            cdb[1] = u8::from(unmap) << 3 | u8::from(no_data);
            if !no_data {
                parameters = vec![0; SECTOR];
            }
        }
        // UNMAP with one descriptor.
        Kind::Discard => {
            (cdb[0], cdb[8]) = (0x42, 24);
            parameters.extend([0, 22, 0, 16, 0, 0, 0, 0]);
            parameters.extend(u64::from(first).to_be_bytes());
            parameters.extend(count.to_be_bytes());
            parameters.extend([0; 4]);
        }
        // INQUIRY: standard data.
        Kind::GetId => {
            (cdb[0], cdb[4]) = (0x12, 36);
            from_device = 36;
        }
        // Beyond the end of any disk, grown disks included.
        Kind::OutOfRange => {
            range(&mut cdb, [0x28, 0x88], true, u64::MAX, 1);
            from_device = SECTOR as u32;
        }
        Kind::Unknown => cdb[0] = 0x7f,
    }
    // Target 0, logical unit 0.
    let mut header = vec![1, 0, 0, 0, 0, 0, 0, 0];
    header.extend(id.to_le_bytes());
    header.extend([0; 3]);
    header.extend(cdb);
    Parts { header, parameters, from_device, fua }
}

/// Operation code, address and count of a command of 10 or 16 bytes.
fn range(cdb: &mut [u8; 32], opcodes: [u8; 2], long: bool, lba: u64, count: u32) {
    cdb[0] = opcodes[usize::from(long)];
    if long {
        cdb[2..10].copy_from_slice(&lba.to_be_bytes());
        cdb[10..14].copy_from_slice(&count.to_be_bytes());
    } else {
        cdb[2..6].copy_from_slice(&(lba as u32).to_be_bytes());
        cdb[7..9].copy_from_slice(&(count as u16).to_be_bytes());
    }
}

/// Translates a response to a status of virtio-blk.
pub(super) fn status(kind: Kind, response: &[u8; ANSWER as usize]) -> u8 {
    let (key, code) = (response[SENSE + 2] & 0x0f, response[SENSE + 12]);
    match (response[RESPONSE], response[STATUS]) {
        (0, 0) => OK,
        // CHECK CONDITION.
        (0, 2) => match (key, code) {
            (6, _) => UNIT_ATTENTION,
            // INVALID COMMAND OPERATION CODE; LOGICAL BLOCK ADDRESS OUT OF RANGE.
            (5, 0x20) if kind == Kind::Unknown => UNSUPPORTED,
            (5, 0x21) if kind == Kind::OutOfRange => IO_ERROR,
            // MEDIUM ERROR, HARDWARE ERROR, DATA PROTECT (no space), ABORTED COMMAND.
            (3 | 4 | 7 | 0xb, _) if kind.moves_data() => IO_ERROR,
            _ => WRONG,
        },
        // VIRTIO_SCSI_S_ABORTED, VIRTIO_SCSI_S_RESET.
        (2 | 4, _) => ENDED,
        _ => WRONG,
    }
}
