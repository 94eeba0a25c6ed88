//! Encryption of disk sectors: AES in the modes that LUKS names.

use aes::cipher::generic_array::GenericArray;
use aes::cipher::{BlockDecrypt, BlockEncrypt, BlockSizeUser, KeyInit, KeySizeUser, typenum::U16};
use aes::{Aes128, Aes192, Aes256};
use sha2::{Digest, Sha256};

/// Bytes of a sector, which is encrypted by itself.
pub const SECTOR: usize = 512;
/// Bytes of a block of AES.
const BLOCK: usize = 16;
/// Blocks of a sector.
const BLOCKS: usize = SECTOR / BLOCK;

/// How sectors are encrypted, apart from the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CipherSpec {
    /// The cipher.
    pub algorithm: Algorithm,
    /// How blocks of a sector depend on each other.
    pub mode: Mode,
    /// How sectors get their initialisation vectors.
    pub iv: IvGenerator,
}

/// A block cipher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// AES with keys of 16 bytes.
    Aes128,
    /// AES with keys of 24 bytes.
    Aes192,
    /// AES with keys of 32 bytes.
    Aes256,
}

impl Algorithm {
    /// Returns the length of a key, bytes.
    pub fn key_len(self) -> usize {
        match self {
            Algorithm::Aes128 => 16,
            Algorithm::Aes192 => 24,
            Algorithm::Aes256 => 32,
        }
    }
}

/// A mode of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// XTS, as of IEEE 1619. The key is twice as long.
    Xts,
    /// Cipher block chaining.
    Cbc,
    /// A counter, which begins with the initialisation vector as a big-endian number.
    Ctr,
}

/// A source of initialisation vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IvGenerator {
    /// The sector's number, 32 bits.
    Plain,
    /// The sector's number, 64 bits.
    Plain64,
    /// The sector's number, encrypted with the SHA-256 digest of the key.
    EssivSha256,
}

impl CipherSpec {
    /// Returns what QEMU calls algorithm, mode, and source of initialisation vectors.
    pub fn names(self) -> (&'static str, &'static str, &'static str) {
        let algorithm = match self.algorithm {
            Algorithm::Aes128 => "aes-128",
            Algorithm::Aes192 => "aes-192",
            Algorithm::Aes256 => "aes-256",
        };
        let mode = match self.mode {
            Mode::Xts => "xts",
            Mode::Cbc => "cbc",
            Mode::Ctr => "ctr",
        };
        let iv = match self.iv {
            IvGenerator::Plain => "plain",
            IvGenerator::Plain64 => "plain64",
            IvGenerator::EssivSha256 => "essiv",
        };
        (algorithm, mode, iv)
    }

    /// Returns the length of a key, bytes.
    pub fn key_len(self) -> usize {
        match self.mode {
            Mode::Xts => 2 * self.algorithm.key_len(),
            Mode::Cbc | Mode::Ctr => self.algorithm.key_len(),
        }
    }
}

/// A cipher with its key, which is erased when it is dropped.
pub struct SectorCipher {
    core: Core,
    iv: Iv,
}

#[expect(clippy::large_enum_variant, reason = "there is one per node")]
enum Core {
    Xts128(Xts<Aes128>),
    Xts192(Xts<Aes192>),
    Xts256(Xts<Aes256>),
    Cbc128(Aes128),
    Cbc192(Aes192),
    Cbc256(Aes256),
    Ctr128(Aes128),
    Ctr192(Aes192),
    Ctr256(Aes256),
}

struct Xts<C> {
    data: C,
    tweak: C,
}

enum Iv {
    Plain,
    Plain64,
    Essiv(Box<Aes256>),
}

/// The key's length does not fit the cipher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongKeyLength;

