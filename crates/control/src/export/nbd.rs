//! Exports over NBD.

use block::job::OnError;

use super::on_error::{RERROR_NBD, WERROR_NBD};
use super::{Address, Draft, ExportNeeds, ExportType, MoreNodes, SizeUse};
use crate::error::OptionError;
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

impl ExportType for NbdOptions {
    fn type_name(&self) -> &'static str {
        "nbd"
    }

    fn more_nodes(&self) -> Option<MoreNodes<'_>> {
        None
    }

    fn address(&self) -> Address {
        Address::Nbd(self.name.clone())
    }

    fn needs(&self) -> ExportNeeds<'_> {
        ExportNeeds::default()
    }

    fn size_use(&self) -> SizeUse {
        SizeUse::Fixed
    }

    fn error_policies(&self) -> Option<(OnError, OnError)> {
        None
    }

    fn named_by_node(&self) -> Option<&'static str> {
        Some("name")
    }
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
    Field::unoffered("bitmaps", bitmaps),
    Field::unoffered("allocation-depth", only_off),
];

/// Returns the options that were read.
pub(super) fn finish(draft: &mut Draft) -> NbdOptions {
    let NbdDraft { name, description } = std::mem::take(&mut draft.nbd);
    let name = name.or_else(|| draft.node_name.clone());
    NbdOptions { name: name.unwrap_or_default(), description }
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
fn bitmaps(_: &mut Draft, value: Value, name: &str, at: &Context) -> table::Set {
    match value {
        Value::List(bitmaps) => match bitmaps.into_iter().next() {
            Some(bitmap) => {
                let bitmap = table::text(bitmap, &format!("{name}.0"), at)?;
                Err(OptionError::new(format!("Bitmap '{bitmap}' is not found")))
            }
            None => Ok(()),
        },
        _ if at.dialect == Dialect::Keyval => {
            Err(OptionError::new(format!("Parameter '{name}' expects a list")))
        }
        _ => Err(table::wrong_type(name, "array")),
    }
}
