//! `x-blockdev-amend`: changes the passwords of an encrypted image.

use ::options::shape::Shape;
use ::options::table::{Row, Table, put};

use super::encrypt;
use super::options::Qcow2Options;
use crate::amend::{AmendContext, AmendKind, Amending, Amendment};
use crate::drivers::encryption::AmendLuks;
use crate::error::OpenError;

pub(super) static AMEND: AmendKind =
    AmendKind { help: "passwords of an encrypted image", options: &OPTIONS };

#[derive(Debug, Default)]
struct AmendQcow2 {
    encrypt: Option<AmendLuks>,
}

impl Amendment for AmendQcow2 {
    fn amend(self: Box<Self>, context: &AmendContext<'_>) -> Amending {
        let Some(amend) = self.encrypt else { return Box::pin(async { Ok(()) }) };
        let node = context.node;
        let place = node.children.iter().find(|child| child.role == "file");
        let slots = node.node.clone().image().and_then(|image| image.key_slots());
        let (Some(slots), Some(place)) = (slots, place) else {
            return Box::pin(async { Err(OpenError::new("image is not encrypted, can't amend")) });
        };
        let options = node.options.driver.downcast_ref::<Qcow2Options>();
        let key_secret = options.and_then(Qcow2Options::key_secret);
        amend.amend(context, slots, place.edge.clone(), key_secret, "encrypt.key-secret")
    }
}

static OPTIONS: Table<AmendQcow2, Box<dyn Amendment>> = Table {
    fields: &[Row::optional(
        "encrypt",
        "the passwords stay as they are",
        "which passwords the image gets or loses",
    )
    .nested(
        || Shape::Union(encrypt::amend_union()),
        |image: &mut AmendQcow2, value, at| {
            put(&mut image.encrypt, Some(encrypt::read_amend(value, at)?))
        },
    )],
    build: |amend| Ok(Box::new(amend)),
};
