//! The layouts and numbers of `linux/vduse.h`. No I/O.

#![forbid(unsafe_code)]

use queue::QueueConfig;

/// The file by which devices are made.
pub const CONTROL: &str = "/dev/vduse/control";
/// The folder of the devices' files.
pub const FOLDER: &str = "/dev/vduse";
/// Longest name of a device, bytes: the kernel's field ends with a zero.
pub const MAX_NAME: usize = NAME - 1;
/// Bytes of the field of a name.
const NAME: usize = 256;

/// VIRTIO_F_RING_INDIRECT_DESC (virtio 1.3, section 6).
const INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_RING_EVENT_IDX (virtio 1.3, section 6).
const EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_VERSION_1 (virtio 1.3, section 6).
const VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_ACCESS_PLATFORM (virtio 1.3, section 6). VDUSE requires it: addresses are those of its IOTLB.
const ACCESS_PLATFORM: u64 = 1 << 33;
/// Features of queues and transport.
pub const TRANSPORT_FEATURES: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1 | ACCESS_PLATFORM;

/// VIRTIO_BLK_F_CONFIG_WCE, which VDUSE refuses: drivers cannot write to the configuration space.
pub const CONFIG_WCE: u64 = 1 << 11;

/// Status bit of a driver that is ready (virtio 1.3, section 2.1).
pub const DRIVER_OK: u8 = 4;

/// The number of virtio-blk among virtio devices.
const ID_BLOCK: u32 = 2;

/// The numbers of ioctl(2).
pub mod ioctls {
    const READ: u64 = 2;
    const WRITE: u64 = 1;

    /// The number of a command with a structure of `size` bytes: `_IOC` of `asm-generic/ioctl.h`.
    const fn number(direction: u64, command: u64, size: usize) -> u64 {
        direction << 30 | (size as u64) << 16 | 0x81 << 8 | command
    }

    /// Bytes of the structure of a command.
    pub const fn size(number: u64) -> usize {
        (number >> 16 & 0x3fff) as usize
    }

    /// `VDUSE_SET_API_VERSION`
    pub const SET_API_VERSION: u64 = number(WRITE, 0x01, 8);
    /// `VDUSE_CREATE_DEV`
    pub const CREATE_DEV: u64 = number(WRITE, 0x02, 336);
    /// `VDUSE_DESTROY_DEV`
    pub const DESTROY_DEV: u64 = number(WRITE, 0x03, super::NAME);
    /// `VDUSE_IOTLB_GET_FD`
    pub const IOTLB_GET_FD: u64 = number(READ | WRITE, 0x10, 32);
    /// `VDUSE_DEV_GET_FEATURES`
    pub const GET_FEATURES: u64 = number(READ, 0x11, 8);
    /// `VDUSE_DEV_SET_CONFIG`
    pub const SET_CONFIG: u64 = number(WRITE, 0x12, 8);
    /// `VDUSE_DEV_INJECT_CONFIG_IRQ`
    pub const INJECT_CONFIG_IRQ: u64 = number(0, 0x13, 0);
    /// `VDUSE_VQ_SETUP`
    pub const VQ_SETUP: u64 = number(WRITE, 0x14, 32);
    /// `VDUSE_VQ_GET_INFO`
    pub const VQ_GET_INFO: u64 = number(READ | WRITE, 0x15, 48);
    /// `VDUSE_VQ_SETUP_KICKFD`
    pub const VQ_SETUP_KICKFD: u64 = number(WRITE, 0x16, 8);
    /// `VDUSE_VQ_INJECT_IRQ`
    pub const VQ_INJECT_IRQ: u64 = number(WRITE, 0x17, 4);
}

/// Writes fields one after the other.
struct Bytes(Vec<u8>);

impl Bytes {
    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    /// Zeroes up to a length.
    fn zeroes_up_to(mut self, len: usize) -> Self {
        self.0.resize(len, 0);
        self
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |value| u16::from_ne_bytes(*value))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |value| u32::from_ne_bytes(*value))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |value| u64::from_ne_bytes(*value))
}

/// The field of a name: zeroes follow. Longer names are cut off.
pub fn name_field(name: &str) -> [u8; NAME] {
    let mut field = [0; NAME];
    field.iter_mut().take(MAX_NAME).zip(name.bytes()).for_each(|(to, from)| *to = from);
    field
}

/// A virtio-blk device, as it is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description<'a> {
    /// The name.
    pub name: &'a str,
    /// The offered features.
    pub features: u64,
    /// Number of queues.
    pub queues: u16,
    /// Alignment of the rings' memory, bytes.
    pub align: u32,
    /// The configuration space.
    pub config: &'a [u8],
}

impl Description<'_> {
    /// Returns `struct vduse_dev_config` with the configuration space behind.
    pub fn encode(&self) -> Vec<u8> {
        let fixed = Bytes(name_field(self.name).to_vec())
            // The vendor, as in qemu-storage-daemon.
            .u32(0)
            .u32(ID_BLOCK)
            .u64(self.features)
            .u32(self.queues.into())
            .u32(self.align)
            .zeroes_up_to(332)
            .u32(self.config.len() as u32);
        [&fixed.0, self.config].concat()
    }
}

