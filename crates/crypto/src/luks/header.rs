//! The header of a LUKS1 volume, as bytes and as a value that is valid.

use super::hash::Hash;
use super::stripes::STRIPES;
use crate::cipher::{Algorithm, CipherSpec, IvGenerator, Mode, SECTOR};

/// Bytes of a header, without the stripes behind it.
pub const HEADER_LEN: usize = 592;
/// Number of passwords that a volume may have.
pub const SLOTS: usize = 8;

const MAGIC: &[u8; 6] = b"LUKS\xba\xbe";
const VERSION: u16 = 1;
const ACTIVE: u32 = 0x00AC_71F3;
const INACTIVE: u32 = 0x0000_DEAD;
/// Where slots begin.
const SLOTS_AT: usize = 208;
/// More than what any program chooses, and less than what takes hours.
pub(super) const MAX_ITERATIONS: u32 = 1 << 27;
/// Where the first slot's stripes begin, and what stripes are aligned to: sectors.
const STRIPES_AT: u32 = 8;

/// A valid header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// How sectors are encrypted.
    pub cipher: CipherSpec,
    /// The digest that keys are derived with.
    pub hash: Hash,
    /// Where the first encrypted sector is: number of sectors of 512 bytes from the beginning.
    pub payload_sector: u32,
    /// By what the right key is recognised: its PBKDF2 digest,
    pub(super) digest: [u8; 20],
    /// with this salt,
    pub(super) digest_salt: [u8; 32],
    /// and this number of iterations.
    pub digest_iterations: u32,
    /// The volume's UUID, as text.
    pub uuid: String,
    /// The passwords' slots.
    pub slots: [Slot; SLOTS],
}

/// A place for a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Whether there is one.
    pub active: bool,
    /// Iterations of PBKDF2; 0 in a slot that was never used.
    pub iterations: u32,
    pub(super) salt: [u8; 32],
    /// Where its stripes are: number of sectors of 512 bytes from the beginning.
    pub sector: u32,
}

/// Why bytes are no header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// They are something else.
    #[error("Volume is not in LUKS format")]
    NotLuks,
    /// The header has another version.
    #[error("LUKS version {0} is not supported")]
    Version(u16),
    /// A name is not known: what it names, and itself.
    #[error("LUKS {0} '{1}' is not supported")]
    Unknown(&'static str, String),
    /// A number is wrong.
    #[error("LUKS header is not valid: {0}")]
    Wrong(String),
}

fn wrong<T>(why: impl Into<String>) -> Result<T, HeaderError> {
    Err(HeaderError::Wrong(why.into()))
}

/// Bytes being read.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(HeaderError::NotLuks)?;
        self.0 = rest;
        Ok(*first)
    }

    fn u32(&mut self) -> Result<u32, HeaderError> {
        self.take().map(u32::from_be_bytes)
    }

    /// Text of at most `N` bytes, which a zero ends.
    fn text<const N: usize>(&mut self, what: &str) -> Result<String, HeaderError> {
        let bytes = self.take::<N>()?;
        let Some(len) = bytes.iter().position(|byte| *byte == 0) else {
            return wrong(format!("the {what} is not terminated"));
        };
        match bytes[..len].is_ascii() {
            true => Ok(String::from_utf8_lossy(&bytes[..len]).into_owned()),
            false => wrong(format!("the {what} is no ASCII text")),
        }
    }
}

impl Header {
    /// Lays out a header with slots that are not in use.
    pub(super) fn lay_out(cipher: CipherSpec, hash: Hash, uuid: String) -> Header {
        let stripes = stripe_sectors(cipher);
        let slot = |index: usize| Slot {
            active: false,
            iterations: 0,
            salt: [0; 32],
            sector: STRIPES_AT + stripes * index as u32,
        };
        Header {
            cipher,
            hash,
            payload_sector: STRIPES_AT + stripes * SLOTS as u32,
            digest: [0; 20],
            digest_salt: [0; 32],
            digest_iterations: 0,
            uuid,
            slots: std::array::from_fn(slot),
        }
    }

