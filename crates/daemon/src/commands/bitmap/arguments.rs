//! Arguments of the commands about bitmaps, also as actions of a transaction.

use options::OptionError;
use options::shape::Shape;
use options::table::{self, Context, Field, Row, put};
use options::value::Value;

use crate::bitmaps::{BitmapName, Merge, NewBitmap};

pub(in super::super) static NAME: &[Field<BitmapName>] = &[
    Row::required("node", "the bitmap's node")
        .text("<node-name>", |to, name| put(&mut to.node, name)),
    Row::required("name", "the bitmap's name").text("<name>", |to, name| put(&mut to.name, name)),
];

pub(in super::super) static NEW: &[Field<NewBitmap>] = &[
    Row::required("node", "the node whose writes it records")
        .text("<node-name>", |to, name| put(&mut to.bitmap.node, name)),
    Row::required("name", "the bitmap's name, which no other one of the node has")
        .text("<name>", |to, name| put(&mut to.bitmap.name, name)),
    Row::optional(
        "granularity",
        "the cluster size, 65536 without one",
        "bytes of a part, which has one bit: a power of two, at least 512",
    )
    .int(0..=(u32::MAX as i64), |to, bytes| put(&mut to.granularity, Some(bytes.unsigned_abs()))),
    Row::default(
        "persistent",
        "off",
        "store the bitmap in the qcow2 image when the image is closed",
    )
    .bool(|to, on| put(&mut to.persistent, on)),
    Row::default("disabled", "off", "note nothing before block-dirty-bitmap-enable")
        .bool(|to, on| put(&mut to.disabled, on)),
];

pub(in super::super) static MERGE: &[Field<Merge>] = &[
    Row::required("node", "the target's node")
        .text("<node-name>", |to, name| put(&mut to.node, name)),
    Row::required("target", "the bitmap that gets all bits")
        .text("<name>", |to, name| put(&mut to.target, name)),
    Row::required("bitmaps", "bitmaps of this node by name, or of others by node and name").nested(
        || {
            let external = Shape::Object(table::members(NAME));
            let one = Shape::Either(vec![Shape::Text("<name>"), external]);
            Shape::List(Box::new(one), "bitmap <n>: a name, or a node and a name")
        },
        |to, value, at| {
            let Value::List(list) = value else {
                return Err(table::wrong_type(at.whole(), "array"));
            };
            let read = |(n, one)| source(one, &at.item(n));
            let bitmaps: Result<_, _> = list.into_iter().enumerate().map(read).collect();
            put(&mut to.bitmaps, bitmaps?)
        },
    ),
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
