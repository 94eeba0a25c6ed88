//! Private keys in all usual formats.

use std::fmt::Display;

use pkcs8::der::asn1::{AnyRef, UintRef};
use pkcs8::der::{Decode, Encode, SliceReader};
use pkcs8::{EncryptedPrivateKeyInfo, ObjectIdentifier, PrivateKeyInfo, SecretDocument};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use sec1::{EcParameters, EcPrivateKey};

/// RFC 5480's `id-ecPublicKey`.
const EC: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");

/// RFC 8017's `rsaEncryption`.
const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");

/// Elliptic curves, with the length of a private key in bytes.
const CURVES: [(ObjectIdentifier, usize); 3] = [
    (ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7"), 32),
    (ObjectIdentifier::new_unwrap("1.3.132.0.34"), 48),
    (ObjectIdentifier::new_unwrap("1.3.132.0.35"), 66),
];

/// Reads a key in PEM. `password` decrypts an encrypted key (PKCS #8).
pub(crate) fn read(pem: &[u8], password: Option<&[u8]>) -> Result<PrivateKeyDer<'static>, String> {
    let text = std::str::from_utf8(pem).map_err(|_| "it is no text".to_owned())?;
    let key = match text.contains("-----BEGIN ENCRYPTED PRIVATE KEY-----") {
        true => {
            let password = password.ok_or("it is encrypted, and there is no 'passwordid'")?;
            let (_, document) = SecretDocument::from_pem(text).map_err(words)?;
            let encrypted =
                EncryptedPrivateKeyInfo::try_from(document.as_bytes()).map_err(words)?;
            let decrypted = encrypted.decrypt(password).map_err(|_| {
                "it cannot be decrypted: the password is wrong, or the way of encryption unknown"
            })?;
            PrivateKeyDer::Pkcs8(decrypted.as_bytes().to_vec().into())
        }
        false if text.contains("Proc-Type: 4,ENCRYPTED") => {
            return Err("it is encrypted in OpenSSL's old way; openssl pkey decrypts it, openssl \
                        pkcs8 encrypts it in the way of PKCS #8"
                .into());
        }
        false => PrivateKeyDer::from_pem_slice(pem).map_err(words)?,
    };
    Ok(of_its_length(&key).unwrap_or(key))
}

/// Sizes of RSA keys that ring can sign with: bits of the modulus.
const RSA_BITS: [usize; 3] = [2048, 3072, 4096];

/// Returns the reason if the kind and size of the key show that ring cannot sign with it.
pub(crate) fn why_refused(key: &PrivateKeyDer<'_>) -> Option<String> {
    let bits = rsa_bits(key).filter(|bits| !RSA_BITS.contains(bits))?;
    let [a, b, c] = RSA_BITS;
    Some(format!(
        "it is an RSA key of {bits} bits, and the TLS library signs with those of {a}, {b} and {c} \
         bits only; make one of these, or one for an elliptic curve"
    ))
}

/// Returns the bits of the modulus, or `None` if the key is no RSA key.
fn rsa_bits(key: &PrivateKeyDer<'_>) -> Option<usize> {
    let key = match key {
        PrivateKeyDer::Pkcs1(key) => key.secret_pkcs1_der(),
        PrivateKeyDer::Pkcs8(key) => {
            let info = PrivateKeyInfo::try_from(key.secret_pkcs8_der()).ok()?;
            Some(info.private_key).filter(|_| info.algorithm.oid == RSA)?
        }
        _ => return None,
    };
    // RFC 8017, appendix A.1.2: the version and the modulus come first.
    let fields = AnyRef::from_der(key).ok()?;
    let mut fields = SliceReader::new(fields.value()).ok()?;
    let (_version, modulus) =
        (UintRef::decode(&mut fields).ok()?, UintRef::decode(&mut fields).ok()?);
    let first = modulus.as_bytes().first()?;
    Some(modulus.as_bytes().len() * 8 - first.leading_zeros() as usize)
}

fn words(error: impl Display) -> String {
    error.to_string()
}

/// Returns the key padded to the length of its curve (RFC 5915 section 3), which ring requires. GnuTLS writes the
/// number with one leading zero more or less. `None`: another kind of key.
fn of_its_length(key: &PrivateKeyDer<'_>) -> Option<PrivateKeyDer<'static>> {
    let (bytes, outer) = match key {
        PrivateKeyDer::Sec1(key) => (key.secret_sec1_der(), None),
        PrivateKeyDer::Pkcs8(key) => {
            let info = PrivateKeyInfo::try_from(key.secret_pkcs8_der()).ok()?;
            let curve = info.algorithm.parameters_oid().ok();
            (info.private_key, Some(curve.filter(|_| info.algorithm.oid == EC)?))
        }
        _ => return None,
    };
    let key = EcPrivateKey::from_der(bytes).ok()?;
    let curve = outer.or_else(|| key.parameters.and_then(|curve| curve.named_curve()))?;
    let (_, len) = CURVES.iter().find(|(known, _)| *known == curve)?;
    let zeroes = key.private_key.iter().take_while(|byte| **byte == 0).count();
    let number = &key.private_key[zeroes..];
    let mut padded = vec![0; len.checked_sub(number.len())?];
    padded.extend(number);
    let parameters = Some(EcParameters::NamedCurve(curve));
    let key = EcPrivateKey { private_key: &padded, parameters, public_key: key.public_key };
    Some(PrivateKeyDer::Sec1(key.to_der().ok()?.into()))
}
