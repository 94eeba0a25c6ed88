//! `rbd`: an image of a Ceph cluster.

use std::path::PathBuf;

use ::options::address::InetDraft;
use ::options::place::{Custom, Of, Place, Text, write_list};
use ::options::shape::{Member, Shape, Word};
use ::options::table::{self, Context, Field, Kind, Need, put};
use ::options::{OptionError, Value};

use super::connections::load_library;
use super::encrypt::{EncryptOptions, encrypt_members, read_encrypt};
use crate::driver::{DriverKind, ForeignLibrary, OptionTable};

pub(in crate::drivers) static RBD: DriverKind = DriverKind {
    name: "rbd",
    help: "an image of a Ceph cluster, by librbd",
    example: "rbd,node-name=n,pool=rbd,image=disk,conf=/etc/ceph/ceph.conf,user=admin",
    options: &OptionTable {
        fields: FIELDS,
        start: |_| RbdOptions::default(),
        build: |options| Ok(options.into()),
    },
    create: Some(&super::create::CREATE),
    amend: None,
    library: Some(&ForeignLibrary { load: load_library, reads: READS }),
};

/// Configuration and keys; random numbers, which libcryptsetup takes for an encrypted image.
const READS: &[&str] = &["/etc/ceph", "/var/lib/ceph", "/dev/urandom", "/dev/random"];

/// Options of `rbd`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RbdOptions {
    /// `pool`.
    pub pool: String,
    /// `namespace`: empty for the pool's default one.
    pub namespace: String,
    /// `image`.
    pub image: String,
    /// `conf`: the configuration file. `None`: where Ceph looks for one.
    pub conf: Option<PathBuf>,
    /// `snapshot`.
    pub snapshot: Option<String>,
    /// `user`, without `client.`. `None`: `admin`.
    pub user: Option<String>,
    /// `key-secret`: the `id` of the secret with the user's key. `None`: the user's keyring has it.
    pub key_secret: Option<String>,
    /// `encrypt`. `None`: requests have what the image has.
    pub encrypt: Option<EncryptOptions>,
    /// `auth-client-required`: how the client lets the cluster prove itself. Empty: as configured.
    pub auth_client_required: Vec<AuthMode>,
    /// `server`: monitors, host and port. Empty: as configured.
    pub server: Vec<(String, u16)>,
}

/// Reads the options of an image that is not a node, such as `location` of `blockdev-create`.
///
/// # Errors
///
/// An option is unknown, missing or wrong; in QSD's words.
pub(super) fn read_rbd(value: Value, at: &Context) -> Result<RbdOptions, OptionError> {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let mut options = RbdOptions::default();
    table::read(FIELDS, &mut options, &mut object, at)?;
    table::refuse_rest(&object, at, "driver 'rbd'", table::names(FIELDS))?;
    Ok(options)
}

/// Returns what [`read_rbd`] reads.
#[must_use]
pub(super) fn rbd_members() -> Vec<Member> {
    table::members(FIELDS)
}

/// One of `auth-client-required`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthMode {
    /// `cephx`.
    Cephx,
    /// `none`.
    None,
}

impl AuthMode {
    const ALL: [AuthMode; 2] = [AuthMode::Cephx, AuthMode::None];

    /// Returns the word, which is also Ceph's.
    pub(super) fn word(self) -> &'static str {
        match self {
            AuthMode::Cephx => "cephx",
            AuthMode::None => "none",
        }
    }

    fn help(self) -> &'static str {
        match self {
            AuthMode::Cephx => "Ceph's protocol, by keys",
            AuthMode::None => "no authentication",
        }
    }
}

const fn text(
    name: &'static str,
    place: &'static dyn Place<RbdOptions>,
    need: Need,
    help: &'static str,
) -> Field<RbdOptions> {
    Field { name, kind: Kind::At(place), need, help }
}

