//! `rbd`: an image of a Ceph cluster.

use std::path::PathBuf;

use ::options::address::InetDraft;
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
    library: Some(&ForeignLibrary { load: load_library, reads: &["/etc/ceph", "/var/lib/ceph"] }),
};

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
    pub server: Vec<(String, String)>,
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
    meta: &'static str,
    set: fn(&mut RbdOptions, String) -> table::Set,
    need: Need,
    help: &'static str,
) -> Field<RbdOptions> {
    Field { name, kind: Kind::Text { meta, set }, need, help }
}

static FIELDS: &[Field<RbdOptions>] = &[
    text(
        "pool",
        "<pool>",
        |node, pool| put(&mut node.pool, pool),
        Need::Required,
        "pool that the image is in",
    ),
    text(
        "namespace",
        "<namespace>",
        |node, namespace| put(&mut node.namespace, namespace),
        Need::Default(""),
        "namespace of the pool",
    ),
    text(
        "image",
        "<image>",
        |node, image| put(&mut node.image, image),
        Need::Required,
        "name of the image",
    ),
    Field {
        name: "conf",
        kind: Kind::Path(|node, path| put(&mut node.conf, Some(path))),
        need: Need::Optional("CEPH_CONF, /etc/ceph/ceph.conf or ~/.ceph/config"),
        help: "Ceph's configuration file",
    },
    text(
        "snapshot",
        "<snapshot>",
        |node, snapshot| put(&mut node.snapshot, Some(snapshot)),
        Need::Optional("the image as it is now"),
        "snapshot of the image, for reading",
    ),
    Field {
        name: "encrypt",
        kind: Kind::Nested {
            shape: || Shape::Object(encrypt_members()),
            read: |node, value, at| put(&mut node.encrypt, Some(read_encrypt(value, at)?)),
        },
        need: Need::Optional("the image is not encrypted"),
        help: "",
    },
    text(
        "user",
        "<user>",
        |node, user| put(&mut node.user, Some(user)),
        Need::Optional("admin"),
        "user of the cluster, without client.",
    ),
    Field {
        name: "auth-client-required",
        kind: Kind::Nested { shape: auth_shape, read: auth },
        need: Need::Optional("as configured"),
        help: "",
    },
    text(
        "key-secret",
        "<id>",
        |node, id| put(&mut node.key_secret, Some(id)),
        Need::Optional("the user's keyring has the key"),
        "the secret object with the user's key, which is base64",
    ),
    Field {
        name: "server",
        kind: Kind::Nested { shape: server_shape, read: servers },
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
    let host_and_port = |server: InetDraft| Ok((server.port()?, server.host));
    let servers = servers.into_iter().map(host_and_port);
    let servers: Result<Vec<(u16, String)>, OptionError> = servers.collect();
    let servers = servers?.into_iter().map(|(port, host)| (host, port.to_string()));
    put(&mut node.server, servers.collect())
}

fn auth_shape() -> Shape {
    let words = AuthMode::ALL.map(|mode| Word { name: mode.word(), help: mode.help() });
    Shape::List(Box::new(Shape::Words(words.to_vec())), "accepted mode number <n>, from 0")
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
