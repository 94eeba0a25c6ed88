//! `encrypt` of an image, for `blockdev-add` and for `blockdev-create`.

use ::options::place::{Custom, OneOf, Text};
use ::options::shape::{Member, Shape};
use ::options::table::{self, Context, Field, Kind, Need, put};
use ::options::{OptionError, Value};
use rbd::{Cipher, Encryption, Format, NewEncryption};

use crate::connections::Credentials;
use crate::error::OpenError;

/// `encrypt`: how librbd decrypts the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptOptions {
    /// `format`. `None`: `luks-any`.
    pub format: Option<Format>,
    /// `key-secret`: the `id` of the secret with the passphrase.
    pub key_secret: String,
    /// `parent`: how the parent of a clone is decrypted. `None`: as the clone, or the parent is not encrypted.
    pub parent: Option<Box<EncryptOptions>>,
}

/// `encrypt` of a new image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CreateEncryption {
    /// `format`.
    format: Format,
    /// `key-secret`.
    key_secret: String,
    /// `cipher-alg`.
    cipher: Cipher,
}

impl EncryptOptions {
    /// Returns the options as they are written.
    pub(super) fn write(&self) -> Value {
        let EncryptOptions { format, key_secret, parent } = self.clone();
        let format = Some(format.map_or(DraftFormat::Any, DraftFormat::Exact));
        let mut draft = Draft { format, key_secret: Some(key_secret), cipher: None, parent };
        Value::Object(table::write(OF_IMAGE, &mut draft))
    }

    /// Returns the options of the image and of its ancestors.
    fn chain(&self) -> impl Iterator<Item = &EncryptOptions> {
        std::iter::successors(Some(self), |options| options.parent.as_deref())
    }

    /// Returns the `id`s of all secrets.
    pub(super) fn secrets(&self) -> impl Iterator<Item = &str> {
        self.chain().map(|options| options.key_secret.as_str())
    }

    /// Returns the encryption, with its passphrases.
    pub(super) fn encryption(&self, credentials: &Credentials) -> Result<Encryption, OpenError> {
        let EncryptOptions { format, key_secret, parent } = self;
        let passphrase = (*credentials.secret(key_secret)?).clone();
        let parent = parent.as_ref().map(|parent| parent.encryption(credentials)).transpose()?;
        Ok(Encryption { format: *format, passphrase, parent: parent.map(Box::new) })
    }
}

impl CreateEncryption {
    /// Returns the encryption, with its passphrase.
    pub(super) fn encryption(&self, credentials: &Credentials) -> Result<NewEncryption, OpenError> {
        let CreateEncryption { format, key_secret, cipher } = self;
        let passphrase = (*credentials.secret(key_secret)?).clone();
        Ok(NewEncryption { format: *format, cipher: *cipher, passphrase })
    }
}

/// Returns QEMU's word for a format.
pub(super) fn word(format: Format) -> &'static str {
    match format {
        Format::Luks1 => LUKS1.0,
        Format::Luks2 => LUKS2.0,
    }
}

/// What was given.
#[derive(Default)]
struct Draft {
    format: Option<DraftFormat>,
    key_secret: Option<String>,
    cipher: Option<Cipher>,
    parent: Option<Box<EncryptOptions>>,
}

#[derive(Clone, Copy, PartialEq)]
enum DraftFormat {
    Exact(Format),
    Any,
}

type FormatWord = (&'static str, DraftFormat, &'static str);

const LUKS1: FormatWord = ("luks", DraftFormat::Exact(Format::Luks1), "LUKS, version 1");
const LUKS2: FormatWord = ("luks2", DraftFormat::Exact(Format::Luks2), "LUKS, version 2");
const ANY: FormatWord =
    ("luks-any", DraftFormat::Any, "LUKS of any version, by librbd 18 or later");

