//! `secret`: a password, or the key that other secrets are encrypted with.

use std::fmt;
use std::path::{Path, PathBuf};

use crypto::Zeroizing;
use serde_json::json;

use super::{ObjectOptions, ObjectType, TypeRow, check_id};
use crate::error::OptionError;
use crate::place::OneOf;
use crate::table::{Field, Row, Table, only_off, put};

/// `secret`: a password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretOptions {
    /// `id`: its name.
    pub id: String,
    /// `data` or `file`.
    pub source: SecretSource,
    /// `format`.
    pub format: SecretFormat,
    /// `keyid` and `iv`. `None` means that the secret is not encrypted.
    pub encrypted: Option<EncryptedBy>,
}

/// Where a secret is.
#[derive(Clone, PartialEq, Eq)]
pub enum SecretSource {
    /// `data`.
    Data(Zeroizing<String>),
    /// `file`.
    File(PathBuf),
}

impl fmt::Debug for SecretSource {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretSource::Data(_) => f.write_str("Data"),
            SecretSource::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

/// `format` of a secret.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SecretFormat {
    /// The bytes themselves.
    #[default]
    Raw,
    /// The bytes in base64.
    Base64,
}

/// What a secret is encrypted with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptedBy {
    /// `keyid`: the secret object with the key.
    pub keyid: String,
    /// `iv`: the initialisation vector, in base64.
    pub iv: String,
}

impl SecretOptions {
    /// Returns whether the options have the secret in the clear.
    pub fn is_told(&self) -> bool {
        matches!(self.source, SecretSource::Data(_)) && self.encrypted.is_none()
    }
}

impl SecretOptions {
    /// Returns the option that makes the secret.
    pub(crate) fn option(&self) -> String {
        let SecretOptions { id, source, format, encrypted } = self;
        let mut object = json!({"qom-type": "secret", "id": id});
        match source {
            SecretSource::Data(data) => object["data"] = data.as_str().into(),
            SecretSource::File(file) => object["file"] = file.to_string_lossy().into(),
        }
        if *format == SecretFormat::Base64 {
            object["format"] = "base64".into();
        }
        if let Some(EncryptedBy { keyid, iv }) = encrypted {
            (object["keyid"], object["iv"]) = (keyid.as_str().into(), iv.as_str().into());
        }
        format!("--object={object}")
    }
}

impl ObjectType for SecretOptions {
    fn id(&self) -> &str {
        &self.id
    }

    fn type_name(&self) -> &'static str {
        "secret"
    }

    fn path(&self) -> Option<&Path> {
        match &self.source {
            SecretSource::File(file) => Some(file),
            SecretSource::Data(_) => None,
        }
    }
}

pub(super) static SECRET: TypeRow = TypeRow {
    name: "secret",
    help: "a password, or a key that other secrets are encrypted with",
    example: "secret,id=sec0,file=/etc/ringmill/disk0.key",
    parent: "secret_common",
    table: &Table {
        fields: FIELDS,
        build: |draft: Draft| {
            let source = match (draft.data, draft.file) {
                (Some(data), None) => SecretSource::Data(data),
                (None, Some(file)) => SecretSource::File(file),
                (Some(_), Some(_)) => {
                    return Err(OptionError::new("'file' and 'data' are mutually exclusive"));
                }
                (None, None) => {
                    return Err(OptionError::new("Either 'file' or 'data' must be provided"));
                }
            };
            let encrypted = match (draft.keyid, draft.iv) {
                (Some(keyid), Some(iv)) => Some(EncryptedBy { keyid, iv }),
                (Some(_), None) => {
                    return Err(OptionError::new("IV is required to decrypt secret"));
                }
                (None, _) => None,
            };
            let Draft { id, format, .. } = draft;
            Ok(ObjectOptions::Secret(SecretOptions { id, source, format, encrypted }))
        },
    },
};

/// What was given.
#[derive(Default)]
struct Draft {
    id: String,
    data: Option<Zeroizing<String>>,
    file: Option<PathBuf>,
    format: SecretFormat,
    keyid: Option<String>,
    iv: Option<String>,
}

static FIELDS: &[Field<Draft>] = &[
    Row::required("id", "name of the secret, for key-secret and keyid to refer to")
        .text("<id>", |secret, id| put(&mut secret.id, check_id(id)?)),
    Row::optional(
        "data",
        "that of file",
        "the secret itself; other users of the machine see it on a command line",
    )
    .text("<secret>", |secret, data| put(&mut secret.data, Some(Zeroizing::new(data)))),
    Row::optional("file", "none", "a file with the secret, all bytes of which count")
        .path(|secret, path| put(&mut secret.file, Some(path))),
    Row::default("format", "raw", "how the secret, or the encrypted secret, is written").at(
        &OneOf {
            at: |secret: &mut Draft| &mut secret.format,
            words: &[
                ("raw", SecretFormat::Raw, "as it is"),
                ("base64", SecretFormat::Base64, "in base64"),
            ],
        },
    ),
    Row::optional(
        "keyid",
        "it is not encrypted",
        "the secret object with the key, of 32 bytes, that the secret is encrypted with: \
         AES-256-CBC",
    )
    .text("<id>", |secret, id| put(&mut secret.keyid, Some(id))),
    Row::optional("iv", "none", "the initialisation vector of 16 bytes in base64; keyid needs it")
        .text("<base64>", |secret, iv| put(&mut secret.iv, Some(iv))),
    Field::unoffered("loaded", only_off),
];