pub(super) static FIELDS: &[Field<RbdOptions>] = &[
    text(
        "pool",
        &Text("<pool>", |node: &mut RbdOptions| &mut node.pool),
        Need::Required,
        "pool that the image is in",
    ),
    text(
        "namespace",
        &Text("<namespace>", |node: &mut RbdOptions| &mut node.namespace),
        Need::Default(""),
        "namespace of the pool",
    ),
    text(
        "image",
        &Text("<image>", |node: &mut RbdOptions| &mut node.image),
        Need::Required,
        "name of the image",
    ),
    Field {
        name: "conf",
        kind: Kind::At(&Of(|node: &mut RbdOptions| &mut node.conf)),
        need: Need::Optional("CEPH_CONF, else /etc/ceph/ceph.conf, else ~/.ceph/ceph.conf"),
        help: "Ceph's configuration file",
    },
    text(
        "snapshot",
        &Text("<snapshot>", |node: &mut RbdOptions| &mut node.snapshot),
        Need::Optional("the image as it is now"),
        "snapshot of the image, for reading",
    ),
    Field {
        name: "encrypt",
        kind: Kind::At(&Custom {
            shape: || Shape::Object(encrypt_members()),
            read: |node: &mut RbdOptions, value, at| {
                put(&mut node.encrypt, Some(read_encrypt(value, at)?))
            },
            write: |node| node.encrypt.as_ref().map(EncryptOptions::write),
        }),
        need: Need::Optional("the image is not encrypted"),
        help: "",
    },
    text(
        "user",
        &Text("<user>", |node: &mut RbdOptions| &mut node.user),
        Need::Optional("admin"),
        "user of the cluster, without client.",
    ),
    Field {
        name: "auth-client-required",
        kind: Kind::At(&Custom { shape: auth_shape, read: auth, write: write_auth }),
        need: Need::Optional("as configured"),
        help: "",
    },
    text(
        "key-secret",
        &Text("<id>", |node: &mut RbdOptions| &mut node.key_secret),
        Need::Optional("the user's keyring has the key"),
        "the secret object with the user's key, which is base64",
    ),
    Field {
        name: "server",
        kind: Kind::At(&Custom { shape: server_shape, read: servers, write: write_servers }),
        need: Need::Optional("as configured"),
        help: "",
    },
];

static SERVER: &[Field<InetDraft>] =
    &[InetDraft::host("name or address of the monitor"), InetDraft::PORT];

fn server_shape() -> Shape {
    let server = Shape::Object(table::members(SERVER));
    Shape::List(Box::new(server), "monitor number <n>, from 0")
}

fn servers(node: &mut RbdOptions, value: Value, at: &Context) -> table::Set {
    let servers = table::read_list(SERVER, value, at, InetDraft::default)?;
    let port = |server: InetDraft| server.port().map(|port| (server.host, port));
    let servers: Result<_, OptionError> = servers.into_iter().map(port).collect();
    put(&mut node.server, servers?)
}

fn write_servers(node: &mut RbdOptions) -> Option<Value> {
    let of = |(host, port): &(String, u16)| InetDraft::of(host.clone(), *port, true, true);
    (!node.server.is_empty()).then(|| write_list(SERVER, node.server.iter().map(of)))
}

fn auth_shape() -> Shape {
    let words = AuthMode::ALL.map(|mode| Word { name: mode.word(), help: mode.help() });
    Shape::List(Box::new(Shape::Words(words.to_vec())), "accepted mode number <n>, from 0")
}

fn write_auth(node: &mut RbdOptions) -> Option<Value> {
    let modes = node.auth_client_required.iter().map(|mode| mode.word().into());
    (!node.auth_client_required.is_empty()).then(|| Value::List(modes.collect()))
}

fn auth(node: &mut RbdOptions, value: Value, at: &Context) -> table::Set {
    let Value::List(modes) = value else { return Err(table::wrong_type(at.whole(), "array")) };
    let mode = |value| {
        let word = table::text(value, at.whole(), at)?;
        let mode = AuthMode::ALL.into_iter().find(|mode| mode.word() == word);
        let known = AuthMode::ALL.into_iter().map(AuthMode::word);
        mode.ok_or_else(|| table::not_accepted(at.whole(), at, &word, known))
    };
    let modes: Result<_, _> = modes.into_iter().map(mode).collect();
    put(&mut node.auth_client_required, modes?)
}
