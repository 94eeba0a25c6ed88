//! The data of Identify (section 5.15).

use super::bits::{BLOCK, BLOCK_SHIFT, COMPLETION_SHIFT, MDTS, SUBMISSION_SHIFT, VERSION};
use super::events::MAX_REQUESTS;
use super::features::WARNING_TEMPERATURE;
use super::logs::ERRORS;
use super::namespace::{ControllerConfig, DoorbellMode, Namespace};
use super::status::Status;

/// Bytes of the data of Identify.
pub(crate) const IDENTIFY_SIZE: usize = 4096;

/// The PCI vendor of the function.
pub const VENDOR: u16 = 0x4e58;
/// The PCI subsystem vendor of the function.
pub const SUBSYSTEM_VENDOR: u16 = 0x1af4;

/// CNS: which data is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cns {
    Namespace,
    Controller,
    /// Numbers of namespaces, above one.
    List,
    /// Identifiers of a namespace.
    Descriptors,
}

impl Cns {
    pub(crate) fn parse(dword10: u32) -> Result<Self, Status> {
        match dword10 as u8 {
            0x00 => Ok(Cns::Namespace),
            0x01 => Ok(Cns::Controller),
            0x02 => Ok(Cns::List),
            0x03 => Ok(Cns::Descriptors),
            _ => Err(Status::INVALID_FIELD),
        }
    }
}

/// Bytes at offsets.
pub(crate) struct Page(Box<[u8; IDENTIFY_SIZE]>);

impl Page {
    pub(crate) fn new() -> Self {
        Page(Box::new([0; IDENTIFY_SIZE]))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0[..]
    }

    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        for (to, from) in self.0.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    }

    pub(crate) fn u8(&mut self, at: usize, value: u8) {
        self.put(at, &[value]);
    }

    pub(crate) fn u16(&mut self, at: usize, value: u16) {
        self.put(at, &value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, at: usize, value: u64) {
        self.put(at, &value.to_le_bytes());
    }

    /// ASCII, padded with spaces.
    fn text(&mut self, at: usize, len: usize, text: &str) {
        let ascii = |c: char| if c == ' ' || c.is_ascii_graphic() { c as u8 } else { b'?' };
        let padded = text.chars().map(ascii).chain(std::iter::repeat(b' '));
        for (to, from) in self.0.iter_mut().skip(at).take(len).zip(padded) {
            *to = from;
        }
    }
}

/// Notices of changed namespaces (OAES).
const OAES_NAMESPACES: u32 = 1 << 8;
/// Doorbell Buffer Config (OACS).
const OACS_DOORBELLS: u16 = 1 << 8;
/// One firmware slot, which is read-only (FRMW).
const FRMW: u8 = 1 << 1 | 1;
/// Commands Supported and Effects; Get Log Page with offsets (LPA).
const LPA: u8 = 1 << 1 | 1 << 2;
/// Compare, Dataset Management, Write Zeroes, Select and Save of features, Verify (ONCS).
const ONCS: u16 = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 7;
/// A cache, and Flush of all namespaces (VWC).
const VWC_PRESENT: u8 = 1;
const VWC_FLUSH_ALL: u8 = 3 << 1;
/// SGLs, of any alignment (SGLS).
const SGLS: u32 = 1;
/// An I/O controller (CNTRLTYPE).
const IO_CONTROLLER: u8 = 1;
/// Shut down at this temperature, kelvins (CCTEMP).
const CRITICAL_TEMPERATURE: u16 = 373;

/// The version of the program, as firmware revision.
pub(crate) const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

pub(crate) fn controller(config: &ControllerConfig, namespaces: &[Namespace]) -> Page {
    let mut page = Page::new();
    page.u16(0, VENDOR);
    page.u16(2, SUBSYSTEM_VENDOR);
    page.text(4, 20, &config.serial);
    page.text(24, 40, &config.model);
    page.text(64, 8, FIRMWARE);
    page.u8(77, MDTS);
    page.u32(80, VERSION);
    page.u32(92, OAES_NAMESPACES);
    page.u8(111, IO_CONTROLLER);
    page.u16(256, if config.doorbells == DoorbellMode::Auto { OACS_DOORBELLS } else { 0 });
    page.u8(258, 3);
    page.u8(259, MAX_REQUESTS as u8 - 1);
    page.u8(260, FRMW);
    page.u8(261, LPA);
    page.u8(262, ERRORS as u8 - 1);
    page.u16(266, WARNING_TEMPERATURE);
    page.u16(268, CRITICAL_TEMPERATURE);
    page.u8(512, SUBMISSION_SHIFT << 4 | SUBMISSION_SHIFT);
    page.u8(513, COMPLETION_SHIFT << 4 | COMPLETION_SHIFT);
    page.u32(516, namespaces.len() as u32);
    page.u16(520, ONCS);
    let has_cache = namespaces.iter().any(|namespace| namespace.has_write_cache);
    page.u8(525, VWC_FLUSH_ALL | if has_cache { VWC_PRESENT } else { 0 });
    page.u32(536, SGLS);
    let subsystem = Uuid::new(&config.identity, 0);
    page.put(768, format!("nqn.2014-08.org.nvmexpress:uuid:{subsystem}").as_bytes());
    // The one power state: at most 25 W, in hundredths.
    page.u16(2048, 2500);
    page
}

