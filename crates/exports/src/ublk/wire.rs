//! The layouts of `linux/ublk_cmd.h`, without I/O. All numbers are in native byte order.

#![forbid(unsafe_code)]

use block::node::Geometry;
use block::request::Op;
use nix::errno::Errno;
use stats::Kind;

/// Bytes of data of the largest request, and of each request's memory.
pub const MAX_IO: usize = 512 << 10;
/// The sector of the kernel's block layer, bytes.
const SECTOR: u64 = 512;
/// Bytes of `struct ublksrv_io_desc`.
pub const DESCRIPTOR: usize = 24;
/// Bytes between the descriptors of two queues in the device's file: 4096 of them.
const DESCRIPTORS_OF_QUEUE: u64 = 4096 * DESCRIPTOR as u64;
/// Sectors of the largest discard: 1 GiB.
const MAX_DISCARD: u32 = 1 << 21;
/// Sectors of the largest write-zeroes: 32 MiB, as a node may have to write the zeroes.
const MAX_WRITE_ZEROES: u32 = 1 << 16;

/// `UBLK_F_*`: features of a device.
pub mod features {
    /// The device outlives its server.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests that were in flight are sent again to the next server.
    pub const RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands have the numbers of ioctls.
    pub const IOCTL_ENCODE: u64 = 1 << 6;
    /// The size can be changed (Linux 6.16).
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// The device can be quiesced (Linux 6.16).
    pub const QUIESCE: u64 = 1 << 12;
    /// The device can be stopped on condition that it is not open (Linux 7.0).
    pub const SAFE_STOP: u64 = 1 << 17;
    /// The kernel leaves the search for partitions to BLKRRPART, whoever serves the device (Linux 7.0).
    pub const NO_PARTITION_SCAN: u64 = 1 << 18;
}

/// A command to `/dev/ublk-control`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Command {
    /// Describes a device.
    GetInfo = 0x02,
    /// Makes a device.
    Add = 0x04,
    /// Removes a device, and waits until its file is closed.
    Delete = 0x05,
    /// Makes the block device, once all queues wait for requests.
    Start = 0x06,
    /// Removes the block device.
    Stop = 0x07,
    /// Sets the parameters of a device that was not started.
    SetParameters = 0x08,
    /// Returns the parameters.
    GetParameters = 0x09,
    /// Prepares a device for its next server.
    StartRecovery = 0x10,
    /// Continues the device, once all queues wait for requests.
    EndRecovery = 0x11,
    /// Returns the driver's features.
    GetFeatures = 0x13,
    /// Removes a device. Its number is free once its files are closed.
    DeleteLater = 0x14,
    /// Changes the size.
    UpdateSize = 0x15,
    /// Takes the device from its server.
    Quiesce = 0x16,
    /// Removes the block device unless it is open.
    TryStop = 0x17,
}

impl Command {
    /// All commands.
    const ALL: [Command; 14] = [
        Command::GetInfo,
        Command::Add,
        Command::Delete,
        Command::Start,
        Command::Stop,
        Command::SetParameters,
        Command::GetParameters,
        Command::StartRecovery,
        Command::EndRecovery,
        Command::GetFeatures,
        Command::DeleteLater,
        Command::UpdateSize,
        Command::Quiesce,
        Command::TryStop,
    ];

    /// Returns the command with this number.
    pub fn of(number: u8) -> Option<Command> {
        Self::ALL.into_iter().find(|command| *command as u8 == number)
    }

    /// The driver's number: that of an ioctl of type `u` with a `struct ublksrv_ctrl_cmd`.
    pub(super) fn code(self) -> u32 {
        let direction: u32 = match self {
            Command::GetInfo
            | Command::GetParameters
            | Command::GetFeatures
            | Command::DeleteLater => 2,
            _ => 3,
        };
        direction << 30 | 32 << 16 | u32::from(b'u') << 8 | u32::from(self as u8)
    }
}

/// Numbers of the commands to a device's file: ioctls of type `u` with a `struct ublksrv_io_cmd`.
pub(super) const FETCH: u32 = 3 << 30 | 16 << 16 | (b'u' as u32) << 8 | 0x20;
pub(super) const COMMIT_AND_FETCH: u32 = FETCH + 1;

