//! Messages of vfio-user as a VMM sends them (QEMU's `docs/interop/vfio-user.rst`).

/// Agrees on a version.
pub const VERSION: u16 = 1;
/// Shares memory.
pub const DMA_MAP: u16 = 2;
/// Takes memory back.
pub const DMA_UNMAP: u16 = 3;
/// Asks for the numbers of regions and kinds of interrupts.
pub const DEVICE_GET_INFO: u16 = 4;
/// Asks for a region's size, and what of it may be mapped.
pub const GET_REGION_INFO: u16 = 5;
/// Asks for the number of interrupts of a kind.
pub const GET_IRQ_INFO: u16 = 7;
/// Sets the eventfds of interrupts.
pub const SET_IRQS: u16 = 8;
/// Reads registers.
pub const REGION_READ: u16 = 9;
/// Writes registers.
pub const REGION_WRITE: u16 = 10;
/// Resets the device.
pub const DEVICE_RESET: u16 = 13;
/// Writes several registers.
pub const REGION_WRITE_MULTI: u16 = 15;

/// The region of BAR 0.
pub const BAR0: u32 = 0;
/// The region of BAR 5.
pub const BAR5: u32 = 5;
/// The region of PCI configuration space.
pub const CONFIG: u32 = 7;

/// The index of the interrupt pin, whose level counts.
pub const INTX: u32 = 0;
/// The index of the message-signalled interrupts.
pub const MSI: u32 = 1;
/// The index of the MSI-X interrupts.
pub const MSIX: u32 = 2;
/// Flags of SET_IRQS: eventfds that interrupts trigger.
const EVENTFD_TRIGGER: u32 = 4 | 32;
/// Flags of SET_IRQS: interrupts are unmasked.
const UNMASK: u32 = 1 | 16;
/// Flags of DMA_MAP: readable and writable.
const READ_WRITE: u32 = 3;

/// Bytes of a message's header.
pub const HEADER: usize = 16;
/// The header's flag of a message that gets no reply.
const NO_REPLY: u32 = 1 << 4;

/// Encodes 32-bit words in the byte order of the host, as the protocol does.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

/// Returns a message with this number and payload.
pub fn message(id: u16, command: u16, wants_reply: bool, payload: &[u8]) -> Vec<u8> {
    let flags = if wants_reply { 0 } else { NO_REPLY };
    let ids = [id.to_ne_bytes(), command.to_ne_bytes()].concat();
    [&ids[..], &words(&[(HEADER + payload.len()) as u32, flags, 0]), payload].concat()
}

/// Returns the payload of VERSION 0.0, with what QEMU says that it can do.
pub fn version() -> Vec<u8> {
    let capabilities = b"{\"capabilities\":{\"max_msg_fds\":16,\"write_multiple\":true}}\0";
    [&words(&[0]), &capabilities[..]].concat()
}

/// Returns the payload of DMA_MAP: `size` bytes at guest address `address`, from `offset` in the file on.
pub fn map(offset: u64, address: u64, size: u64) -> Vec<u8> {
    [words(&[32, READ_WRITE]), longs(&[offset, address, size])].concat()
}

/// Returns the payload of DMA_UNMAP: `size` bytes at guest address `address`.
pub fn unmap(address: u64, size: u64) -> Vec<u8> {
    [words(&[24, 0]), longs(&[address, size])].concat()
}

/// Returns the payload of DEVICE_GET_INFO.
pub fn device_info() -> Vec<u8> {
    words(&[16, 0, 0, 0])
}

/// Returns the payload of GET_REGION_INFO, with room for a description of `size` bytes, at least 32.
pub fn region_info(region: u32, size: u32) -> Vec<u8> {
    words(&[size, 0, region, 0, 0, 0, 0, 0])
}

/// Returns the payload of GET_IRQ_INFO of this kind of interrupts.
pub fn irq_info(kind: u32) -> Vec<u8> {
    words(&[16, 0, kind, 0])
}

/// Returns the payload of SET_IRQS, which comes with the eventfds of `count` interrupts of a kind.
pub fn eventfds(kind: u32, first: u32, count: u32) -> Vec<u8> {
    words(&[20, EVENTFD_TRIGGER, kind, first, count])
}

/// Returns the payload of SET_IRQS that unmasks the interrupt pin.
pub fn unmask() -> Vec<u8> {
    words(&[20, UNMASK, INTX, 0, 1])
}

/// Returns the payload of REGION_READ of `count` bytes, with which those of other accesses begin.
pub fn region(region: u32, offset: u64, count: u32) -> Vec<u8> {
    [longs(&[offset]), words(&[region, count])].concat()
}

/// Returns the payload of REGION_WRITE.
pub fn write(to: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    [&region(to, offset, data.len() as u32), data].concat()
}

/// Returns the payload of REGION_WRITE_MULTI of registers of 4 bytes in BAR 0.
pub fn write_multi(writes: &[(u64, u32)]) -> Vec<u8> {
    let mut payload = longs(&[writes.len() as u64]);
    for (offset, value) in writes {
        payload.extend(write(BAR0, *offset, &value.to_ne_bytes()));
        payload.extend([0; 4]);
    }
    payload
}