/// The fields for optimal performance are there (NSFEAT).
const NSFEAT_PERFORMANCE: u8 = 1 << 4;
/// Write Zeroes takes DEAC (DLFEAT). What deallocated blocks read is not told: that depends on the node.
const DLFEAT_WRITE_ZEROES: u8 = 1 << 3;
/// Write protected (NSATTR).
const NSATTR_READ_ONLY: u8 = 1;

pub(crate) fn namespace(namespace: &Namespace) -> Page {
    let mut page = Page::new();
    let blocks = namespace.blocks();
    for at in [0, 8, 16] {
        page.u64(at, blocks);
    }
    page.u8(24, NSFEAT_PERFORMANCE);
    page.u8(33, if namespace.has_discard { DLFEAT_WRITE_ZEROES } else { 0 });
    page.u64(48, blocks * BLOCK);
    // Counted from 0, in blocks.
    let in_blocks = |bytes: u32| {
        let blocks = (u64::from(bytes) / BLOCK).clamp(1, 1 << 16);
        (blocks - 1) as u16
    };
    let write = in_blocks(namespace.physical_block_size);
    let deallocate = in_blocks(namespace.discard_granularity);
    // NPWG, NPWA, NPDG, NPDA, NOWS. The optimal size of a write has to be a multiple of its granularity.
    let sizes = [write, write, deallocate, deallocate, write];
    for (at, blocks) in (64..).step_by(2).zip(sizes) {
        page.u16(at, blocks);
    }
    page.u8(99, if namespace.read_only { NSATTR_READ_ONLY } else { 0 });
    // LBA format 0.
    page.u8(130, BLOCK_SHIFT);
    page
}

/// The numbers of namespaces above `after`.
pub(crate) fn list(after: u32, namespaces: usize) -> Page {
    let mut page = Page::new();
    let numbers = (1..=namespaces as u32).filter(|nsid| *nsid > after);
    for (at, nsid) in (0..IDENTIFY_SIZE).step_by(4).zip(numbers) {
        page.u32(at, nsid);
    }
    page
}

/// UUID of a namespace (NIDT 3, NIDL 16).
pub(crate) fn descriptors(config: &ControllerConfig, nsid: u32) -> Page {
    let mut page = Page::new();
    page.put(0, &[3, 16]);
    page.put(4, &Uuid::new(&config.identity, nsid).0);
    page
}

/// A UUID whose bytes are a hash (version 8, RFC 9562, section 5.8): the same in each run of the daemon.
struct Uuid([u8; 16]);

impl Uuid {
    /// That of a namespace, or, with number 0, of the subsystem. Another hash gives guests other disks: FNV-1a with
    /// 128 bits.
    fn new(identity: &str, nsid: u32) -> Self {
        const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        let bytes = identity.bytes().chain([0]).chain(nsid.to_le_bytes());
        let hash = bytes.fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
        let mut bytes = hash.to_be_bytes();
        bytes[6] = bytes[6] & 0x0f | 0x80;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Uuid(bytes)
    }
}

impl std::fmt::Display for Uuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, byte) in self.0.iter().enumerate() {
            if matches!(n, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_differ_and_stay() {
        let of = |identity: &str, nsid| Uuid::new(identity, nsid).to_string();
        assert_eq!(of("/run/disk.sock", 1), of("/run/disk.sock", 1));
        assert_ne!(of("/run/disk.sock", 1), of("/run/disk.sock", 2));
        assert_ne!(of("/run/disk.sock", 1), of("/run/disk2.sock", 1));
        assert_eq!(of("", 0), "f453019f-df83-894f-b080-396838a79b0f");
    }

    #[test]
    fn lists_begin_above_a_number() {
        let page = list(1, 3);
        assert_eq!(page.bytes()[..12], [2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        assert!(list(3, 3).bytes().iter().all(|byte| *byte == 0));
    }
}