impl Draft {
    const FORMAT: Field<Draft> = Field {
        name: "format",
        kind: Kind::At(&OneOf {
            at: |draft: &mut Draft| &mut draft.format,
            words: &[LUKS1, LUKS2, ANY],
        }),
        need: Need::Required,
        help: "the format of the encrypted image",
    };
    const NEW_FORMAT: Field<Draft> = Field {
        kind: Kind::At(&OneOf {
            at: |draft: &mut Draft| &mut draft.format,
            words: &[LUKS1, LUKS2],
        }),
        ..Draft::FORMAT
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

    fn parent(&mut self, value: Value, at: &Context) -> table::Set {
        put(&mut self.parent, Some(Box::new(read(OF_PARENT, value, at)?.options()?)))
    }

    fn options(self) -> Result<EncryptOptions, OptionError> {
        let Draft { format, key_secret, cipher: _, parent } = self;
        let format = match format.ok_or_else(|| table::missing("format"))? {
            DraftFormat::Exact(format) => Some(format),
            DraftFormat::Any => None,
        };
        let key_secret = key_secret.ok_or_else(|| table::missing("key-secret"))?;
        Ok(EncryptOptions { format, key_secret, parent })
    }
}

static OF_IMAGE: &[Field<Draft>] = &[
    Draft::FORMAT,
    Draft::KEY_SECRET,
    Field {
        name: "parent",
        kind: Kind::At(&Custom {
            shape: || Shape::Object(table::members(OF_PARENT)),
            read: Draft::parent,
            write: |draft| draft.parent.as_deref().map(EncryptOptions::write),
        }),
        need: Need::Optional("as the clone, or the parent is not encrypted"),
        help: "",
    },
];

/// A parent may have a parent too. It is not listed, as lists would have no end.
static OF_PARENT: &[Field<Draft>] = &[
    Draft::FORMAT,
    Draft::KEY_SECRET,
    Field::unoffered("parent", |draft, value, name, at| draft.parent(value, &at.below(name))),
];

static OF_NEW_IMAGE: &[Field<Draft>] = &[Draft::NEW_FORMAT, Draft::KEY_SECRET, Draft::CIPHER];

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
) -> Result<CreateEncryption, OptionError> {
    let mut draft = read(OF_NEW_IMAGE, value, at)?;
    let cipher = draft.cipher.take().unwrap_or(Cipher::Aes256);
    let EncryptOptions { format, key_secret, parent: _ } = draft.options()?;
    let format = format.ok_or_else(|| table::missing("format"))?;
    Ok(CreateEncryption { format, key_secret, cipher })
}

/// Returns what [`read_new_encryption`] reads.
#[must_use]
pub(super) fn new_encryption_members() -> Vec<Member> {
    table::members(OF_NEW_IMAGE)
}

#[cfg(test)]
mod tests {
    use ::options::value::Dialect;

    use super::*;

    #[test]
    fn parents_of_parents_are_written_as_they_were_read() {
        let of = |format: &str, secret: &str, parent: Option<Value>| {
            let own = [("format", format.into()), ("key-secret", secret.into())];
            let all = own.into_iter().chain(parent.map(|parent| ("parent", parent)));
            Value::Object(all.map(|(name, value)| (name.to_owned(), value)).collect())
        };
        let grandparent = of("luks", "a", None);
        let given = of("luks2", "c", Some(of("luks-any", "b", Some(grandparent))));
        let at = Context::new(Dialect::Json).below("encrypt");
        let read = read_encrypt(given.clone(), &at).unwrap();
        assert_eq!(read.secrets().collect::<Vec<_>>(), ["c", "b", "a"]);
        assert_eq!(read.write(), given);
        let wrong = of("luks", "b", Some(of("raw", "c", None)));
        let why = read_encrypt(of("luks", "a", Some(wrong)), &at).unwrap_err();
        assert!(why.message.contains("raw"), "{}", why.message);
        let why = read_new_encryption(of("luks-any", "a", None), &at).unwrap_err();
        assert!(why.message.contains("luks-any"), "{}", why.message);
    }
}
