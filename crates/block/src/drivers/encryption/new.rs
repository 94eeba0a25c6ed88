//! New LUKS volumes: their options, and their header.

use ::options::place::OneOf;
use std::time::Duration;

use ::options::table::{Choice, Field, Row, put};
use crypto::Secret;
use crypto::cipher::{Algorithm, CipherSpec, IvGenerator, Mode};
use crypto::luks::{Hash, NewVolume};

use crate::error::OpenError;

/// The longest `iter-time`, milliseconds: opening takes about as long.
pub(super) const MOST_TIME: i64 = 60 * 60 * 1000;

/// A new LUKS volume. `None`: as QEMU has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NewLuks {
    /// `key-secret`: the `id` of the secret with the password.
    pub(crate) key_secret: Option<String>,
    algorithm: Option<Algorithm>,
    mode: Option<Mode>,
    iv: Option<IvGenerator>,
    hash: Option<Hash>,
    /// `iter-time`, milliseconds.
    time: Option<i64>,
    /// Whether the encrypted sectors are elsewhere.
    pub(crate) detached: bool,
}

impl NewLuks {
    fn volume(&self) -> NewVolume {
        let iv = self.iv.unwrap_or(IvGenerator::Plain64);
        let cipher = CipherSpec {
            algorithm: self.algorithm.unwrap_or(Algorithm::Aes256),
            mode: self.mode.unwrap_or(Mode::Xts),
            iv,
        };
        let time = self.time.filter(|time| *time > 0).unwrap_or(2000);
        let time = Duration::from_millis(time.unsigned_abs());
        let hash = self.hash.unwrap_or(Hash::Sha256);
        NewVolume { cipher, hash, time, detached: self.detached }
    }

    /// Bytes of the header with the places of its passwords.
    pub(crate) fn header_len(&self) -> u64 {
        self.volume().header_len()
    }

    /// Makes the header, with a new key. Takes a few times `iter-time`.
    pub(crate) fn make(&self, password: &[u8]) -> Result<Secret, OpenError> {
        let made = self.volume().make(password);
        made.map_err(|error| OpenError::new(format!("making a LUKS header failed: {error}")))
    }
}

/// Options that are read with those of a new LUKS volume among them.
pub(crate) trait LuksDraft: Sized + 'static {
    /// Those of the volume.
    fn luks(&mut self) -> &mut NewLuks;

    /// `key-secret`.
    const KEY_SECRET: Field<Self> = Row::optional(
        "key-secret",
        "none, and nothing is made",
        "the secret object with the password",
    )
    .text("<id>", |draft, id| put(&mut draft.luks().key_secret, Some(id)));
    /// `cipher-alg`.
    const CIPHER_ALG: Field<Self> =
        Row::default("cipher-alg", "aes-256", "the cipher").at(&OneOf {
            at: |draft: &mut Self| &mut draft.luks().algorithm,
            words: &[
                ("aes-128", Algorithm::Aes128, "a key of 128 bits"),
                ("aes-192", Algorithm::Aes192, "a key of 192 bits"),
                ("aes-256", Algorithm::Aes256, "a key of 256 bits"),
            ],
        });
    /// `cipher-mode`.
    const CIPHER_MODE: Field<Self> =
        Row::default("cipher-mode", "xts", "how a sector's blocks depend on each other").at(
            &OneOf {
                at: |draft: &mut Self| &mut draft.luks().mode,
                words: &[
                    ("cbc", Mode::Cbc, "cipher block chaining"),
                    (
                        "ctr",
                        Mode::Ctr,
                        "a counter; a sector that is written twice tells how it has changed",
                    ),
                    ("xts", Mode::Xts, "XTS, with two keys"),
                ],
            },
        );
    /// `ivgen-alg`.
    const IVGEN_ALG: Field<Self> =
        Row::default("ivgen-alg", "plain64", "how sectors get their initialisation vectors").at(
            &OneOf {
                at: |draft: &mut Self| &mut draft.luks().iv,
                words: &[
                    ("plain", IvGenerator::Plain, "the sector's number, 32 bits"),
                    ("plain64", IvGenerator::Plain64, "the sector's number, 64 bits"),
                    ("essiv", IvGenerator::EssivSha256, "the sector's number, encrypted"),
                ],
            },
        );
    /// `ivgen-hash-alg`.
    const IVGEN_HASH_ALG: Field<Self> = Row::optional(
        "ivgen-hash-alg",
        "sha256 with ivgen-alg=essiv",
        "the digest of ivgen-alg=essiv",
    )
    .choice(&[Choice {
        name: "sha256",
        help: "SHA-256",
        // The only one: without `essiv` it has no effect, as in QEMU.
        set: |_| Ok(()),
    }]);
    /// `hash-alg`.
    const HASH_ALG: Field<Self> =
        Row::default("hash-alg", "sha256", "the digest that keys are derived with").at(&OneOf {
            at: |draft: &mut Self| &mut draft.luks().hash,
            words: &[
                ("sha1", Hash::Sha1, "SHA-1"),
                ("sha224", Hash::Sha224, "SHA-224"),
                ("sha256", Hash::Sha256, "SHA-256"),
                ("sha384", Hash::Sha384, "SHA-384"),
                ("sha512", Hash::Sha512, "SHA-512"),
                ("ripemd160", Hash::Ripemd160, "RIPEMD-160"),
            ],
        });
    /// `iter-time`.
    const ITER_TIME: Field<Self> = Row::default(
        "iter-time",
        "2000",
        "milliseconds that deriving a key takes on this machine; 0 for the default",
    )
    .int(0..=MOST_TIME, |draft, time| put(&mut draft.luks().time, Some(time)));
}

impl LuksDraft for NewLuks {
    fn luks(&mut self) -> &mut NewLuks {
        self
    }
}