/// The first half of `struct ublksrv_io_cmd`; an address follows.
pub(super) fn io_command(queue: u16, tag: u16, result: i32) -> u64 {
    u64::from(queue) | u64::from(tag) << 16 | u64::from(result.cast_unsigned()) << 32
}

/// Where a queue's descriptors are in the device's file, and their bytes, rounded up to pages.
pub(super) fn descriptors(queue: u16, depth: u16) -> (u64, usize) {
    let len = (usize::from(depth) * DESCRIPTOR).next_multiple_of(4096);
    (u64::from(queue) * DESCRIPTORS_OF_QUEUE, len)
}

/// The state of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It was not started, or has been stopped.
    Dead,
    /// A server has it.
    Live,
    /// Its server has gone. Requests wait.
    Quiesced,
    /// Its server has gone. Requests fail.
    Failing,
}

/// `struct ublksrv_ctrl_dev_info`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    /// Queues.
    pub queues: u16,
    /// Requests of a queue that are in flight at once.
    pub depth: u16,
    /// Its state.
    pub state: State,
    /// Bytes of data of a request, at most.
    pub max_io: u32,
    /// The number of the device.
    pub id: u32,
    /// The server's process.
    pub pid: i32,
    /// [Features](features).
    pub flags: u64,
    /// The server's own, see [`owner`].
    pub owner: u64,
}

impl Info {
    /// Bytes of the structure.
    pub const SIZE: usize = 64;

    /// Returns the structure, for [`Command::Add`].
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::SIZE];
        put(&mut bytes, 0, &self.queues.to_ne_bytes());
        put(&mut bytes, 2, &self.depth.to_ne_bytes());
        put(&mut bytes, 8, &self.max_io.to_ne_bytes());
        put(&mut bytes, 12, &self.id.to_ne_bytes());
        put(&mut bytes, 24, &self.flags.to_ne_bytes());
        put(&mut bytes, 32, &self.owner.to_ne_bytes());
        bytes
    }

    /// Reads the structure. `None`: it is too short, or has an unknown state.
    pub fn decode(bytes: &[u8]) -> Option<Info> {
        Some(Info {
            queues: u16::from_ne_bytes(get(bytes, 0)?),
            depth: u16::from_ne_bytes(get(bytes, 2)?),
            state: match u16::from_ne_bytes(get(bytes, 4)?) {
                0 => State::Dead,
                1 => State::Live,
                2 => State::Quiesced,
                3 => State::Failing,
                _ => return None,
            },
            max_io: u32::from_ne_bytes(get(bytes, 8)?),
            id: u32::from_ne_bytes(get(bytes, 12)?),
            pid: i32::from_ne_bytes(get(bytes, 16)?),
            flags: u64::from_ne_bytes(get(bytes, 24)?),
            owner: u64::from_ne_bytes(get(bytes, 32)?),
        })
    }
}

/// What an export leaves in its device for the next daemon to recognize: a mark, and a hash of the export's name (FNV-1a).
pub fn owner(export: &str) -> u64 {
    let hash = export
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    u64::from(u32::from_ne_bytes(*b"ring")) << 32 | u64::from(hash)
}

/// The parts of `struct ublk_params` that are used: basic, and discard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameters {
    /// `UBLK_ATTR_*`.
    attributes: u32,
    /// Size of the physical block, as a power of two.
    physical_shift: u8,
    /// Size in sectors.
    pub sectors: u64,
    discard_granularity: u32,
    max_discard: u32,
    max_write_zeroes: u32,
}

const READ_ONLY: u32 = 1 << 0;
const VOLATILE_CACHE: u32 = 1 << 2;
const FUA: u32 = 1 << 3;
const TYPE_BASIC: u32 = 1 << 0;
const TYPE_DISCARD: u32 = 1 << 1;

impl Parameters {
    /// Bytes that are used of the structure.
    pub const SIZE: usize = 60;

    /// The parameters of a device for a node. `through`: each write is durable before its answer.
    pub fn of(node: &Geometry, writable: bool, through: bool) -> Self {
        let block = node.physical_block_size.max(node.request_alignment).clamp(512, 4096);
        let cache = if node.write_cache && !through { VOLATILE_CACHE | FUA } else { 0 };
        let if_writable = |has, max| if has && writable { max } else { 0 };
        Parameters {
            attributes: if writable { cache } else { READ_ONLY },
            physical_shift: block.ilog2() as u8,
            sectors: node.size / SECTOR,
            discard_granularity: node.discard_granularity.max(512),
            max_discard: if_writable(node.discard, MAX_DISCARD),
            max_write_zeroes: if_writable(node.write_zeroes, MAX_WRITE_ZEROES),
        }
    }

