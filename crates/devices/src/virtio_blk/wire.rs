//! Layouts and numbers of the virtio specification, section 5.2.

/// Feature bits (5.2.3).
pub(crate) const VIRTIO_BLK_F_SIZE_MAX: u32 = 1;
pub(crate) const VIRTIO_BLK_F_SEG_MAX: u32 = 2;
pub(crate) const VIRTIO_BLK_F_RO: u32 = 5;
pub(crate) const VIRTIO_BLK_F_BLK_SIZE: u32 = 6;
pub(crate) const VIRTIO_BLK_F_FLUSH: u32 = 9;
pub(crate) const VIRTIO_BLK_F_TOPOLOGY: u32 = 10;
pub(crate) const VIRTIO_BLK_F_CONFIG_WCE: u32 = 11;
pub(crate) const VIRTIO_BLK_F_MQ: u32 = 12;
pub(crate) const VIRTIO_BLK_F_DISCARD: u32 = 13;
pub(crate) const VIRTIO_BLK_F_WRITE_ZEROES: u32 = 14;

/// Request types (5.2.6).
pub(crate) const VIRTIO_BLK_T_IN: u32 = 0;
pub(crate) const VIRTIO_BLK_T_OUT: u32 = 1;
pub(crate) const VIRTIO_BLK_T_FLUSH: u32 = 4;
pub(crate) const VIRTIO_BLK_T_GET_ID: u32 = 8;
pub(crate) const VIRTIO_BLK_T_DISCARD: u32 = 11;
pub(crate) const VIRTIO_BLK_T_WRITE_ZEROES: u32 = 13;

/// How a request ended: the byte behind its data (5.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Ok = 0,
    IoErr = 1,
    Unsupp = 2,
}

/// Sectors are counted in 512 bytes, whatever the block size (5.2.2).
pub(crate) const SECTOR: u64 = 512;

/// Bytes of a request's header: type, reserved, sector (5.2.6).
pub(crate) const HEADER_SIZE: usize = 16;

/// Bytes of the serial number that GET_ID returns (5.2.6).
pub(crate) const ID_SIZE: usize = 20;

/// Bytes of one range of a discard or write-zeroes request (5.2.6).
pub(crate) const RANGE_SIZE: usize = 16;

/// The only flag of a range.
pub(crate) const RANGE_UNMAP: u32 = 1;

/// Bytes of the configuration space that this device has (5.2.4).
///
/// The space ends with `write_zeroes_may_unmap` and its padding.
pub const CONFIG_SIZE: usize = 60;

/// Where the writeback toggle is in the configuration space, the only field a driver may write.
pub(crate) const CONFIG_WRITEBACK: usize = 32;

/// A request's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) request_type: u32,
    pub(crate) sector: u64,
}

impl Header {
    pub(crate) fn from_bytes(bytes: [u8; HEADER_SIZE]) -> Self {
        let [t0, t1, t2, t3, _, _, _, _, s0, s1, s2, s3, s4, s5, s6, s7] = bytes;
        Header {
            request_type: u32::from_le_bytes([t0, t1, t2, t3]),
            sector: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
        }
    }
}

/// A range of a discard or write-zeroes request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) sector: u64,
    pub(crate) sectors: u32,
    pub(crate) flags: u32,
}

impl Range {
    pub(crate) fn from_bytes(bytes: [u8; RANGE_SIZE]) -> Self {
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = bytes;
        Range {
            sector: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            sectors: u32::from_le_bytes([n0, n1, n2, n3]),
            flags: u32::from_le_bytes([f0, f1, f2, f3]),
        }
    }
}

/// The configuration space (5.2.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) capacity: u64,
    pub(crate) size_max: u32,
    pub(crate) seg_max: u32,
    pub(crate) blk_size: u32,
    pub(crate) physical_block_exp: u8,
    pub(crate) min_io_size: u16,
    pub(crate) opt_io_size: u32,
    pub(crate) writeback: bool,
    pub(crate) num_queues: u16,
    pub(crate) max_discard_sectors: u32,
    pub(crate) max_discard_seg: u32,
    pub(crate) discard_sector_alignment: u32,
    pub(crate) max_write_zeroes_sectors: u32,
    pub(crate) max_write_zeroes_seg: u32,
    pub(crate) write_zeroes_may_unmap: bool,
}

impl Config {
    pub(crate) fn to_bytes(self) -> [u8; CONFIG_SIZE] {
        let mut bytes = [0; CONFIG_SIZE];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.capacity.to_le_bytes());
        put(8, &self.size_max.to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        // 16..20 is the geometry, which is not offered.
        put(20, &self.blk_size.to_le_bytes());
        put(24, &[self.physical_block_exp, 0]);
        put(26, &self.min_io_size.to_le_bytes());
        put(28, &self.opt_io_size.to_le_bytes());
        put(CONFIG_WRITEBACK, &[self.writeback.into(), 0]);
        put(34, &self.num_queues.to_le_bytes());
        put(36, &self.max_discard_sectors.to_le_bytes());
        put(40, &self.max_discard_seg.to_le_bytes());
        put(44, &self.discard_sector_alignment.to_le_bytes());
        put(48, &self.max_write_zeroes_sectors.to_le_bytes());
        put(52, &self.max_write_zeroes_seg.to_le_bytes());
        put(56, &[self.write_zeroes_may_unmap.into(), 0, 0, 0]);
        bytes
    }
}
