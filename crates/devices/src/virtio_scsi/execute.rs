//! Decides how a command is carried out: an answer at once, or work for the block layer.

use block::request::Op;
use guest_memory::{AccessError, MemoryView};
use queue::Segments;

use super::answers::{allocation, answer, answer_for_nobody};
use super::cdb::{Command, parse};
use super::device::Device;
use super::lun::Lun;
use super::mode;
use super::sense::Sense;
use super::unmap::{MAX_LIST, Ranges};
use super::wire::{Address, Request, Response};

/// Maximum length of a mode parameter list, bytes.
const MAX_MODE_LIST: usize = 512;

/// What remains to be done for a command.
pub(crate) enum Work<'a> {
    /// Nothing: the answer is in the data buffer, of which this many bytes were used.
    Answered(u32),
    /// The same, with a write cache switched on. The mode is recorded once the driver has seen the answer.
    CacheOn(u32),
    /// A read or write of these segments.
    Transfer { lun: u16, op: Op, offset: u64, data: Segments<'a> },
    /// An operation without data. `used`: bytes of the data buffer used by the command.
    Plain { lun: u16, op: Op, offset: u64, len: u64, used: u32 },
    /// Several discards, at least one.
    Unmap { lun: u16, ranges: Box<Ranges>, used: u32 },
    /// The same block repeated over `len` bytes. `may_unmap`: the space may be deallocated if the block is zeroes.
    WriteSame { lun: u16, offset: u64, len: u64, block: Segments<'a>, may_unmap: bool, fua: bool },
}

/// Why a command is refused.
pub(crate) enum Refused {
    /// CHECK CONDITION.
    Sense(Sense),
    /// An error of the transport, without a SCSI status.
    Response(Response),
    /// The data buffer is not in memory.
    Access(AccessError),
}

impl From<Sense> for Refused {
    fn from(sense: Sense) -> Self {
        Refused::Sense(sense)
    }
}

impl From<AccessError> for Refused {
    fn from(error: AccessError) -> Self {
        Refused::Access(error)
    }
}

/// A command's data buffers.
#[derive(Clone, Copy)]
pub(crate) struct Data<'a> {
    pub(crate) out: Segments<'a>,
    pub(crate) inward: Segments<'a>,
}

impl Data<'_> {
    /// Length of both buffers, bytes. At most one has any.
    pub(crate) fn len(self) -> u32 {
        self.out.len().saturating_add(self.inward.len())
    }
}

/// The first `len` bytes of a buffer. Fails if it is shorter.
fn first(data: Segments<'_>, len: u64) -> Result<Segments<'_>, Refused> {
    let part = u32::try_from(len).ok().and_then(|len| data.split_at(len));
    part.map(|(first, _)| first).ok_or(Refused::Response(Response::Overrun))
}

/// Decides what to do with a request.
pub(crate) fn execute<'a>(
    device: &Device,
    request: &Request,
    data: Data<'a>,
    memory: &MemoryView,
) -> Result<Work<'a>, Refused> {
    let number = match request.address {
        Address::OtherTarget => return Err(Refused::Response(Response::BadTarget)),
        Address::Lun(number) => number,
    };
    // VIRTIO_SCSI_F_INOUT is not offered.
    if !data.out.is_empty() && !data.inward.is_empty() {
        return Err(Refused::Response(Response::Failure));
    }
    let command = parse(&request.cdb)?;
    let Some((number, lun)) = number.and_then(|number| Some((number, device.lun(number)?))) else {
        let bytes = answer_for_nobody(device, &command)?;
        return give(&command, &bytes, data, memory);
    };
    let tells_attention = !matches!(
        command,
        Command::Inquiry { .. } | Command::ReportLuns { .. } | Command::RequestSense { .. }
    );
    if tells_attention && let Some(attention) = lun.take_attention() {
        return Err(attention.into());
    }
    match answer(device, lun, &command) {
        Some(bytes) => give(&command, &bytes?, data, memory),
        None => work(device, (number, lun), command, data, memory),
    }
}

