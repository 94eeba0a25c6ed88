//! The volume's key: found with a password, or made, and put into a slot.

use std::time::{Duration, Instant};

use subtle::ConstantTimeEq;

use super::hash::Hash;
use super::header::{Header, Slot};
use super::stripes::{STRIPES, merge, split};
use crate::Secret;
use crate::cipher::{CipherSpec, SECTOR, SectorCipher};

/// The least number of iterations of PBKDF2, as RFC 2898 has it.
const MIN_ITERATIONS: u32 = 1000;
/// Iterations of the first measurement.
const MEASURED: u32 = 1 << 13;

/// The key that sectors are encrypted with.
pub struct VolumeKey(Secret);

/// Why a password was not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The system gives no random numbers.
    #[error("the system gives no random numbers")]
    Random,
}

pub(super) fn random(bytes: &mut [u8]) -> Result<(), AddError> {
    getrandom::fill(bytes).map_err(|_| AddError::Random)
}

impl VolumeKey {
    /// Finds the key with a password. Takes as long as the slot has iterations for.
    ///
    /// `stripes`: what is at [`Header::stripes`], in whole sectors. `None`: the slot has another password.
    pub fn unlock(
        header: &Header,
        slot: &Slot,
        mut stripes: Secret,
        password: &[u8],
    ) -> Option<VolumeKey> {
        let len = header.cipher.key_len();
        let key = header.hash.pbkdf2(password, &slot.salt, slot.iterations, len);
        SectorCipher::new(header.cipher, &key).ok()?.decrypt(0, &mut stripes);
        let key = merge(header.hash, len, stripes.get(..len * STRIPES)?);
        header.is_key(&key).then_some(VolumeKey(key))
    }

    /// Returns the cipher of the volume's sectors.
    ///
    /// # Errors
    ///
    /// The key is of another header.
    pub fn cipher(&self, spec: CipherSpec) -> Result<SectorCipher, crate::cipher::WrongKeyLength> {
        SectorCipher::new(spec, &self.0)
    }
}

impl Header {
    fn is_key(&self, key: &[u8]) -> bool {
        let (salt, len) = (&self.digest_salt, self.digest.len());
        let digest = self.hash.pbkdf2(key, salt, self.digest_iterations, len);
        digest.ct_eq(&self.digest).into()
    }

    /// Puts a password into the slot with the number `index`, from 0.
    ///
    /// `iterations`: those of PBKDF2. Returns the slot's stripes, which belong at [`Header::stripes`].
    ///
    /// # Errors
    ///
    /// The system gives no random numbers.
    pub fn add_password(
        &mut self,
        index: usize,
        key: &VolumeKey,
        password: &[u8],
        iterations: u32,
    ) -> Result<Secret, AddError> {
        let (spec, hash) = (self.cipher, self.hash);
        let len = spec.key_len() * STRIPES;
        let mut stripes = Secret::new(vec![0; len.next_multiple_of(SECTOR)]);
        random(&mut stripes)?;
        split(hash, &key.0, stripes.get_mut(..len).unwrap_or_default());
        let Some(slot) = self.slots.get_mut(index) else { return Ok(stripes) };
        random(&mut slot.salt)?;
        (slot.active, slot.iterations) = (true, iterations);
        let slot_key = hash.pbkdf2(password, &slot.salt, iterations, spec.key_len());
        if let Ok(cipher) = SectorCipher::new(spec, &slot_key) {
            cipher.encrypt(0, &mut stripes);
        }
        Ok(stripes)
    }
}

/// A volume to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewVolume {
    /// How sectors are encrypted.
    pub cipher: CipherSpec,
    /// The digest that keys are derived with.
    pub hash: Hash,
    /// How long deriving a key is to take here.
    pub time: Duration,
    /// Whether the encrypted sectors are elsewhere, from the first one on.
    pub detached: bool,
}

impl NewVolume {
    /// Returns how many bytes [`make`](Self::make) makes.
    pub fn header_len(&self) -> u64 {
        Header::lay_out(self.cipher, self.hash, String::new()).payload()
    }

    /// Makes a volume with a new key and one password.
    ///
    /// Returns its first [`header_len`](Self::header_len) bytes.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers.
    pub fn make(&self, password: &[u8]) -> Result<Secret, AddError> {
        let mut key = Secret::new(vec![0; self.cipher.key_len()]);
        random(&mut key)?;
        let mut header = Header::lay_out(self.cipher, self.hash, uuid()?);
        random(&mut header.digest_salt)?;
        // The digest is of a key that cannot be guessed: an eighth of the time, as other programs take.
        header.digest_iterations = iterations_for(self.hash, header.digest.len(), self.time / 8);
        let digest = self.hash.pbkdf2(
            &key,
            &header.digest_salt,
            header.digest_iterations,
            header.digest.len(),
        );
        header.digest.copy_from_slice(&digest);
        let iterations = iterations_for(self.hash, self.cipher.key_len(), self.time);
        let stripes = header.add_password(0, &VolumeKey(key), password, iterations)?;
        let mut volume = Secret::new(vec![0; header.payload() as usize]);
        if self.detached {
            header.payload_sector = 0;
        }
        let (at, _) = header.stripes(&header.slots[0]);
        volume[..super::HEADER_LEN].copy_from_slice(&header.write());
        volume[at as usize..][..stripes.len()].copy_from_slice(&stripes);
        Ok(volume)
    }
}

/// Returns how many iterations of PBKDF2 take `time` on this machine.
///
/// `len`: bytes of the key.
pub fn iterations_for(hash: Hash, len: usize, time: Duration) -> u32 {
    let begin = Instant::now();
    hash.pbkdf2(b"password", &[0; 32], MEASURED, len);
    let taken = begin.elapsed().as_nanos().max(1);
    let iterations = time.as_nanos().saturating_mul(MEASURED.into()) / taken;
    u32::try_from(iterations)
        .unwrap_or(u32::MAX)
        .clamp(MIN_ITERATIONS, super::header::MAX_ITERATIONS)
}

/// Returns a random UUID, as of RFC 9562.
fn uuid() -> Result<String, AddError> {
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    let bits = u128::from_be_bytes(bytes);
    let bits = bits & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let hex = format!("{bits:032x}");
    Ok([0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &hex[part]).join("-"))
}
