//! `--object`: things that nodes and exports refer to.
//!
//! An object type is a file with a [`TypeRow`], a line in [`TYPES`] and a variant of [`ObjectOptions`].

mod authz;
mod iothread;
mod throttle_group;
mod tls_creds;

pub use authz::AuthzOptions;
pub use iothread::IothreadOptions;
pub use throttle_group::ThrottleGroupOptions;
pub use tls_creds::TlsCredsOptions;

use tls::Authorization;

use crate::error::OptionError;
use crate::scalar::{IDENTIFIER_HINT, is_identifier};
use crate::shape::{Union, Variant};
use crate::table::{self, Context, Reads};
use crate::value::{Object, Value};

/// All types.
pub(crate) static TYPES: &[&TypeRow] = &[
    &authz::AUTHZ_LIST,
    &authz::AUTHZ_SIMPLE,
    &iothread::IOTHREAD,
    &throttle_group::THROTTLE_GROUP,
    &tls_creds::TLS_CREDS_X509,
];

/// Types of QSD that ringmill will never have, with the replacement.
static ABSENT: [(&str, &str); 2] = [
    (
        "tls-creds-anon",
        "TLS without certificates protects from nobody who can come between the two sides. Use \
         tls-creds-x509, with verify-peer=off where clients need no certificate.",
    ),
    (
        "tls-creds-psk",
        "The TLS library that is used, rustls, has no pre-shared keys. Use tls-creds-x509: a \
         certificate that is signed by itself will do.",
    ),
];

/// One `--object`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectOptions {
    /// `iothread`.
    Iothread(IothreadOptions),
    /// `tls-creds-x509`.
    TlsCreds(TlsCredsOptions),
    /// `authz-simple`, `authz-list`.
    Authz(AuthzOptions),
    /// `throttle-group`.
    ThrottleGroup(Box<ThrottleGroupOptions>),
}

impl ObjectOptions {
    /// Returns `id`: its name, unique among objects.
    pub fn id(&self) -> &str {
        match self {
            ObjectOptions::Iothread(iothread) => &iothread.id,
            ObjectOptions::TlsCreds(creds) => &creds.id,
            ObjectOptions::Authz(authz) => &authz.id,
            ObjectOptions::ThrottleGroup(group) => &group.id,
        }
    }

    /// `qom-type`.
    pub fn type_name(&self) -> &'static str {
        match self {
            ObjectOptions::Iothread(_) => "iothread",
            ObjectOptions::TlsCreds(_) => "tls-creds-x509",
            ObjectOptions::Authz(authz) => match authz.authorization {
                Authorization::Simple { .. } => "authz-simple",
                Authorization::List { .. } => "authz-list",
            },
            ObjectOptions::ThrottleGroup(_) => "throttle-group",
        }
    }
}

/// A property of an object in QOM.
#[derive(Debug, Clone, PartialEq)]
pub struct Property {
    /// Its name: that of the option.
    pub name: &'static str,
    /// Its type in QOM.
    pub kind: &'static str,
    /// Its value.
    pub value: Value,
}

/// A type of object: a row of the table of types.
pub(crate) struct TypeRow {
    /// Its name.
    pub(crate) name: &'static str,
    /// Its purpose.
    pub(crate) help: &'static str,
    /// A complete value of the option.
    pub(crate) example: &'static str,
    /// Its options.
    pub(crate) table: &'static dyn Reads<ObjectOptions>,
}

/// Returns the types of objects that can be created.
pub fn object_types() -> impl Iterator<Item = &'static str> {
    TYPES.iter().map(|row| row.name)
}

/// The options of an object.
pub(crate) fn options() -> Union {
    let variant = |row: &&TypeRow| Variant {
        name: row.name,
        help: row.help,
        example: row.example,
        members: row.table.members(),
    };
    Union {
        tag: "qom-type",
        help: "the kind of object",
        common: Vec::new(),
        variants: TYPES.iter().map(variant).collect(),
    }
}

/// Reads one `--object`.
pub(crate) fn read(mut object: Object, at: &Context) -> Result<ObjectOptions, OptionError> {
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