/// Returns `struct vduse_config_data` for the whole configuration space.
pub fn config_data(config: &[u8]) -> Vec<u8> {
    [&Bytes(Vec::new()).u32(0).u32(config.len() as u32).0, config].concat()
}

/// Returns `struct vduse_vq_config`.
pub fn queue_config(index: u16, max_size: u16) -> Vec<u8> {
    let bytes = Bytes(Vec::new()).u32(index.into());
    let mut bytes = bytes.0;
    bytes.extend(max_size.to_ne_bytes());
    Bytes(bytes).zeroes_up_to(32).0
}

/// Returns `struct vduse_vq_eventfd`.
pub fn queue_eventfd(index: u16, fd: i32) -> Vec<u8> {
    Bytes(Vec::new()).u32(index.into()).u32(fd.cast_unsigned()).0
}

/// Returns `struct vduse_vq_info` to ask for a queue.
pub fn queue_question(index: u16) -> Vec<u8> {
    Bytes(Vec::new()).u32(index.into()).zeroes_up_to(48).0
}

/// Why a queue cannot be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the driver's queue {index} has {num} entries; there can be a power of two up to {max}")]
pub struct QueueSize {
    /// The queue.
    pub index: u16,
    /// Its entries.
    pub num: u32,
    /// The most that it may have.
    pub max: u16,
}

/// Reads the answer of `VDUSE_VQ_GET_INFO`: `None` for a queue that the driver does not use.
///
/// `features`: those that were negotiated. `max`: the most entries.
///
/// # Errors
///
/// The driver's queue is larger, or of no possible size.
pub fn queue_info(
    bytes: &[u8],
    index: u16,
    features: u64,
    max: u16,
) -> Result<Option<QueueConfig>, QueueSize> {
    if bytes.get(40).is_none_or(|ready| *ready == 0) {
        return Ok(None);
    }
    let num = u32_at(bytes, 4);
    let size = u16::try_from(num).ok().filter(|size| size.is_power_of_two() && *size <= max);
    Ok(Some(QueueConfig {
        size: size.ok_or(QueueSize { index, num, max })?,
        desc: u64_at(bytes, 8),
        avail: u64_at(bytes, 16),
        used: u64_at(bytes, 24),
        event_idx: features & EVENT_IDX != 0,
        indirect: features & INDIRECT_DESC != 0,
        next_avail: u16_at(bytes, 32),
        index,
    }))
}

/// A range of addresses that is memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Offset in its file, bytes.
    pub offset: u64,
    /// The first address.
    pub start: u64,
    /// The last address.
    pub last: u64,
    /// The device may read and write it.
    pub is_writable: bool,
}

impl Entry {
    /// Returns `struct vduse_iotlb_entry` to ask for the first range that overlaps with another one.
    pub fn question(start: u64, last: u64) -> Vec<u8> {
        Bytes(Vec::new()).u64(0).u64(start).u64(last).u64(0).0
    }

    /// Reads the answer.
    ///
    /// `None`: the range is empty or has all addresses, or cannot be accessed.
    pub fn parse(bytes: &[u8]) -> Option<Entry> {
        let entry = Entry {
            offset: u64_at(bytes, 0),
            start: u64_at(bytes, 8),
            last: u64_at(bytes, 16),
            is_writable: bytes.get(24) == Some(&3),
        };
        entry.size().map(|_| entry)
    }

    /// Returns its size, bytes. `None`: it is empty or has all addresses.
    pub fn size(&self) -> Option<u64> {
        self.last.checked_sub(self.start)?.checked_add(1)
    }
}

/// A message of the kernel, which waits for the [reply](Message::reply).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The number of the message.
    pub id: u32,
    /// What it asks for.
    pub request: Request,
}

/// What the kernel asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// `VDUSE_GET_VQ_STATE`: where the device is in a queue.
    QueueState {
        /// The queue, which may not exist.
        index: u32,
    },
    /// `VDUSE_SET_STATUS`: the driver sets the device's status (virtio 1.3, section 2.1); 0 is a reset.
    SetStatus(u8),
    /// `VDUSE_UPDATE_IOTLB`: memory has changed.
    UpdateIotlb,
    /// Another one.
    Unknown(u32),
}

/// Bytes of a message: `struct vduse_dev_request`.
pub const MESSAGE: usize = 152;
/// Bytes of a reply: `struct vduse_dev_response`.
const REPLY: usize = 152;

impl Message {
    /// Reads a message.
    pub fn parse(bytes: &[u8; MESSAGE]) -> Message {
        let request = match u32_at(bytes, 0) {
            0 => Request::QueueState { index: u32_at(bytes, 24) },
            1 => Request::SetStatus(bytes[24]),
            2 => Request::UpdateIotlb,
            unknown => Request::Unknown(unknown),
        };
        Message { id: u32_at(bytes, 4), request }
    }