    /// Reads a header from the first bytes of a volume.
    ///
    /// # Errors
    ///
    /// They are no header, or one with something that is not supported or not valid.
    pub fn read(bytes: &[u8]) -> Result<Header, HeaderError> {
        let mut reader = Reader(bytes);
        if &reader.take::<6>()? != MAGIC {
            return Err(HeaderError::NotLuks);
        }
        match u16::from_be_bytes(reader.take()?) {
            VERSION => {}
            version => return Err(HeaderError::Version(version)),
        }
        let name = reader.text::<32>("cipher's name")?;
        let mode = reader.text::<32>("cipher's mode")?;
        let hash = reader.text::<32>("digest's name")?;
        let payload_sector = reader.u32()?;
        let key_len = reader.u32()?;
        let digest = reader.take()?;
        let digest_salt = reader.take()?;
        let digest_iterations = iterations(reader.u32()?, "the key's digest")?;
        let uuid = reader.text::<40>("UUID")?;
        let hash = Hash::ALL.into_iter().find(|known| known.name() == hash);
        let hash_name =
            || String::from_utf8_lossy(&bytes[72..104]).trim_end_matches('\0').to_owned();
        let hash = hash.ok_or_else(|| HeaderError::Unknown("hash", hash_name()))?;
        let cipher = cipher(&name, &mode, key_len)?;
        let mut slots = [Slot { active: false, iterations: 0, salt: [0; 32], sector: 0 }; SLOTS];
        for (index, slot) in slots.iter_mut().enumerate() {
            *slot = read_slot(index, &mut reader)?;
        }
        let header = Header {
            cipher,
            hash,
            payload_sector,
            digest,
            digest_salt,
            digest_iterations,
            uuid,
            slots,
        };
        header.check_layout()?;
        Ok(header)
    }

    /// Writes the header.
    pub fn write(&self) -> [u8; HEADER_LEN] {
        let mut bytes = Vec::with_capacity(HEADER_LEN);
        let text = |text: &str, len: usize| {
            let zeroes = std::iter::repeat(0);
            text.bytes().take(len - 1).chain(zeroes).take(len).collect::<Vec<u8>>()
        };
        let (name, mode) = names(self.cipher);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_be_bytes());
        bytes.extend(text(name, 32));
        bytes.extend(text(&mode, 32));
        bytes.extend(text(self.hash.name(), 32));
        bytes.extend(self.payload_sector.to_be_bytes());
        bytes.extend((self.cipher.key_len() as u32).to_be_bytes());
        bytes.extend(self.digest);
        bytes.extend(self.digest_salt);
        bytes.extend(self.digest_iterations.to_be_bytes());
        bytes.extend(text(&self.uuid, 40));
        debug_assert_eq!(bytes.len(), SLOTS_AT);
        for slot in &self.slots {
            let state = if slot.active { ACTIVE } else { INACTIVE };
            bytes.extend(state.to_be_bytes());
            bytes.extend(slot.iterations.to_be_bytes());
            bytes.extend(slot.salt);
            bytes.extend(slot.sector.to_be_bytes());
            bytes.extend((STRIPES as u32).to_be_bytes());
        }
        let mut header = [0; HEADER_LEN];
        header.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        header
    }

    /// Returns where a slot's stripes are: first byte, and bytes.
    pub fn stripes(&self, slot: &Slot) -> (u64, usize) {
        (u64::from(slot.sector) * SECTOR as u64, self.cipher.key_len() * STRIPES)
    }

    /// Returns the offset of the first encrypted byte, in bytes.
    pub fn payload(&self) -> u64 {
        u64::from(self.payload_sector) * SECTOR as u64
    }

    fn check_layout(&self) -> Result<(), HeaderError> {
        let len = (self.cipher.key_len() * STRIPES).div_ceil(SECTOR) as u64;
        let ranges = self.slots.map(|slot| {
            let start = u64::from(slot.sector);
            start..start + len
        });
        for (index, range) in ranges.iter().enumerate() {
            if range.start < HEADER_LEN.div_ceil(SECTOR) as u64 {
                return wrong(format!("key slot {index} overlaps the header"));
            }
            // A header of its own has no payload behind it.
            if self.payload_sector > 0 && range.end > u64::from(self.payload_sector) {
                return wrong(format!("key slot {index} overlaps the payload"));
            }
            let overlaps =
                |other: &std::ops::Range<u64>| range.start < other.end && other.start < range.end;
            if let Some(other) = ranges.iter().skip(index + 1).position(overlaps) {
                return wrong(format!("key slots {index} and {} overlap", index + 1 + other));
            }
        }
        Ok(())
    }
}

