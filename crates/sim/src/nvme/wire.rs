//! Messages of vfio-user as a VMM sends them (QEMU's docs/interop/vfio-user.rst).

/// Commands.
pub(super) const VERSION: u16 = 1;
pub(super) const DMA_MAP: u16 = 2;
pub(super) const DMA_UNMAP: u16 = 3;
pub(super) const DEVICE_GET_INFO: u16 = 4;
pub(super) const GET_REGION_INFO: u16 = 5;
pub(super) const GET_IRQ_INFO: u16 = 7;
pub(super) const SET_IRQS: u16 = 8;
pub(super) const REGION_READ: u16 = 9;
pub(super) const REGION_WRITE: u16 = 10;
pub(super) const DEVICE_RESET: u16 = 13;
pub(super) const REGION_WRITE_MULTI: u16 = 15;

/// Regions: registers, and the configuration space.
pub(super) const BAR0: u32 = 0;
pub(super) const CONFIG: u32 = 7;

/// The kind of interrupts.
const MSIX: u32 = 2;
/// Eventfds that interrupts trigger.
const EVENTFD_TRIGGER: u32 = 4 | 32;
/// DMA_MAP: readable and writable.
const READ_WRITE: u32 = 3;

pub(super) const HEADER: usize = 16;
/// Flags of the header.
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// A message.
pub(super) fn message(id: u16, command: u16, wants_reply: bool, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.extend(id.to_ne_bytes());
    bytes.extend(command.to_ne_bytes());
    let flags = if wants_reply { 0 } else { NO_REPLY };
    bytes.extend(u32s(&[(HEADER + payload.len()) as u32, flags, 0]));
    bytes.extend(payload);
    bytes
}

/// A reply: its errno, 0 for none, and its payload.
pub(super) struct Reply {
    pub(super) errno: u32,
    pub(super) payload: Vec<u8>,
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

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}

pub(super) fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn u64s(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// VERSION 0.0 with what QEMU says it can do.
pub(super) fn version() -> Vec<u8> {
    let mut payload = u32s(&[0]);
    payload.extend(b"{\"capabilities\":{\"max_msg_fds\":16,\"write_multiple\":true}}\0");
    payload
}

/// DMA_MAP of a part of a file.
pub(super) fn map(offset: u64, address: u64, size: u64) -> Vec<u8> {
    [u32s(&[32, READ_WRITE]), u64s(&[offset, address, size])].concat()
}

pub(super) fn unmap(address: u64, size: u64) -> Vec<u8> {
    [u32s(&[24, 0]), u64s(&[address, size])].concat()
}

/// DEVICE_GET_INFO.
pub(super) fn device_info() -> Vec<u8> {
    u32s(&[16, 0, 0, 0])
}

pub(super) fn region_info(index: u32) -> Vec<u8> {
    u32s(&[32, 0, index, 0, 0, 0, 0, 0])
}

/// GET_IRQ_INFO of the MSI-X interrupts.
pub(super) fn irq_info() -> Vec<u8> {
    u32s(&[16, 0, MSIX, 0])
}

/// SET_IRQS of the eventfds of so many vectors.
pub(super) fn eventfds(first: u32, count: u32) -> Vec<u8> {
    u32s(&[20, EVENTFD_TRIGGER, MSIX, first, count])
}

/// The place of an access.
pub(super) fn region(index: u32, offset: u64, count: u32) -> Vec<u8> {
    [u64s(&[offset]), u32s(&[index, count])].concat()
}

/// REGION_WRITE.
pub(super) fn write(index: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    [&region(index, offset, data.len() as u32), data].concat()
}

/// REGION_WRITE_MULTI of registers of 4 bytes.
pub(super) fn write_multi(writes: &[(u64, u32)]) -> Vec<u8> {
    let mut payload = u64s(&[writes.len() as u64]);
    for (offset, value) in writes {
        payload.extend(write(BAR0, *offset, &value.to_ne_bytes()));
        payload.extend([0; 4]);
    }
    payload
}