    /// Returns the reply: `state` is the place of the device in a queue, and `None` a failure.
    pub fn reply(&self, state: Option<u16>) -> Vec<u8> {
        let bytes = Bytes(Vec::new()).u32(self.id).u32(state.is_none().into()).zeroes_up_to(24);
        let Request::QueueState { index } = self.request else {
            return bytes.zeroes_up_to(REPLY).0;
        };
        let mut bytes = bytes.u32(index).0;
        bytes.extend(state.unwrap_or_default().to_ne_bytes());
        Bytes(bytes).zeroes_up_to(REPLY).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of strace, which come from the kernel's headers.
    #[test]
    fn ioctls_have_the_kernels_numbers() {
        use ioctls::*;
        let all = [
            (SET_API_VERSION, 0x4008_8101),
            (CREATE_DEV, 0x4150_8102),
            (DESTROY_DEV, 0x4100_8103),
            (IOTLB_GET_FD, 0xc020_8110),
            (GET_FEATURES, 0x8008_8111),
            (SET_CONFIG, 0x4008_8112),
            (INJECT_CONFIG_IRQ, 0x8113),
            (VQ_SETUP, 0x4020_8114),
            (VQ_GET_INFO, 0xc030_8115),
            (VQ_SETUP_KICKFD, 0x4008_8116),
            (VQ_INJECT_IRQ, 0x4004_8117),
        ];
        for (ours, kernels) in all {
            assert_eq!(ours, kernels, "{ours:#x}");
        }
    }

    #[test]
    fn structures_have_the_kernels_sizes() {
        let description =
            Description { name: "disk", features: 1, queues: 2, align: 4096, config: &[7; 60] };
        let bytes = description.encode();
        assert_eq!(bytes.len(), ioctls::size(ioctls::CREATE_DEV) + 60);
        assert_eq!((&bytes[..5], u32_at(&bytes, 260)), (&b"disk\0"[..], 2));
        assert_eq!((u64_at(&bytes, 264), u32_at(&bytes, 272), u32_at(&bytes, 276)), (1, 2, 4096));
        assert_eq!(u32_at(&bytes, 332), 60);
        assert_eq!(queue_config(1, 256).len(), ioctls::size(ioctls::VQ_SETUP));
        assert_eq!(queue_question(1).len(), ioctls::size(ioctls::VQ_GET_INFO));
        assert_eq!(queue_eventfd(1, -1).len(), ioctls::size(ioctls::VQ_SETUP_KICKFD));
        assert_eq!(Entry::question(0, 1).len(), ioctls::size(ioctls::IOTLB_GET_FD));
        assert_eq!(name_field(&"x".repeat(300))[254..], *b"x\0");
    }

    #[test]
    fn queues_of_impossible_sizes_are_refused() {
        let mut bytes = queue_question(3);
        assert_eq!(queue_info(&bytes, 3, 0, 256), Ok(None));
        bytes[40] = 1;
        for num in [0u32, 3, 512, 1 << 16, u32::MAX] {
            bytes[4..8].copy_from_slice(&num.to_ne_bytes());
            assert_eq!(queue_info(&bytes, 3, 0, 256), Err(QueueSize { index: 3, num, max: 256 }));
        }
        bytes[4..8].copy_from_slice(&256u32.to_ne_bytes());
        bytes[32..34].copy_from_slice(&7u16.to_ne_bytes());
        let config = queue_info(&bytes, 3, EVENT_IDX, 256).unwrap().expect("a queue");
        assert_eq!((config.size, config.next_avail, config.index), (256, 7, 3));
        assert!(config.event_idx && !config.indirect);
        assert_eq!(queue_info(&[], 3, 0, 256), Ok(None));
    }

    #[test]
    fn ranges_have_a_size() {
        let with = |start: u64, last: u64| Entry::parse(&Entry::question(start, last));
        assert_eq!(with(0, u64::MAX), None);
        assert_eq!(with(2, 1), None);
        assert_eq!(with(1, 1).and_then(|entry| entry.size()), Some(1));
        assert_eq!(with(1, u64::MAX).and_then(|entry| entry.size()), Some(u64::MAX));
        assert_eq!(Entry::parse(&[]).and_then(|entry| entry.size()), Some(1));
    }

    #[test]
    fn replies_name_their_message() {
        let mut bytes = [0; MESSAGE];
        bytes[4] = 9;
        bytes[24] = 3;
        let message = Message::parse(&bytes);
        assert_eq!(message, Message { id: 9, request: Request::QueueState { index: 3 } });
        let reply = message.reply(Some(5));
        assert_eq!((reply.len(), u32_at(&reply, 0), u32_at(&reply, 4)), (REPLY, 9, 0));
        assert_eq!((u32_at(&reply, 24), u16_at(&reply, 28)), (3, 5));
        assert_eq!(u32_at(&message.reply(None), 4), 1);
        for (kind, request) in
            [(1, Request::SetStatus(3)), (2, Request::UpdateIotlb), (77, Request::Unknown(77))]
        {
            bytes[0] = kind;
            assert_eq!(Message::parse(&bytes).request, request);
        }
    }
}
