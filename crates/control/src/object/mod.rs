//! `--object`: things that are neither nodes nor exports, which those refer to.
//!
//! A type of object is a file here, a line in [`TYPES`] and a variant of [`ObjectOptions`].

mod authz;
mod iothread;
mod kind;
mod secret;
mod throttle_group;
mod tls_creds;

pub use authz::AuthzOptions;
pub use iothread::IothreadOptions;
pub use kind::ObjectType;
pub use secret::{EncryptedBy, SecretFormat, SecretOptions, SecretSource};
pub use throttle_group::ThrottleGroupOptions;
pub use tls_creds::TlsCredsOptions;

use std::ops::Deref;

use crate::error::OptionError;
use crate::scalar::{IDENTIFIER_HINT, is_identifier};
use crate::shape::{Member, Shape, Union, Variant};
use crate::table::{self, Context, Need, Reads};
use crate::value::{Object, Value};

/// The types there are.
pub(crate) static TYPES: &[&TypeRow] = &[
    &authz::AUTHZ_LIST,
    &authz::AUTHZ_SIMPLE,
    &iothread::IOTHREAD,
    &secret::SECRET,
    &throttle_group::THROTTLE_GROUP,
    &tls_creds::TLS_CREDS_X509,
];

/// Types that QSD has and ringmill never will, with what to do instead.
static ABSENT: [(&str, &str); 2] = [
    (
        "tls-creds-anon",
        "TLS without certificates does not protect from an attacker between the two sides. Use \
         tls-creds-x509, with verify-peer=off where clients need no certificate.",
    ),
    (
        "tls-creds-psk",
        "The TLS library that is used, rustls, has no pre-shared keys. Use tls-creds-x509: a \
         certificate that is signed by itself will do. For peers with nothing but keys, put nbdkit \
         with tls-psk in between.",
    ),
];

/// One `--object`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectOptions {
    /// `iothread`.
    Iothread(IothreadOptions),
    /// `tls-creds-x509`.
    TlsCreds(TlsCredsOptions),
    /// `secret`.
    Secret(SecretOptions),
    /// `authz-simple`, `authz-list`.
    Authz(AuthzOptions),
    /// `throttle-group`.
    ThrottleGroup(Box<ThrottleGroupOptions>),
}

impl Deref for ObjectOptions {
    type Target = dyn ObjectType;

    fn deref(&self) -> &Self::Target {
        match self {
            ObjectOptions::Iothread(iothread) => iothread,
            ObjectOptions::TlsCreds(creds) => creds,
            ObjectOptions::Authz(authz) => authz,
            ObjectOptions::ThrottleGroup(group) => &**group,
            ObjectOptions::Secret(secret) => secret,
        }
    }
}

/// A property of an object, as QOM shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Property {
    /// Its name: that of the option.
    pub name: &'static str,
    /// What it is, in QOM's words.
    pub kind: &'static str,
    /// What it is set to.
    pub value: Value,
}

/// A type of object: a row of the table of types.
pub(crate) struct TypeRow {
    /// Its name.
    pub(crate) name: &'static str,
    /// What it is for.
    pub(crate) help: &'static str,
    /// A whole value of the option.
    pub(crate) example: &'static str,
    /// The type that it is derived from, in QEMU's tree of types.
    pub(crate) parent: &'static str,
    /// Its options.
    pub(crate) table: &'static dyn Reads<ObjectOptions>,
}

/// Returns the types of objects, each with the type that it is derived from.
///
/// Only types of objects that can be created are included.
pub fn object_types() -> impl Iterator<Item = (&'static str, &'static str)> {
    TYPES.iter().map(|row| (row.name, row.parent))
}

/// Returns what an object may have. As in QSD's schema, `id` belongs to all types.
pub fn options() -> Union {
    let variant = |row: &&TypeRow| {
        let mut members = row.table.members();
        members.retain(|member| member.name != "id");
        Variant { name: row.name, help: row.help, example: row.example, members }
    };
    let id = Member {
        name: "id",
        shape: Shape::Text("<id>"),
        need: Need::Required,
        help: "name of the object, for options and commands to refer to",
    };
    Union {
        tag: "qom-type",
        help: "the kind of object",
        common: vec![id],
        variants: TYPES.iter().map(variant).collect(),
    }
}

/// Reads one `--object`.
///
/// # Errors
///
/// What is wrong with its options.
pub fn read(mut object: Object, at: &Context) -> Result<ObjectOptions, OptionError> {
    let names = || TYPES.iter().map(|row| row.name);
    let qom_type = match table::take(&mut object, "qom-type") {
        Some(name) => table::text(name, "qom-type", at)?,
        None => {
            let names: Vec<&str> = names().collect();
            let hint = format!("Known object types: {}", names.join(", "));
            return Err(table::missing("qom-type").hint(hint));
        }
    };
    if let Some((name, instead)) = ABSENT.iter().find(|(name, _)| *name == qom_type) {
        return Err(OptionError::new(format!("Object type '{name}' is not supported by ringmill"))
            .hint(*instead));
    }
    let Some(row) = TYPES.iter().find(|row| row.name == qom_type) else {
        return Err(table::not_accepted("qom-type", at, &qom_type, names()));
    };
    row.table.read(object, at, &["qom-type"], &format!("object type '{qom_type}'"))
}

/// `id` of an object.
fn check_id(id: String) -> Result<String, OptionError> {
    match is_identifier(&id) {
        true => Ok(id),
        false => {
            Err(OptionError::new("Parameter 'id' expects an identifier").hint(IDENTIFIER_HINT))
        }
    }
}
