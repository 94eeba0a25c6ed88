//! `x-blockdev-amend`: changes the passwords of an encrypted disk.

use ::options::table::Table;

use super::options::LuksOptions;
use crate::amend::{AmendContext, AmendKind, Amending, Amendment};
use crate::drivers::encryption::AmendLuks;
use crate::error::OpenError;

pub(super) static AMEND: AmendKind =
    AmendKind { help: "passwords of an encrypted disk", options: &OPTIONS };

#[derive(Debug)]
struct AmendDisk(AmendLuks);

impl Amendment for AmendDisk {
    fn amend(self: Box<Self>, context: &AmendContext<'_>) -> Amending {
        let node = context.node;
        let child = |role| node.children.iter().find(move |child| child.role == role);
        let place = child("header").or_else(|| child("file"));
        let slots = node.node.clone().image().and_then(|image| image.key_slots());
        let (Some(slots), Some(place)) = (slots, place) else {
            let why = format!("Node '{}' has no LUKS header", node.name);
            return Box::pin(async move { Err(OpenError::new(why)) });
        };
        let options = node.options.driver.downcast_ref::<LuksOptions>();
        let key_secret = options.and_then(|options| options.key_secret.as_deref());
        self.0.amend(context, slots, place.edge.clone(), key_secret, "key-secret")
    }
}

static OPTIONS: Table<AmendLuks, Box<dyn Amendment>> =
    Table { fields: AmendLuks::FIELDS, build: |amend| Ok(Box::new(AmendDisk(amend))) };