    /// Returns the structure.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::SIZE];
        let size = Self::SIZE as u32;
        put(&mut bytes, 0, &size.to_ne_bytes());
        put(&mut bytes, 4, &(TYPE_BASIC | TYPE_DISCARD).to_ne_bytes());
        put(&mut bytes, 8, &self.attributes.to_ne_bytes());
        let logical = SECTOR.ilog2() as u8;
        put(
            &mut bytes,
            12,
            &[logical, self.physical_shift, self.physical_shift, self.physical_shift],
        );
        put(&mut bytes, 16, &((MAX_IO as u64 / SECTOR) as u32).to_ne_bytes());
        put(&mut bytes, 24, &self.sectors.to_ne_bytes());
        put(&mut bytes, 44, &self.discard_granularity.to_ne_bytes());
        put(&mut bytes, 48, &self.max_discard.to_ne_bytes());
        put(&mut bytes, 52, &self.max_write_zeroes.to_ne_bytes());
        put(&mut bytes, 56, &1_u16.to_ne_bytes());
        bytes
    }

    /// Reads the structure. `None`: it is too short.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let [_, physical_shift, ..] = get::<4>(bytes, 12)?;
        Some(Parameters {
            attributes: u32::from_ne_bytes(get(bytes, 8)?),
            physical_shift,
            sectors: u64::from_ne_bytes(get(bytes, 24)?),
            discard_granularity: u32::from_ne_bytes(get(bytes, 44)?),
            max_discard: u32::from_ne_bytes(get(bytes, 48)?),
            max_write_zeroes: u32::from_ne_bytes(get(bytes, 52)?),
        })
    }

    /// Why a device with the parameters `self` cannot serve a node whose device would have `wanted`. The size is left out.
    pub fn contradiction(&self, wanted: &Parameters) -> Option<&'static str> {
        if self.attributes & READ_ONLY != wanted.attributes & READ_ONLY {
            return Some("'writable' was another");
        }
        // Without the attribute, nothing would be flushed.
        if self.attributes & VOLATILE_CACHE == 0 && wanted.attributes & VOLATILE_CACHE != 0 {
            return Some("its writes need no flush, and those of the node do");
        }
        if self.max_discard > wanted.max_discard || self.max_write_zeroes > wanted.max_write_zeroes
        {
            return Some("it discards or zeroes what the node cannot");
        }
        None
    }
}

/// A request, as the kernel describes it (`struct ublksrv_io_desc`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Described {
    /// What the node is asked for.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Bytes. 0 for a flush.
    pub len: u64,
}

impl Described {
    /// Reads a descriptor's first two words, for a device of `size` bytes.
    ///
    /// # Errors
    ///
    /// The errno of the answer.
    pub fn parse(words: [u64; 2], size: u64, writable: bool, through: bool) -> Result<Self, Errno> {
        let [first, sector] = words;
        let (flags, sectors) = (first as u32, first >> 32);
        let fua = flags & 1 << 13 != 0 || through;
        let may_unmap = flags & 1 << 15 == 0;
        let op = match flags & 0xff {
            0 => Op::Read,
            1 => Op::Write { fua },
            2 => return Ok(Described { op: Op::Flush, offset: 0, len: 0 }),
            3 => Op::Discard,
            5 => Op::WriteZeroes { may_unmap, no_fallback: false, fua },
            _ => return Err(Errno::EOPNOTSUPP),
        };
        if !writable && !op.only_reads() {
            return Err(Errno::EROFS);
        }
        let len = sectors * SECTOR;
        let offset = sector.checked_mul(SECTOR).ok_or(Errno::EIO)?;
        let end = offset.checked_add(len).ok_or(Errno::EIO)?;
        let has_data = matches!(op, Op::Read | Op::Write { .. });
        if end > size || has_data && (len == 0 || len > MAX_IO as u64) {
            return Err(op.beyond_end());
        }
        Ok(Described { op, offset, len })
    }

