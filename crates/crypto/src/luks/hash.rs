//! The digests that LUKS names, in its three uses of them.

use hmac::Hmac;
use ripemd::Ripemd160;
use sha1::Sha1;
use sha2::digest::Digest;
use sha2::{Sha224, Sha256, Sha384, Sha512};

use crate::Secret;

/// A digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hash {
    /// SHA-1.
    Sha1,
    /// SHA-224.
    Sha224,
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
    /// RIPEMD-160.
    Ripemd160,
}

impl Hash {
    pub(super) const ALL: [Hash; 6] =
        [Hash::Sha1, Hash::Sha224, Hash::Sha256, Hash::Sha384, Hash::Sha512, Hash::Ripemd160];

    /// Returns the digest's name, in headers and options.
    pub fn name(self) -> &'static str {
        match self {
            Hash::Sha1 => "sha1",
            Hash::Sha224 => "sha224",
            Hash::Sha256 => "sha256",
            Hash::Sha384 => "sha384",
            Hash::Sha512 => "sha512",
            Hash::Ripemd160 => "ripemd160",
        }
    }

    /// Derives a key from a password: PBKDF2 of RFC 8018.
    pub(super) fn pbkdf2(
        self,
        password: &[u8],
        salt: &[u8],
        iterations: u32,
        len: usize,
    ) -> Secret {
        let mut key = Secret::new(vec![0; len]);
        let done = match self {
            Hash::Sha1 => pbkdf2::pbkdf2::<Hmac<Sha1>>(password, salt, iterations, &mut key),
            Hash::Sha224 => pbkdf2::pbkdf2::<Hmac<Sha224>>(password, salt, iterations, &mut key),
            Hash::Sha256 => pbkdf2::pbkdf2::<Hmac<Sha256>>(password, salt, iterations, &mut key),
            Hash::Sha384 => pbkdf2::pbkdf2::<Hmac<Sha384>>(password, salt, iterations, &mut key),
            Hash::Sha512 => pbkdf2::pbkdf2::<Hmac<Sha512>>(password, salt, iterations, &mut key),
            Hash::Ripemd160 => {
                pbkdf2::pbkdf2::<Hmac<Ripemd160>>(password, salt, iterations, &mut key)
            }
        };
        // HMAC takes keys of any length.
        debug_assert!(done.is_ok());
        key
    }

    /// Replaces each part of the length of the digest by the digest of its number and itself.
    pub(super) fn diffuse(self, data: &mut [u8]) {
        match self {
            Hash::Sha1 => diffuse::<Sha1>(data),
            Hash::Sha224 => diffuse::<Sha224>(data),
            Hash::Sha256 => diffuse::<Sha256>(data),
            Hash::Sha384 => diffuse::<Sha384>(data),
            Hash::Sha512 => diffuse::<Sha512>(data),
            Hash::Ripemd160 => diffuse::<Ripemd160>(data),
        }
    }
}

fn diffuse<D: Digest>(data: &mut [u8]) {
    for (number, part) in (0u32..).zip(data.chunks_mut(<D as Digest>::output_size())) {
        let digest = D::new().chain_update(number.to_be_bytes()).chain_update(&*part).finalize();
        part.iter_mut().zip(digest).for_each(|(to, from)| *to = from);
    }
}
