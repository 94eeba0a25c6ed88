//! INQUIRY: standard data and vital product data (SPC-4, 6.6 and 7.8; SBC-3, 6.5).

use super::lun::Lun;
use super::sense::Sense;
use super::unmap::MAX_DESCRIPTORS;

/// The identification fields have 8, 16 and 4 bytes, padded with spaces.
const VENDOR: &[u8; 8] = b"RINGMILL";
const PRODUCT: &[u8; 16] = b"VIRTIO DISK     ";
const REVISION: &[u8; 4] = b"1   ";

/// Peripheral qualifier and device type: a direct access block device.
const DISK: u8 = 0x00;
/// The target could have this logical unit but does not.
const NO_LUN: u8 = 0x7f;

/// Pages of vital product data, in the order of the page that lists them.
const SUPPORTED: u8 = 0x00;
const SERIAL_NUMBER: u8 = 0x80;
const IDENTIFICATION: u8 = 0x83;
const BLOCK_LIMITS: u8 = 0xb0;
const CHARACTERISTICS: u8 = 0xb1;
const PROVISIONING: u8 = 0xb2;

/// Standard data, also for a nonexistent logical unit.
pub(crate) fn standard(lun: Option<&Lun>) -> Vec<u8> {
    let mut data = vec![
        if lun.is_some() { DISK } else { NO_LUN },
        0,    // not removable
        0x06, // SPC-4
        0x12, // HISUP; response data format 2
        0,
        0,
        0,
        0x02, // CMDQUE
    ];
    data.extend(VENDOR);
    data.extend(PRODUCT);
    data.extend(REVISION);
    data[4] = (data.len() - 5) as u8;
    data
}

/// A page of vital product data.
pub(crate) fn vital(lun: &Lun, page: u8) -> Result<Vec<u8>, Sense> {
    let body = match page {
        SUPPORTED => vec![
            SUPPORTED,
            SERIAL_NUMBER,
            IDENTIFICATION,
            BLOCK_LIMITS,
            CHARACTERISTICS,
            PROVISIONING,
        ],
        SERIAL_NUMBER => lun.serial.as_bytes().to_vec(),
        IDENTIFICATION => identification(lun),
        BLOCK_LIMITS => block_limits(lun),
        CHARACTERISTICS => {
            let mut body = vec![0; 60];
            // Medium rotation rate: it does not rotate.
            body[1] = 1;
            body
        }
        PROVISIONING => vec![
            0, // no thresholds
            // LBPU, LBPWS, LBPWS10: UNMAP, and WRITE SAME with its UNMAP bit. Not LBPRZ, as unmapped blocks may
            // read as anything.
            if lun.thin { 0xe0 } else { 0 },
            // Thin, or no information.
            if lun.thin { 2 } else { 0 },
            0,
        ],
        _ => return Err(Sense::invalid_field(2)),
    };
    let mut data = vec![DISK, page];
    data.extend((body.len() as u16).to_be_bytes());
    data.extend(body);
    Ok(data)
}

/// Device identification: globally unique (SPC-4, 7.8.6).
fn identification(lun: &Lun) -> Vec<u8> {
    let mut body = Vec::new();
    let mut designator = |code_set: u8, kind: u8, id: &[u8]| {
        body.extend([code_set, kind, 0, id.len() as u8]);
        body.extend(id);
    };
    // ASCII, based on the T10 vendor identification.
    let mut name = VENDOR.to_vec();
    name.extend(PRODUCT);
    name.extend(lun.serial.bytes().take(200));
    designator(2, 1, &name);
    // Binary, NAA: assigned locally, 60 bits.
    let naa = 0x3 << 60 | fnv1a(&name) >> 4;
    designator(1, 3, &naa.to_be_bytes());
    body
}

/// The FNV-1a hash, 64 bits: equal for equal names on all machines.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Block limits (SBC-3, 6.5.3).
fn block_limits(lun: &Lun) -> Vec<u8> {
    let mut body = vec![0; 60];
    let mut put = |at: usize, value: &[u8]| {
        // The standard's offsets count from the page's first byte.
        body[at - 4..at - 4 + value.len()].copy_from_slice(value);
    };
    put(4, &[1]); // WSNZ
    put(6, &(1u16 << lun.physical_exp).to_be_bytes());
    put(8, &lun.max_transfer().to_be_bytes());
    if lun.thin {
        put(20, &lun.max_range().to_be_bytes());
        put(24, &(MAX_DESCRIPTORS as u32).to_be_bytes());
        put(28, &lun.unmap_granularity.to_be_bytes());
    }
    put(36, &u64::from(lun.max_range()).to_be_bytes());
    body
}
