//! MODE SENSE and MODE SELECT: the caching and control pages (SPC-4, 6.11 and 7.5; SBC-3, 6.4).

use super::cdb::{ModeSense, PageControl};
use super::lun::Lun;
use super::sense::Sense;

const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
/// All pages.
const ALL: u8 = 0x3f;
/// All subpages of a page.
const ALL_SUBPAGES: u8 = 0xff;

/// In byte 2 of the caching page.
const WCE: u8 = 0x04;

/// The caching page.
fn caching(lun: &Lun, control: PageControl) -> [u8; 20] {
    let mut page = [0; 20];
    page[..2].copy_from_slice(&[CACHING, 18]);
    let wce = match control {
        PageControl::Current => lun.has_write_cache(),
        PageControl::Changeable => !lun.read_only,
        PageControl::Default => lun.default_write_cache,
    };
    page[2] = if wce { WCE } else { 0 };
    page
}

/// The control page: one task set, commands in any order, sense data in the fixed format.
fn control_page(control: PageControl) -> [u8; 12] {
    let mut page = [0; 12];
    page[..2].copy_from_slice(&[CONTROL, 10]);
    if control != PageControl::Changeable {
        // QUEUE ALGORITHM MODIFIER: unrestricted reordering.
        page[3] = 0x10;
        // BUSY TIMEOUT PERIOD: no limit.
        page[8..10].copy_from_slice(&[0xff; 2]);
    }
    page
}

/// The block descriptor, short or long (SBC-3, 6.4.2).
fn descriptor(lun: &Lun, long: bool) -> Vec<u8> {
    let blocks = lun.blocks();
    let mut bytes = if long {
        let mut bytes = blocks.to_be_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes
    } else {
        u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes().to_vec()
    };
    // The byte in front of the short descriptor's length is reserved; no block is that long.
    bytes.extend(lun.block_size.to_be_bytes());
    bytes
}

/// What MODE SENSE returns.
pub(crate) fn sense(lun: &Lun, ask: &ModeSense) -> Result<Vec<u8>, Sense> {
    let subpages = matches!(ask.subpage, 0 | ALL_SUBPAGES);
    let known = matches!(ask.page, CACHING | CONTROL | ALL);
    if !known {
        return Err(Sense::invalid_field(2));
    }
    if !subpages {
        return Err(Sense::invalid_field(3));
    }
    let wanted = |page: u8| ask.page == page || ask.page == ALL;
    let descriptor = if ask.descriptor { descriptor(lun, ask.long_lba) } else { Vec::new() };
    // WP; DPOFUA: the bits of writes are understood.
    let parameter = if lun.read_only { 0x90 } else { 0x10 };
    let mut data = if ask.long {
        let long_lba = u8::from(ask.long_lba && ask.descriptor);
        vec![0, 0, 0, parameter, long_lba, 0, 0, descriptor.len() as u8]
    } else {
        vec![0, 0, parameter, descriptor.len() as u8]
    };
    data.extend(descriptor);
    if wanted(CACHING) {
        data.extend(caching(lun, ask.control));
    }
    if wanted(CONTROL) {
        data.extend(control_page(ask.control));
    }
    // The length does not count itself.
    if ask.long {
        let len = (data.len() - 2) as u16;
        data[..2].copy_from_slice(&len.to_be_bytes());
    } else {
        data[0] = (data.len() - 1) as u8;
    }
    Ok(data)
}

/// Checks the parameter list of a MODE SELECT, of which everything but WCE must be as it is. Returns
/// what WCE is to be, if the caching page is in it.
pub(crate) fn select(lun: &Lun, long: bool, list: &[u8]) -> Result<Option<bool>, Sense> {
    // No list at all changes nothing.
    if list.is_empty() {
        return Ok(None);
    }
    let header = if long { 8 } else { 4 };
    let descriptor = match (long, list) {
        (true, [_, _, _, _, flags, _, high, low, ..]) => {
            let expected = if flags & 1 != 0 { 16 } else { 8 };
            (usize::from(u16::from_be_bytes([*high, *low])), expected, 6)
        }
        (false, [_, _, _, len, ..]) => (usize::from(*len), 8, 3),
        _ => return Err(Sense::PARAMETER_LIST_LENGTH),
    };
    let (len, expected, at) = descriptor;
    // Medium and capacity stay, so what a descriptor says of them is not looked at.
    if len != 0 && len != expected {
        return Err(Sense::invalid_parameter(at));
    }
    let mut at = header + len;
    let mut pages = list.get(at..).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
    let mut write_cache = None;
    while !pages.is_empty() {
        // PS is reserved here.
        let current: &[u8] = match pages[0] & 0x7f {
            CACHING => &caching(lun, PageControl::Current),
            CONTROL => &control_page(PageControl::Current),
            _ => return Err(Sense::invalid_parameter(at as u16)),
        };
        let (page, rest) =
            pages.split_at_checked(current.len()).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
        let changeable = if current[0] == CACHING && !lun.read_only { WCE } else { 0 };
        for (i, (new, old)) in page.iter().zip(current).enumerate().skip(1) {
            let may = if i == 2 { changeable } else { 0 };
            if (new ^ old) & !may != 0 {
                return Err(Sense::invalid_parameter((at + i) as u16));
            }
        }
        if current[0] == CACHING {
            write_cache = Some(page[2] & WCE != 0);
        }
        at += page.len();
        pages = rest;
    }
    Ok(write_cache)
}
