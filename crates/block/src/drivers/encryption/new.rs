//! New LUKS volumes: their options, and their header.

use std::time::Duration;

use ::options::table::{Choice, Field, Kind, Need, put};
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
    const KEY_SECRET: Field<Self> = Field {
        name: "key-secret",
        kind: Kind::Text {
            meta: "<id>",
            set: |draft, id| put(&mut draft.luks().key_secret, Some(id)),
        },
        need: Need::Optional("none, and nothing is made"),
        help: "the secret object with the password",
    };
    /// `cipher-alg`.
    const CIPHER_ALG: Field<Self> = Field {
        name: "cipher-alg",
        kind: Kind::Choice(&[
            Choice {
                name: "aes-128",
                help: "a key of 128 bits",
                set: |draft| put(&mut draft.luks().algorithm, Some(Algorithm::Aes128)),
            },
            Choice {
                name: "aes-192",
                help: "a key of 192 bits",
                set: |draft| put(&mut draft.luks().algorithm, Some(Algorithm::Aes192)),
            },
            Choice {
                name: "aes-256",
                help: "a key of 256 bits",
                set: |draft| put(&mut draft.luks().algorithm, Some(Algorithm::Aes256)),
            },
        ]),
        need: Need::Default("aes-256"),
        help: "the cipher",
    };
    /// `cipher-mode`.
    const CIPHER_MODE: Field<Self> = Field {
        name: "cipher-mode",
        kind: Kind::Choice(&[
            Choice {
                name: "cbc",
                help: "cipher block chaining",
                set: |draft| put(&mut draft.luks().mode, Some(Mode::Cbc)),
            },
            Choice {
                name: "xts",
                help: "XTS, with two keys",
                set: |draft| put(&mut draft.luks().mode, Some(Mode::Xts)),
            },
        ]),
        need: Need::Default("xts"),
        help: "how a sector's blocks depend on each other",
    };
    /// `ivgen-alg`.
    const IVGEN_ALG: Field<Self> = Field {
        name: "ivgen-alg",
        kind: Kind::Choice(&[
            Choice {
                name: "plain",
                help: "the sector's number, 32 bits",
                set: |draft| put(&mut draft.luks().iv, Some(IvGenerator::Plain)),
            },
            Choice {
                name: "plain64",
                help: "the sector's number, 64 bits",
                set: |draft| put(&mut draft.luks().iv, Some(IvGenerator::Plain64)),
            },
            Choice {
                name: "essiv",
                help: "the sector's number, encrypted",
                set: |draft| put(&mut draft.luks().iv, Some(IvGenerator::EssivSha256)),
            },
        ]),
        need: Need::Default("plain64"),
        help: "how sectors get their initialisation vectors",
    };
    /// `ivgen-hash-alg`.
    const IVGEN_HASH_ALG: Field<Self> = Field {
        name: "ivgen-hash-alg",
        kind: Kind::Choice(&[Choice {
            name: "sha256",
            help: "SHA-256",
            // The only one: without `essiv` it has no effect, as in QEMU.
            set: |_| Ok(()),
        }]),
        need: Need::Optional("sha256 with ivgen-alg=essiv"),
        help: "the digest of ivgen-alg=essiv",
    };
    /// `hash-alg`.
    const HASH_ALG: Field<Self> = Field {
        name: "hash-alg",
        kind: Kind::Choice(&[
            Choice {
                name: "sha1",
                help: "SHA-1",
                set: |draft| put(&mut draft.luks().hash, Some(Hash::Sha1)),
            },
            Choice {
                name: "sha256",
                help: "SHA-256",
                set: |draft| put(&mut draft.luks().hash, Some(Hash::Sha256)),
            },
            Choice {
                name: "sha512",
                help: "SHA-512",
                set: |draft| put(&mut draft.luks().hash, Some(Hash::Sha512)),
            },
        ]),
        need: Need::Default("sha256"),
        help: "the digest that keys are derived with",
    };
    /// `iter-time`.
    const ITER_TIME: Field<Self> = Field {
        name: "iter-time",
        kind: Kind::Int {
            range: 0..=MOST_TIME,
            set: |draft, time| put(&mut draft.luks().time, Some(time)),
        },
        need: Need::Default("2000"),
        help: "milliseconds that deriving a key takes on this machine; 0 for the default",
    };
}

impl LuksDraft for NewLuks {
    fn luks(&mut self) -> &mut NewLuks {
        self
    }
}
