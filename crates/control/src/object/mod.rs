//! `--object`: things that are neither nodes nor exports, which those refer to.
//!
//! A type of object is a [`TypeRow`] in a file of its own, a line in [`TYPES`] and a variant of
//! [`ObjectOptions`].

mod iothread;

pub use iothread::IothreadOptions;

use crate::error::OptionError;
use crate::scalar::{IDENTIFIER_HINT, is_identifier};
use crate::shape::{Union, Variant};
use crate::table::{self, Context, Reads};
use crate::value::{Object, Value};

/// The types there are.
pub(crate) static TYPES: &[&TypeRow] = &[&iothread::IOTHREAD];

/// One `--object`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectOptions {
    /// `iothread`.
    Iothread(IothreadOptions),
}

impl ObjectOptions {
    /// `id`: its name, which no two objects have in common.
    pub fn id(&self) -> &str {
        match self {
            ObjectOptions::Iothread(iothread) => &iothread.id,
        }
    }

    /// `qom-type`.
    pub fn type_name(&self) -> &'static str {
        match self {
            ObjectOptions::Iothread(_) => "iothread",
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
    /// Its options.
    pub(crate) table: &'static dyn Reads<ObjectOptions>,
}

/// What an object may have.
pub(crate) fn options() -> Union {
    let variant = |row: &&TypeRow| Variant {
        name: row.name,
        help: row.help,
        example: row.example,
        members: row.table.members(),
    };
    Union {
        tag: "qom-type",
        help: "what it is",
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
