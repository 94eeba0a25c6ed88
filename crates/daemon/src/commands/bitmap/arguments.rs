//! Arguments of the commands about bitmaps, also as actions of a transaction.

use options::OptionError;
use options::shape::Shape;
use options::table::{self, Context, Field, Kind, Need, put};
use options::value::Value;

use crate::bitmaps::{BitmapName, Merge, NewBitmap};

pub(in super::super) static NAME: &[Field<BitmapName>] = &[
    Field {
        name: "node",
        kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.node, name) },
        need: Need::Required,
        help: "the bitmap's node",
    },
    Field {
        name: "name",
        kind: Kind::Text { meta: "<name>", set: |to, name| put(&mut to.name, name) },
        need: Need::Required,
        help: "the bitmap's name",
    },
];

pub(in super::super) static NEW: &[Field<NewBitmap>] = &[
    Field {
        name: "node",
        kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.bitmap.node, name) },
        need: Need::Required,
        help: "the node whose writes it records",
    },
    Field {
        name: "name",
        kind: Kind::Text { meta: "<name>", set: |to, name| put(&mut to.bitmap.name, name) },
        need: Need::Required,
        help: "the bitmap's name, which no other one of the node has",
    },
    Field {
        name: "granularity",
        kind: Kind::Int {
            range: 0..=(u32::MAX as i64),
            set: |to, bytes| put(&mut to.granularity, Some(bytes.unsigned_abs())),
        },
        need: Need::Optional("the cluster size, 65536 without one"),
        help: "bytes of a part, which has one bit: a power of two, at least 512",
    },
    Field {
        name: "persistent",
        kind: Kind::Bool(|to, on| put(&mut to.persistent, on)),
        need: Need::Default("off"),
        help: "store the bitmap in the qcow2 image when the image is closed",
    },
    Field {
        name: "disabled",
        kind: Kind::Bool(|to, on| put(&mut to.disabled, on)),
        need: Need::Default("off"),
        help: "note nothing before block-dirty-bitmap-enable",
    },
];

pub(in super::super) static MERGE: &[Field<Merge>] = &[
    Field {
        name: "node",
        kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.node, name) },
        need: Need::Required,
        help: "the target's node",
    },
    Field {
        name: "target",
        kind: Kind::Text { meta: "<name>", set: |to, name| put(&mut to.target, name) },
        need: Need::Required,
        help: "the bitmap that gets all bits",
    },
    Field {
        name: "bitmaps",
        kind: Kind::Nested {
            shape: || {
                let external = Shape::Object(table::members(NAME));
                let one = Shape::Either(vec![Shape::Text("<name>"), external]);
                Shape::List(Box::new(one), "bitmap <n>: a name, or a node and a name")
            },
            read: |to, value, at| {
                let Value::List(list) = value else {
                    return Err(table::wrong_type(at.whole(), "array"));
                };
                let bitmaps: Result<_, _> = list.into_iter().map(|one| source(one, at)).collect();
                put(&mut to.bitmaps, bitmaps?)
            },
        },
        need: Need::Required,
        help: "bitmaps of this node by name, or of others by node and name",
    },
];

fn source(value: Value, at: &Context) -> Result<(Option<String>, String), OptionError> {
    match value {
        Value::Text(name) => Ok((None, name)),
        Value::Object(mut object) => {
            let mut name = BitmapName::default();
            table::read(NAME, &mut name, &mut object, at)?;
            table::refuse_rest(&object, at, "a bitmap", table::names(NAME))?;
            Ok((Some(name.node), name.name))
        }
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Number(_) | Value::List(_) => {
            Err(table::wrong_type(at.whole(), "string, object"))
        }
    }
}