impl SectorCipher {
    /// Makes a cipher of a key.
    ///
    /// # Errors
    ///
    /// The key has another length than [`CipherSpec::key_len`].
    pub fn new(spec: CipherSpec, key: &[u8]) -> Result<SectorCipher, WrongKeyLength> {
        let core = match (spec.mode, spec.algorithm) {
            (Mode::Xts, Algorithm::Aes128) => Core::Xts128(Xts::new(key)?),
            (Mode::Xts, Algorithm::Aes192) => Core::Xts192(Xts::new(key)?),
            (Mode::Xts, Algorithm::Aes256) => Core::Xts256(Xts::new(key)?),
            (Mode::Cbc, Algorithm::Aes128) => Core::Cbc128(keyed(key)?),
            (Mode::Cbc, Algorithm::Aes192) => Core::Cbc192(keyed(key)?),
            (Mode::Cbc, Algorithm::Aes256) => Core::Cbc256(keyed(key)?),
            (Mode::Ctr, Algorithm::Aes128) => Core::Ctr128(keyed(key)?),
            (Mode::Ctr, Algorithm::Aes192) => Core::Ctr192(keyed(key)?),
            (Mode::Ctr, Algorithm::Aes256) => Core::Ctr256(keyed(key)?),
        };
        let iv = match spec.iv {
            IvGenerator::Plain => Iv::Plain,
            IvGenerator::Plain64 => Iv::Plain64,
            IvGenerator::EssivSha256 => {
                let mut digest = Sha256::digest(key);
                let essiv = Box::new(Aes256::new(&digest));
                zeroize::Zeroize::zeroize(digest.as_mut_slice());
                Iv::Essiv(essiv)
            }
        };
        Ok(SectorCipher { core, iv })
    }

    /// Encrypts whole sectors, the first of which has that number.
    ///
    /// Bytes beyond the last whole sector stay.
    pub fn encrypt(&self, first: u64, data: &mut [u8]) {
        match &self.core {
            Core::Xts128(xts) => self.each(first, data, |iv, sector| xts.encrypt(iv, sector)),
            Core::Xts192(xts) => self.each(first, data, |iv, sector| xts.encrypt(iv, sector)),
            Core::Xts256(xts) => self.each(first, data, |iv, sector| xts.encrypt(iv, sector)),
            Core::Cbc128(aes) => self.each(first, data, |iv, sector| cbc_encrypt(aes, iv, sector)),
            Core::Cbc192(aes) => self.each(first, data, |iv, sector| cbc_encrypt(aes, iv, sector)),
            Core::Cbc256(aes) => self.each(first, data, |iv, sector| cbc_encrypt(aes, iv, sector)),
            Core::Ctr128(aes) => self.each(first, data, |iv, sector| ctr(aes, iv, sector)),
            Core::Ctr192(aes) => self.each(first, data, |iv, sector| ctr(aes, iv, sector)),
            Core::Ctr256(aes) => self.each(first, data, |iv, sector| ctr(aes, iv, sector)),
        }
    }

    /// Decrypts whole sectors, of which the first has the number `first`.
    ///
    /// The reverse of [`encrypt`](Self::encrypt).
    pub fn decrypt(&self, first: u64, data: &mut [u8]) {
        match &self.core {
            Core::Xts128(xts) => self.each(first, data, |iv, sector| xts.decrypt(iv, sector)),
            Core::Xts192(xts) => self.each(first, data, |iv, sector| xts.decrypt(iv, sector)),
            Core::Xts256(xts) => self.each(first, data, |iv, sector| xts.decrypt(iv, sector)),
            Core::Cbc128(aes) => self.each(first, data, |iv, sector| cbc_decrypt(aes, iv, sector)),
            Core::Cbc192(aes) => self.each(first, data, |iv, sector| cbc_decrypt(aes, iv, sector)),
            Core::Cbc256(aes) => self.each(first, data, |iv, sector| cbc_decrypt(aes, iv, sector)),
            Core::Ctr128(aes) => self.each(first, data, |iv, sector| ctr(aes, iv, sector)),
            Core::Ctr192(aes) => self.each(first, data, |iv, sector| ctr(aes, iv, sector)),
            Core::Ctr256(aes) => self.each(first, data, |iv, sector| ctr(aes, iv, sector)),
        }
    }

    #[inline(always)]
    fn each(&self, first: u64, data: &mut [u8], work: impl Fn(Bits, &mut [u8; SECTOR])) {
        for (number, sector) in (first..).zip(data.as_chunks_mut::<SECTOR>().0) {
            work(self.iv(number), sector);
        }
    }

    #[inline]
    fn iv(&self, sector: u64) -> Bits {
        match &self.iv {
            Iv::Plain => u128::from(sector & u64::from(u32::MAX)),
            Iv::Plain64 => u128::from(sector),
            Iv::Essiv(aes) => encrypt_one(&**aes, u128::from(sector)),
        }
    }
}

