//! Secrets as `--object secret` has them: raw or base64, in the clear or encrypted with another secret.

use aes::Aes256;
use aes::cipher::BlockDecryptMut;
use aes::cipher::KeyIvInit;
use aes::cipher::block_padding::Pkcs7;
use base64ct::{Base64, Encoding};

use crate::Secret;

/// Bytes of a master key.
const KEY: usize = 32;
/// Bytes of an initialisation vector.
const IV: usize = 16;

/// Why a secret cannot be read, in QEMU's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The data are not base64.
    #[error("Base64 data contains invalid characters")]
    Base64,
    /// The initialisation vector is not base64.
    #[error("Base64 data of 'iv' contains invalid characters")]
    IvBase64,
    /// The initialisation vector has another length.
    #[error("IV should be {IV} bytes in length not {0}")]
    IvLength(usize),
    /// The master key has another length.
    #[error("Key should be {KEY} bytes in length")]
    KeyLength,
    /// The data are not what the master key has encrypted.
    #[error("Incorrect number of padding bytes found on decrypted data")]
    Padding,
}

/// Encodes bytes as base64.
#[must_use]
pub fn to_base64(bytes: &[u8]) -> String {
    Base64::encode_string(bytes)
}

/// Decodes base64. Spaces and line ends are left out.
///
/// # Errors
///
/// It is something else.
pub fn base64(text: &[u8]) -> Result<Secret, SecretError> {
    let text = text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let text = Secret::new(text);
    let text = std::str::from_utf8(&text).map_err(|_| SecretError::Base64)?;
    Base64::decode_vec(text).map(Secret::new).map_err(|_| SecretError::Base64)
}

/// Decrypts a secret: AES-256 in CBC mode, padded as of PKCS #7. `iv`: in base64.
///
/// # Errors
///
/// A length is wrong, or the secret is something else.
pub fn decrypt(encrypted: &[u8], key: &[u8], iv: &str) -> Result<Secret, SecretError> {
    let key = <&[u8; KEY]>::try_from(key).map_err(|_| SecretError::KeyLength)?;
    let iv = base64(iv.as_bytes()).map_err(|_| SecretError::IvBase64)?;
    let iv = <&[u8; IV]>::try_from(iv.as_slice()).map_err(|_| SecretError::IvLength(iv.len()))?;
    let mut data = Secret::new(encrypted.to_vec());
    let decryptor = cbc::Decryptor::<Aes256>::new(key.into(), iv.into());
    let len =
        decryptor.decrypt_padded_mut::<Pkcs7>(&mut data).map_err(|_| SecretError::Padding)?.len();
    data.truncate(len);
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_decrypted() {
        // printf letmein | openssl enc -aes-256-cbc -a -K $(printf '%064x' 7) -iv $(printf '%032x' 9)
        let key: Vec<u8> = [0; 31].into_iter().chain([7]).collect();
        let iv = "AAAAAAAAAAAAAAAAAAAACQ==";
        let encrypted = base64(ENCRYPTED.as_bytes()).unwrap();
        assert_eq!(*decrypt(&encrypted, &key, iv).unwrap(), b"letmein");
        let failed = |data: &[u8], key: &[u8], iv| decrypt(data, key, iv).unwrap_err();
        assert_eq!(failed(&encrypted, &key[1..], iv), SecretError::KeyLength);
        assert_eq!(failed(&encrypted, &key, "AAAA"), SecretError::IvLength(3));
        assert_eq!(failed(&encrypted, &key, "?"), SecretError::IvBase64);
        assert_eq!(failed(&encrypted[1..], &key, iv), SecretError::Padding);
        assert_eq!(base64(b"bGV0\nbWVpbg==\n").unwrap().as_slice(), b"letmein");
        assert_eq!(base64(b"bGV0b!"), Err(SecretError::Base64));
    }

    const ENCRYPTED: &str = "0FMHjpoNmnoGYJv7fjBt9Q==";
}
