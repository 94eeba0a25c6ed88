//! Exports over NBD.

use super::on_error::{RERROR_NBD, WERROR_NBD};
use super::{Draft, NODE_NAME};
use crate::error::OptionError;
use crate::shape::Shape;
use crate::table::{self, Context, Field, Kind, Need, only_off};
use crate::value::{Dialect, Value};

/// What an export over NBD has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NbdOptions {
    /// `name`: what clients call it, at most 4096 bytes; by default the node's name.
    pub name: String,
    /// `description`, for people, at most 4096 bytes.
    pub description: String,
}

/// `name` and `description` while they are read.
#[derive(Default)]
pub(super) struct NbdDraft {
    name: Option<String>,
    description: String,
}

/// Longest string of the protocol, bytes.
const MAX_STRING: usize = 4096;

/// Options of `nbd`.
pub(super) static NBD: &[Field<Draft>] = &[
    NODE_NAME,
    RERROR_NBD,
    WERROR_NBD,
    Field {
        name: "name",
        kind: Kind::Text {
            meta: "<name>",
            set: |export, name| {
                check("export name", &name)?;
                export.nbd.name = Some(name);
                Ok(())
            },
        },
        need: Need::Optional("the node's name"),
        help: "what clients call the export",
    },
    Field {
        name: "description",
        kind: Kind::Text {
            meta: "<text>",
            set: |export, text| {
                check("description", &text)?;
                export.nbd.description = text;
                Ok(())
            },
        },
        need: Need::Optional("none"),
        help: "text for people, shown with the export's name",
    },
    Field {
        name: "bitmaps",
        kind: Kind::Nested {
            shape: || Shape::List(Box::new(Shape::Text("<name>")), "dirty bitmap; nodes have none"),
            read: bitmaps,
        },
        need: Need::Optional("none"),
        help: "dirty bitmaps to offer; nodes have none",
    },
    Field {
        name: "allocation-depth",
        kind: Kind::Bool(|_, on| only_off("allocation-depth", on)),
        need: Need::Default("off"),
        help: "tell clients from which layer of an image data come; only off so far",
    },
];

/// What was read, of a node of that name.
pub(super) fn finish(draft: &mut NbdDraft, node_name: &str) -> NbdOptions {
    let NbdDraft { name, description } = std::mem::take(draft);
    NbdOptions { name: name.unwrap_or_else(|| node_name.to_owned()), description }
}

fn check(what: &str, text: &str) -> table::Set {
    if text.len() > MAX_STRING {
        return Err(OptionError::new(format!("{what} '{text}' too long")));
    }
    if text.contains('\0') {
        return Err(OptionError::new(format!("{what} contains NUL")));
    }
    Ok(())
}

/// No node has bitmaps, so none is ever found.
fn bitmaps(_: &mut Draft, value: Value, at: &Context) -> table::Set {
    match value {
        Value::List(names) => match names.into_iter().next() {
            Some(name) => {
                let name = table::text(name, &at.full("0"), at)?;
                Err(OptionError::new(format!("Bitmap '{name}' is not found")))
            }
            None => Ok(()),
        },
        _ if at.dialect == Dialect::Keyval => {
            Err(OptionError::new(format!("Parameter '{}' expects a list", at.whole())))
        }
        _ => Err(table::wrong_type(at.whole(), "array")),
    }
}