    /// The kind of the request for the statistics.
    pub fn kind(&self) -> Kind {
        match self.op {
            Op::Read => Kind::Read,
            Op::Write { .. } => Kind::Write,
            Op::Flush => Kind::Flush,
            Op::Discard => Kind::Discard,
            Op::WriteZeroes { .. } => Kind::WriteZeroes,
            Op::BlockStatus => Kind::Other,
        }
    }

    /// Bytes of data that the answer stands for.
    pub fn data(&self) -> u64 {
        match self.op {
            Op::Read | Op::Write { .. } => self.len,
            Op::Flush | Op::Discard | Op::WriteZeroes { .. } | Op::BlockStatus => 0,
        }
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

fn get<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_kernels_header() {
        assert_eq!(Command::Add.code(), 0xc020_7504);
        assert_eq!(Command::GetInfo.code(), 0x8020_7502);
        assert_eq!(Command::TryStop.code(), 0xc020_7517);
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
        for command in Command::ALL {
            assert_eq!(Command::of(command as u8), Some(command));
        }
    }

    #[test]
    fn structures_are_read_as_they_are_written() {
        let info = Info {
            queues: 3,
            depth: 64,
            state: State::Dead,
            max_io: MAX_IO as u32,
            id: 7,
            pid: 0,
            flags: features::USER_RECOVERY,
            owner: owner("e"),
        };
        assert_eq!(Info::decode(&info.encode()), Some(info));
        assert_eq!(Info::decode(&info.encode()[..39]), None);
        assert_ne!(owner("e"), owner("f"));
    }

    fn described(op: u32, flags: u32, sector: u64, sectors: u64) -> Result<Described, Errno> {
        let first = u64::from(op | flags) | sectors << 32;
        Described::parse([first, sector], 1 << 20, true, false)
    }

    #[test]
    fn requests_beyond_the_end_and_beyond_the_memory_are_refused() {
        let last = described(0, 0, 2047, 1).unwrap();
        assert_eq!(last, Described { op: Op::Read, offset: 2047 * 512, len: 512 });
        assert_eq!(described(0, 0, 2047, 2), Err(Errno::EIO));
        assert_eq!(described(1, 0, 2047, 2), Err(Errno::ENOSPC));
        assert_eq!(described(1, 0, u64::MAX, 1), Err(Errno::EIO));
        assert_eq!(described(0, 0, u64::MAX / 512, u32::MAX.into()), Err(Errno::EIO));
        assert_eq!(described(1, 0, 0, 0), Err(Errno::ENOSPC));
        assert_eq!(described(1, 0, 0, 1025), Err(Errno::ENOSPC), "more than the memory");
        assert_eq!(described(3, 0, 0, 2048).unwrap().op, Op::Discard);
        assert_eq!(described(4, 0, 0, 1), Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn flags_become_those_of_the_node() {
        assert_eq!(described(1, 1 << 13, 0, 1).unwrap().op, Op::Write { fua: true });
        assert_eq!(described(1, 0, 0, 1).unwrap().op, Op::Write { fua: false });
        let zeroes = |may_unmap, fua| Op::WriteZeroes { may_unmap, no_fallback: false, fua };
        assert_eq!(described(5, 1 << 15, 0, 1).unwrap().op, zeroes(false, false));
        assert_eq!(described(5, 1 << 13, 0, 1).unwrap().op, zeroes(true, true));
        let read_only = Described::parse([1 | 1 << 32, 0], 1 << 20, false, false);
        assert_eq!(read_only, Err(Errno::EROFS));
        let through = Described::parse([1 | 1 << 32, 0], 1 << 20, true, true);
        assert_eq!(through.unwrap().op, Op::Write { fua: true });
    }

    #[test]
    fn a_device_without_a_cache_does_not_take_a_node_with_one() {
        let node = Geometry {
            size: 1 << 20,
            read_only: false,
            physical_block_size: 4096,
            request_alignment: 1,
            discard: true,
            discard_granularity: 4096,
            write_zeroes: true,
            write_cache: true,
        };
        let cached = Parameters::of(&node, true, false);
        assert_eq!(Parameters::decode(&cached.encode()), Some(cached));
        let through = Parameters::of(&node, true, true);
        let read_only = Parameters::of(&node, false, false);
        assert_eq!(cached.contradiction(&cached), None);
        assert_eq!(cached.contradiction(&through), None);
        assert!(through.contradiction(&cached).is_some());
        assert!(cached.contradiction(&read_only).is_some());
        assert!(read_only.contradiction(&cached).is_some());
    }
}
