//! `encrypt` of an image, for `blockdev-add` and for `blockdev-create`.

use ::options::place::{OneOf, Text};
use ::options::shape::Member;
use ::options::table::{self, Context, Field, Kind, Need, not_yet};
use ::options::{OptionError, Value};
use rbd::{Cipher, Encryption, Format};

use crate::connections::Credentials;
use crate::error::OpenError;

/// `encrypt`: how librbd decrypts the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptOptions {
    /// `format`.
    pub format: Format,
    /// `key-secret`: the `id` of the secret with the passphrase.
    pub key_secret: String,
}

/// `encrypt` of a new image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NewEncryption {
    /// Format and passphrase.
    pub options: EncryptOptions,
    /// `cipher-alg`.
    pub cipher: Cipher,
}

impl EncryptOptions {
    /// Returns the options as they are written.
    pub(super) fn write(&self) -> Value {
        let EncryptOptions { format, key_secret } = self.clone();
        let (format, key_secret) = (Some(format), Some(key_secret));
        Value::Object(table::write(OF_IMAGE, &mut Draft { format, key_secret, cipher: None }))
    }

    /// Returns the encryption, with its passphrase.
    pub(super) fn encryption(&self, credentials: &Credentials) -> Result<Encryption, OpenError> {
        let passphrase = credentials.secret(&self.key_secret)?;
        Ok(Encryption { format: self.format, passphrase: (*passphrase).clone() })
    }
}

/// What was given.
#[derive(Default)]
struct Draft {
    format: Option<Format>,
    key_secret: Option<String>,
    cipher: Option<Cipher>,
}

impl Draft {
    const FORMAT: Field<Draft> = Field {
        name: "format",
        kind: Kind::At(&OneOf {
            at: |draft: &mut Draft| &mut draft.format,
            words: &[
                ("luks", Format::Luks1, "LUKS, version 1"),
                ("luks2", Format::Luks2, "LUKS, version 2"),
            ],
        }),
        need: Need::Required,
        help: "the format of the encrypted image",
    };
    const KEY_SECRET: Field<Draft> = Field {
        name: "key-secret",
        kind: Kind::At(&Text("<id>", |draft: &mut Draft| &mut draft.key_secret)),
        need: Need::Required,
        help: "the secret object with the passphrase",
    };
    const CIPHER: Field<Draft> = Field {
        name: "cipher-alg",
        kind: Kind::At(&OneOf {
            at: |draft: &mut Draft| &mut draft.cipher,
            words: &[
                ("aes-128", Cipher::Aes128, "a key of 128 bits"),
                ("aes-256", Cipher::Aes256, "a key of 256 bits"),
            ],
        }),
        need: Need::Default("aes-256"),
        help: "the cipher, in XTS mode",
    };

    fn options(self) -> Result<EncryptOptions, OptionError> {
        let Draft { format, key_secret, cipher: _ } = self;
        let format = format.ok_or_else(|| table::missing("format"))?;
        let key_secret = key_secret.ok_or_else(|| table::missing("key-secret"))?;
        Ok(EncryptOptions { format, key_secret })
    }
}

static OF_IMAGE: &[Field<Draft>] = &[
    Draft::FORMAT,
    Draft::KEY_SECRET,
    Field::unoffered("parent", |draft, value, name, at| {
        not_yet(draft, value, name, at)
            .map_err(|error| error.hint("'rbd flatten' makes the image independent of its parent."))
    }),
];

static OF_NEW_IMAGE: &[Field<Draft>] = &[Draft::FORMAT, Draft::KEY_SECRET, Draft::CIPHER];

fn read(fields: &[Field<Draft>], value: Value, at: &Context) -> Result<Draft, OptionError> {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let mut draft = Draft::default();
    table::read(fields, &mut draft, &mut object, at)?;
    table::refuse_rest(&object, at, "'encrypt'", table::names(fields))?;
    Ok(draft)
}

/// Reads `encrypt` of an image.
pub(super) fn read_encrypt(value: Value, at: &Context) -> Result<EncryptOptions, OptionError> {
    read(OF_IMAGE, value, at)?.options()
}

/// Returns what [`read_encrypt`] reads.
pub(super) fn encrypt_members() -> Vec<Member> {
    table::members(OF_IMAGE)
}

/// Reads `encrypt` of a new image.
///
/// # Errors
///
/// An option is unknown, missing or wrong; in QSD's words.
pub(super) fn read_new_encryption(
    value: Value,
    at: &Context,
) -> Result<NewEncryption, OptionError> {
    let draft = read(OF_NEW_IMAGE, value, at)?;
    let cipher = draft.cipher.unwrap_or(Cipher::Aes256);
    Ok(NewEncryption { options: draft.options()?, cipher })
}

/// Returns what [`read_new_encryption`] reads.
#[must_use]
pub(super) fn new_encryption_members() -> Vec<Member> {
    table::members(OF_NEW_IMAGE)
}