/// Returns the sectors that a slot's stripes take.
fn stripe_sectors(cipher: CipherSpec) -> u32 {
    let sectors = (cipher.key_len() * STRIPES).div_ceil(SECTOR) as u32;
    sectors.next_multiple_of(STRIPES_AT)
}

fn iterations(number: u32, what: &str) -> Result<u32, HeaderError> {
    match number {
        0 => wrong(format!("{what} has no iterations")),
        1..=MAX_ITERATIONS => Ok(number),
        _ => wrong(format!("{what} has {number} iterations, and {MAX_ITERATIONS} are the most")),
    }
}

fn read_slot(index: usize, reader: &mut Reader<'_>) -> Result<Slot, HeaderError> {
    let active = match reader.u32()? {
        ACTIVE => true,
        INACTIVE => false,
        state => return wrong(format!("key slot {index} has state {state:#x}")),
    };
    let number = reader.u32()?;
    let salt = reader.take()?;
    let sector = reader.u32()?;
    let stripes = reader.u32()?;
    if stripes as usize != STRIPES {
        return wrong(format!("key slot {index} has {stripes} stripes, and not {STRIPES}"));
    }
    if active {
        iterations(number, &format!("key slot {index}"))?;
    }
    Ok(Slot { active, iterations: number, salt, sector })
}

fn cipher(name: &str, mode: &str, key_len: u32) -> Result<CipherSpec, HeaderError> {
    let unknown = |what, name: &str| HeaderError::Unknown(what, name.to_owned());
    if name != "aes" {
        return Err(unknown("cipher", name));
    }
    let (mode_name, iv_name) = mode.split_once('-').ok_or_else(|| unknown("cipher mode", mode))?;
    let mode = match mode_name {
        "xts" => Mode::Xts,
        "cbc" => Mode::Cbc,
        "ctr" => Mode::Ctr,
        _ => return Err(unknown("cipher mode", mode)),
    };
    let iv = match iv_name {
        "plain" => IvGenerator::Plain,
        "plain64" => IvGenerator::Plain64,
        "essiv:sha256" => IvGenerator::EssivSha256,
        _ => return Err(unknown("initialisation vector", iv_name)),
    };
    let all = [Algorithm::Aes128, Algorithm::Aes192, Algorithm::Aes256];
    let specs = all.map(|algorithm| CipherSpec { algorithm, mode, iv });
    match specs.into_iter().find(|spec| spec.key_len() as u64 == u64::from(key_len)) {
        Some(spec) => Ok(spec),
        None => wrong(format!("{name}-{mode_name} has no keys of {key_len} bytes")),
    }
}

fn names(cipher: CipherSpec) -> (&'static str, String) {
    let mode = match cipher.mode {
        Mode::Xts => "xts",
        Mode::Cbc => "cbc",
        Mode::Ctr => "ctr",
    };
    let iv = match cipher.iv {
        IvGenerator::Plain => "plain",
        IvGenerator::Plain64 => "plain64",
        IvGenerator::EssivSha256 => "essiv:sha256",
    };
    ("aes", format!("{mode}-{iv}"))
}
