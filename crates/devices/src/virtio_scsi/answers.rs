//! Commands that the device answers by itself, without its node: from the command to the bytes that
//! it returns. The caller cuts them to the allocation length.

use super::cdb::Command;
use super::device::Device;
use super::inquiry;
use super::lun::Lun;
use super::mode;
use super::opcodes;
use super::sense::Sense;

/// What a command returns, of those that only return data; `None`: it is not one of them.
pub(crate) fn answer(
    device: &Device,
    lun: &Lun,
    command: &Command,
) -> Option<Result<Vec<u8>, Sense>> {
    Some(match command {
        Command::Inquiry { page: None, .. } => Ok(inquiry::standard(Some(lun))),
        Command::Inquiry { page: Some(page), .. } => inquiry::vital(lun, *page),
        Command::RequestSense { .. } => {
            Ok(lun.take_attention().unwrap_or(Sense::NONE).to_bytes().to_vec())
        }
        Command::ModeSense(ask) => mode::sense(lun, ask),
        Command::ReadCapacity10 => Ok(capacity_10(lun).to_vec()),
        Command::ReadCapacity16 { .. } => Ok(capacity_16(lun).to_vec()),
        Command::ReportLuns { select, .. } => luns(device, *select),
        Command::ReportOpcodes { what, timeouts, .. } => opcodes::report(*what, *timeouts),
        _ => return None,
    })
}

/// The same of a number that no logical unit has (SPC-4, 6.6.2; SAM-5, 5.13).
pub(crate) fn answer_for_nobody(device: &Device, command: &Command) -> Result<Vec<u8>, Sense> {
    match command {
        Command::Inquiry { page: None, .. } => Ok(inquiry::standard(None)),
        Command::ReportLuns { select, .. } => luns(device, *select),
        Command::RequestSense { .. } => Ok(Sense::LUN_NOT_SUPPORTED.to_bytes().to_vec()),
        _ => Err(Sense::LUN_NOT_SUPPORTED),
    }
}

/// How many bytes a command allows to be returned.
pub(crate) fn allocation(command: &Command) -> u32 {
    match *command {
        Command::Inquiry { allocation, .. } => allocation.into(),
        Command::RequestSense { allocation } => allocation.into(),
        Command::ModeSense(ask) => ask.allocation.into(),
        Command::ReadCapacity16 { allocation }
        | Command::ReportLuns { allocation, .. }
        | Command::ReportOpcodes { allocation, .. } => allocation,
        _ => u32::MAX,
    }
}

/// READ CAPACITY(10) (SBC-3, 5.15). A medium without blocks has -1 as its last one.
fn capacity_10(lun: &Lun) -> [u8; 8] {
    let last = u32::try_from(lun.blocks().wrapping_sub(1)).unwrap_or(u32::MAX);
    let mut data = [0; 8];
    data[..4].copy_from_slice(&last.to_be_bytes());
    data[4..].copy_from_slice(&lun.block_size.to_be_bytes());
    data
}

/// READ CAPACITY(16) (SBC-3, 5.16).
fn capacity_16(lun: &Lun) -> [u8; 32] {
    let mut data = [0; 32];
    data[..8].copy_from_slice(&lun.blocks().wrapping_sub(1).to_be_bytes());
    data[8..12].copy_from_slice(&lun.block_size.to_be_bytes());
    data[13] = lun.physical_exp;
    // LBPME.
    data[14] = if lun.thin { 0x80 } else { 0 };
    data
}

/// REPORT LUNS (SPC-4, 6.33).
fn luns(device: &Device, select: u8) -> Result<Vec<u8>, Sense> {
    let count = match select {
        // All that are addressed like this; all there are.
        0x00 | 0x02 => device.luns().len(),
        // Well known logical units: none.
        0x01 => 0,
        _ => return Err(Sense::invalid_field(2)),
    };
    let mut data = vec![0; 8];
    data[..4].copy_from_slice(&(8 * count as u32).to_be_bytes());
    for number in 0..count {
        // Peripheral device addressing.
        data.extend([0, number as u8, 0, 0, 0, 0, 0, 0]);
    }
    Ok(data)
}