/// A block, as a little-endian number.
type Bits = u128;
type Block = GenericArray<u8, U16>;

#[inline]
fn block(bits: Bits) -> Block {
    bits.to_le_bytes().into()
}

#[inline]
fn bits(block: &Block) -> Bits {
    Bits::from_le_bytes((*block).into())
}

fn keyed<C: KeyInit + KeySizeUser>(key: &[u8]) -> Result<C, WrongKeyLength> {
    C::new_from_slice(key).map_err(|_| WrongKeyLength)
}

#[inline]
fn encrypt_one<C: BlockEncrypt + BlockSizeUser<BlockSize = U16>>(cipher: &C, input: Bits) -> Bits {
    let mut one = block(input);
    cipher.encrypt_block(&mut one);
    bits(&one)
}

impl<C> Xts<C>
where
    C: BlockEncrypt + BlockDecrypt + BlockSizeUser<BlockSize = U16> + KeyInit + KeySizeUser,
{
    fn new(key: &[u8]) -> Result<Self, WrongKeyLength> {
        let (data, tweak) = key.split_at_checked(key.len() / 2).ok_or(WrongKeyLength)?;
        Ok(Xts { data: keyed(data)?, tweak: keyed(tweak)? })
    }

    /// The tweaks of a sector's blocks: each is the one before, multiplied by x in GF(2^128).
    #[inline(always)]
    fn tweaks(&self, iv: Bits) -> [Bits; BLOCKS] {
        let mut next = encrypt_one(&self.tweak, iv);
        std::array::from_fn(|_| {
            let tweak = next;
            let carry = (next >> 127) * 0x87;
            next = (next << 1) ^ carry;
            tweak
        })
    }

    #[inline(always)]
    fn apply(&self, iv: Bits, sector: &mut [u8; SECTOR], cipher: impl Fn(&C, &mut [Block])) {
        let tweaks = self.tweaks(iv);
        let mut blocks = [Block::default(); BLOCKS];
        let parts = sector.as_chunks_mut::<BLOCK>().0;
        for ((to, part), tweak) in blocks.iter_mut().zip(&*parts).zip(tweaks) {
            *to = block(Bits::from_le_bytes(*part) ^ tweak);
        }
        cipher(&self.data, &mut blocks);
        for ((part, from), tweak) in parts.iter_mut().zip(&blocks).zip(tweaks) {
            *part = (bits(from) ^ tweak).to_le_bytes();
        }
    }

    #[inline(always)]
    fn encrypt(&self, iv: Bits, sector: &mut [u8; SECTOR]) {
        self.apply(iv, sector, |aes, blocks| aes.encrypt_blocks(blocks));
    }

    #[inline(always)]
    fn decrypt(&self, iv: Bits, sector: &mut [u8; SECTOR]) {
        self.apply(iv, sector, |aes, blocks| aes.decrypt_blocks(blocks));
    }
}

fn cbc_encrypt<C>(aes: &C, iv: Bits, sector: &mut [u8; SECTOR])
where
    C: BlockEncrypt + BlockSizeUser<BlockSize = U16>,
{
    let mut before = iv;
    for part in sector.as_chunks_mut::<BLOCK>().0 {
        before = encrypt_one(aes, Bits::from_le_bytes(*part) ^ before);
        *part = before.to_le_bytes();
    }
}

fn cbc_decrypt<C>(aes: &C, iv: Bits, sector: &mut [u8; SECTOR])
where
    C: BlockDecrypt + BlockSizeUser<BlockSize = U16>,
{
    let parts = sector.as_chunks_mut::<BLOCK>().0;
    let mut blocks = [Block::default(); BLOCKS];
    for (to, part) in blocks.iter_mut().zip(&*parts) {
        *to = (*part).into();
    }
    aes.decrypt_blocks(&mut blocks);
    let mut before = iv;
    for (part, from) in parts.iter_mut().zip(&blocks) {
        let encrypted = Bits::from_le_bytes(*part);
        *part = (bits(from) ^ before).to_le_bytes();
        before = encrypted;
    }
}

