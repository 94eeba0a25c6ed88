//! Creates images.

use ::options::OptionError;
use ::options::shape::Shape;
use ::options::table::{self, Field, Kind, Need, Table, put};
use rbd::Creation;

use super::connections::{Connections, Secrets, shown};
use super::encrypt::{CreateEncryption, new_encryption_members, read_new_encryption};
use super::options::{RbdOptions, rbd_members, read_rbd};
use crate::create::{CreateContext, CreateKind, Creating, NewImage};
use crate::error::OpenError;
use crate::options::BlockdevRef;

pub(super) static CREATE: CreateKind =
    CreateKind { help: "an image of a Ceph cluster", options: &OPTIONS };

/// An image to be created.
#[derive(Debug)]
struct NewRbd {
    /// Where.
    location: RbdOptions,
    /// Size of its contents, bytes.
    size: u64,
    /// Bytes of its objects, a power of two. `None`: Ceph's default.
    object_size: Option<u64>,
    /// `None`: the image is not encrypted.
    encrypt: Option<CreateEncryption>,
}

impl NewImage for NewRbd {
    fn nodes(&mut self) -> Vec<&mut BlockdevRef> {
        Vec::new()
    }

    fn create(self: Box<Self>, context: &CreateContext<'_>) -> Creating {
        let NewRbd { location, size, object_size, encrypt } = *self;
        let begin = || {
            let credentials = context.nodes.known_credentials();
            let encryption = encrypt.map(|encrypt| encrypt.encryption(credentials));
            let object_order = object_size.map_or(0, u64::trailing_zeros);
            let creation = Creation { size, object_order, encryption: encryption.transpose()? };
            Ok::<_, OpenError>((
                Connections::of(context.nodes.services())?,
                Secrets::of(&location, credentials)?,
                creation,
            ))
        };
        let (begun, event_loop) = (begin(), context.event_loop.clone());
        Box::pin(async move {
            let (connections, secrets, creation) = begun?;
            let created = connections.create(&event_loop, &location, secrets, creation).await;
            created.map_err(|error| error.of_step(&format!("rbd image {}", shown(&location))))
        })
    }
}

#[derive(Default)]
struct Draft {
    location: Option<RbdOptions>,
    size: u64,
    object_size: Option<u64>,
    encrypt: Option<CreateEncryption>,
}

static OPTIONS: Table<Draft, Box<dyn NewImage>> = Table {
    fields: &[
        Field {
            name: "location",
            kind: Kind::Nested {
                shape: || Shape::Object(rbd_members()),
                read: |rbd, value, at| put(&mut rbd.location, Some(read_rbd(value, at)?)),
            },
            need: Need::Required,
            help: "where it is made, as of driver rbd; without a snapshot",
        },
        Field {
            name: "size",
            kind: Kind::Bytes(|rbd, size| put(&mut rbd.size, size)),
            need: Need::Required,
            help: "size of the disk",
        },
        Field {
            name: "cluster-size",
            kind: Kind::Bytes(|rbd, size| {
                if !size.is_power_of_two() {
                    return Err(OptionError::new("RBD cluster size must be a power of two"));
                }
                put(&mut rbd.object_size, Some(size))
            }),
            need: Need::Optional("Ceph's default"),
            help: "bytes of the objects that the image is kept in",
        },
        Field {
            name: "encrypt",
            kind: Kind::Nested {
                shape: || Shape::Object(new_encryption_members()),
                read: |rbd, value, at| put(&mut rbd.encrypt, Some(read_new_encryption(value, at)?)),
            },
            need: Need::Optional("the image is not encrypted"),
            help: "",
        },
    ],
    build: |rbd: Draft| {
        let Draft { location, size, object_size, encrypt } = rbd;
        let location = location.ok_or_else(|| table::missing("location"))?;
        if location.snapshot.is_some() {
            return Err(OptionError::new("Can't create snapshots"));
        }
        Ok(Box::new(NewRbd { location, size, object_size, encrypt }))
    },
};
