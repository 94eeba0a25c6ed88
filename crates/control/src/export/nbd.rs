//! Exports over NBD.

use block::job::OnError;

use super::on_error::{RERROR_NBD, WERROR_NBD};
use super::{Address, Draft, ExportNeeds, ExportType, MoreNodes, SizeUse};
use crate::error::OptionError;
use crate::shape::Shape;
use crate::table::{self, Context, Field, Row, put};
use crate::value::{Dialect, Value};

/// What an export over NBD has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NbdOptions {
    /// `name`: what clients call it, at most 4096 bytes; by default the node's name.
    pub name: String,
    /// `description`, for people, at most 4096 bytes.
    pub description: String,
    /// `allocation-depth`.
    pub allocation_depth: bool,
    /// `bitmaps`.
    pub bitmaps: Vec<BitmapRef>,
}

/// A bitmap that clients can ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BitmapRef {
    /// The node that has it. `None`: the export's, or one behind it.
    pub node: Option<String>,
    /// Its name.
    pub name: String,
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

    fn reads_inactive(&self) -> bool {
        true
    }

    fn shows_bitmaps(&self) -> bool {
        !self.bitmaps.is_empty()
    }
}

/// `name` and `description` while they are read.
#[derive(Default)]
pub(super) struct NbdDraft {
    name: Option<String>,
    description: String,
    allocation_depth: bool,
    bitmaps: Vec<BitmapRef>,
}

/// Longest string of the protocol, bytes.
const MAX_STRING: usize = 4096;

/// Options of `nbd`.
pub(super) static NBD: &[Field<Draft>] = &[
    RERROR_NBD,
    WERROR_NBD,
    Row::optional("name", "the node's name", "the export's name for clients").text(
        "<name>",
        |export, name| {
            check("export name", &name)?;
            export.nbd.name = Some(name);
            Ok(())
        },
    ),
    Row::optional("description", "none", "text for people, shown with the export's name").text(
        "<text>",
        |export, text| {
            check("description", &text)?;
            export.nbd.description = text;
            Ok(())
        },
    ),
    Row::optional(
        "bitmaps",
        "none",
        "dirty bitmaps that clients can ask for, as metadata contexts qemu:dirty-bitmap:NAME",
    )
    .nested(bitmaps_shape, bitmaps),
    Row::default(
        "allocation-depth",
        "off",
        "let clients ask which image of the backing chain data comes from, by the metadata \
         context qemu:allocation-depth",
    )
    .bool(|export, on| {
        export.nbd.allocation_depth = on;
        Ok(())
    }),
];

/// A bitmap of a node.
static BITMAP: &[Field<BitmapRef>] = &[
    Row::required("node", "the bitmap's node")
        .text("<node-name>", |to, name| put(&mut to.node, Some(name))),
    Row::required("name", "the bitmap's name").text("<name>", |to, name| put(&mut to.name, name)),
];

fn bitmaps_shape() -> Shape {
    let one = Shape::Either(vec![Shape::Text("<name>"), Shape::Object(table::members(BITMAP))]);
    Shape::List(Box::new(one), "bitmap <n>: a name, or a node and a name")
}

/// Returns the options that were read.
pub(super) fn finish(draft: &mut Draft) -> NbdOptions {
    let NbdDraft { name, description, allocation_depth, bitmaps } = std::mem::take(&mut draft.nbd);
    let name = name.or_else(|| draft.node_name.clone());
    NbdOptions { name: name.unwrap_or_default(), description, allocation_depth, bitmaps }
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

fn bitmaps(export: &mut Draft, value: Value, at: &Context) -> table::Set {
    let Value::List(list) = value else {
        return match at.dialect {
            Dialect::Keyval => {
                Err(OptionError::new(format!("Parameter '{}' expects a list", at.whole())))
            }
            Dialect::Json => Err(table::wrong_type(at.whole(), "array")),
        };
    };
    let read = |(n, value)| {
        let at = &at.item(n);
        match value {
            Value::Text(name) => Ok(BitmapRef { node: None, name }),
            Value::Object(mut object) => {
                let mut bitmap = BitmapRef::default();
                table::read(BITMAP, &mut bitmap, &mut object, at)?;
                table::refuse_rest(&object, at, "a bitmap", table::names(BITMAP))?;
                Ok(bitmap)
            }
            Value::Null
            | Value::Bool(_)
            | Value::Integer(_)
            | Value::Number(_)
            | Value::List(_) => Err(table::wrong_type(at.whole(), "string, object")),
        }
    };
    export.nbd.bitmaps = list.into_iter().enumerate().map(read).collect::<Result<_, _>>()?;
    Ok(())
}