/// Returns data, up to the command's allocation length.
fn give<'a>(
    command: &Command,
    bytes: &[u8],
    data: Data<'a>,
    memory: &MemoryView,
) -> Result<Work<'a>, Refused> {
    let bytes = bytes.get(..allocation(command) as usize).unwrap_or(bytes);
    if (data.inward.len() as usize) < bytes.len() {
        return Err(Refused::Response(Response::Overrun));
    }
    data.inward.write(memory, bytes)?;
    Ok(Work::Answered(bytes.len() as u32))
}

/// Commands beyond those that only return data.
fn work<'a>(
    device: &Device,
    (number, lun): (u16, &Lun),
    command: Command,
    data: Data<'a>,
    memory: &MemoryView,
) -> Result<Work<'a>, Refused> {
    let flush = Work::Plain { lun: number, op: Op::Flush, offset: 0, len: 0, used: 0 };
    Ok(match command {
        Command::Read(blocks) => {
            let (offset, len) = lun.range(blocks)?;
            transfer(number, Op::Read, offset, first(data.inward, len)?)
        }
        Command::Write { blocks, fua } => {
            lun.check_writable()?;
            let (offset, len) = lun.range(blocks)?;
            let op = Op::Write { fua: fua || lun.is_write_through() };
            transfer(number, op, offset, first(data.out, len)?)
        }
        Command::SynchronizeCache(blocks) => {
            lun.range(blocks)?;
            flush
        }
        Command::Verify(blocks) => {
            lun.range(blocks)?;
            Work::Answered(0)
        }
        Command::StartStopUnit { flush: true } => flush,
        Command::WriteSame { blocks, unmap, no_data } => {
            lun.check_writable()?;
            if blocks.count > lun.max_range() {
                return Err(Sense::invalid_field(10).into());
            }
            let (offset, len) = lun.range(blocks)?;
            let fua = lun.is_write_through();
            let block = if no_data { 0 } else { lun.block_size.into() };
            let block = first(data.out, block)?;
            Work::WriteSame { lun: number, offset, len, block, may_unmap: unmap && lun.thin, fua }
        }
        Command::Unmap { len } => {
            lun.check_writable()?;
            let list = first(data.out, len.into())?;
            let mut bytes = [0; MAX_LIST];
            let read = list.read(memory, &mut bytes)?;
            let ranges = Ranges::parse(lun, bytes.get(..read).unwrap_or_default())?;
            if ranges.iter().len() == 0 {
                Work::Answered(len.into())
            } else {
                Work::Unmap { lun: number, ranges: Box::new(ranges), used: len.into() }
            }
        }
        Command::ModeSelect { long, len } => {
            let list = first(data.out, len.into())?;
            let mut bytes = [0; MAX_MODE_LIST];
            if usize::from(len) > bytes.len() {
                return Err(Sense::PARAMETER_LIST_LENGTH.into());
            }
            let read = list.read(memory, &mut bytes)?;
            let wanted = mode::select(lun, long, bytes.get(..read).unwrap_or_default())?;
            if let Some(on) = wanted {
                device.set_write_cache(number, on);
            }
            match wanted {
                // Flush what the cache has, now that nothing more enters it. Also if the cache was off already: the
                // process that switched it off may have been killed before its flush.
                Some(false) => {
                    Work::Plain { lun: number, op: Op::Flush, offset: 0, len: 0, used: len.into() }
                }
                Some(true) => Work::CacheOn(len.into()),
                None => Work::Answered(len.into()),
            }
        }
        // The other commands have no effect here, or were answered before.
        _ => Work::Answered(0),
    })
}

/// A transfer, which needs no work if it is empty.
fn transfer(lun: u16, op: Op, offset: u64, data: Segments<'_>) -> Work<'_> {
    if data.is_empty() { Work::Answered(0) } else { Work::Transfer { lun, op, offset, data } }
}

/// How many repetitions of a block fit into one write.
pub(crate) fn repetitions(block: Segments<'_>, len: u64) -> u64 {
    let segments = block.iter().count().max(1);
    let most = (queue::MAX_SEGMENTS / segments).max(1) as u64;
    let blocks = len / u64::from(block.len().max(1));
    blocks.min(most)
}