/// Encrypts, and decrypts what it has encrypted.
fn ctr<C>(aes: &C, iv: Bits, sector: &mut [u8; SECTOR])
where
    C: BlockEncrypt + BlockSizeUser<BlockSize = U16>,
{
    let mut counter = iv.swap_bytes();
    let mut blocks = [Block::default(); BLOCKS];
    for to in &mut blocks {
        *to = counter.to_be_bytes().into();
        counter = counter.wrapping_add(1);
    }
    aes.encrypt_blocks(&mut blocks);
    for (part, from) in sector.as_chunks_mut::<BLOCK>().0.iter_mut().zip(&blocks) {
        *part = (Bits::from_le_bytes(*part) ^ bits(from)).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digit = |c: u8| char::from(c).to_digit(16).unwrap() as u8;
        text.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    }

    /// Vectors 4 and 10 of IEEE 1619-2007, whose data units are 512 bytes.
    #[test]
    fn xts_is_as_in_the_standard() {
        let key = "2718281828459045235360287471352631415926535897932384626433832795";
        let key256 = "27182818284590452353602874713526624977572470936999595749669676273141592653589793238462643383279502884197169399375105820974944592";
        let cases = [
            (
                Algorithm::Aes128,
                key,
                0,
                "27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89c",
            ),
            (
                Algorithm::Aes256,
                key256,
                0xff,
                "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b",
            ),
        ];
        for (algorithm, key, sector, begins) in cases {
            let spec = CipherSpec { algorithm, mode: Mode::Xts, iv: IvGenerator::Plain64 };
            let cipher = SectorCipher::new(spec, &hex(key)).unwrap();
            let plain: Vec<u8> = (0..SECTOR).map(|n| n as u8).collect();
            let mut data = plain.clone();
            cipher.encrypt(sector, &mut data);
            assert_eq!(&data[..32], hex(begins), "{algorithm:?}");
            cipher.decrypt(sector, &mut data);
            assert_eq!(data, plain);
        }
    }

    /// Vectors F.5.1 and F.5.5 of NIST SP 800-38A. The counter's last byte wraps after the first block.
    #[test]
    fn a_counter_is_as_in_the_standard() {
        let iv = u128::from_str_radix("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16).unwrap().swap_bytes();
        let plain = hex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51\
             30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710");
        let begins = |encrypted: [u8; SECTOR], expected: &str| {
            assert_eq!(&encrypted[..64], hex(expected));
        };
        let mut sector = [0; SECTOR];
        sector[..64].copy_from_slice(&plain);
        let mut with_128 = sector;
        let aes: Aes128 = keyed(&hex("2b7e151628aed2a6abf7158809cf4f3c")).unwrap();
        ctr(&aes, iv, &mut with_128);
        begins(
            with_128,
            "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff\
             5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee",
        );
        let key = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4";
        let aes: Aes256 = keyed(&hex(key)).unwrap();
        ctr(&aes, iv, &mut sector);
        begins(
            sector,
            "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5\
             2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6",
        );
    }

    #[test]
    fn every_cipher_decrypts_what_it_encrypts_and_sectors_differ() {
        for algorithm in [Algorithm::Aes128, Algorithm::Aes192, Algorithm::Aes256] {
            for mode in [Mode::Xts, Mode::Cbc, Mode::Ctr] {
                for iv in [IvGenerator::Plain, IvGenerator::Plain64, IvGenerator::EssivSha256] {
                    let spec = CipherSpec { algorithm, mode, iv };
                    let key: Vec<u8> = (0..spec.key_len()).map(|n| n as u8).collect();
                    let cipher = SectorCipher::new(spec, &key).unwrap();
                    let plain = vec![7; 3 * SECTOR];
                    let mut data = plain.clone();
                    cipher.encrypt(u64::from(u32::MAX), &mut data);
                    assert_ne!(data[..SECTOR], data[SECTOR..2 * SECTOR], "{spec:?}");
                    let mut wrapped = plain[..SECTOR].to_vec();
                    cipher.encrypt(0, &mut wrapped);
                    let wraps = iv == IvGenerator::Plain;
                    assert_eq!(data[SECTOR..2 * SECTOR] == wrapped, wraps, "{spec:?}");
                    cipher.decrypt(u64::from(u32::MAX), &mut data);
                    assert_eq!(data, plain, "{spec:?}");
                    assert!(SectorCipher::new(spec, &key[1..]).is_err());
                }
            }
        }
    }
}
