//! `nbd`: an export of an NBD server.

use std::fmt;
use std::path::PathBuf;

use crate::driver::{DriverKind, OptionTable};
use ::options::address::{InetDraft, addresses, check_socket_path};
use ::options::shape::Shape;
use ::options::table::{self, Context, Field, Kind, Need, not_yet, only_off, put};
use ::options::{OptionError, Value};

/// Longest name of an export, bytes: the protocol's limit.
const MAX_NAME: usize = 4096;

pub(in crate::drivers) static NBD: DriverKind = DriverKind {
    name: "nbd",
    help: "an export of an NBD server",
    example: "nbd,node-name=n,server.type=unix,server.path=nbd.sock,export=disk",
    options: &OptionTable {
        fields: FIELDS,
        start: |_| Draft::default(),
        build: |draft| {
            let Draft { server, export, tls_creds, tls_hostname, reconnect_delay, open_timeout } =
                draft;
            let server = server.ok_or_else(|| table::missing("server"))?;
            let options = NbdOptions {
                server,
                export,
                tls_creds,
                tls_hostname,
                reconnect_delay,
                open_timeout,
            };
            Ok(options.into())
        },
    },
    create: None,
    library: None,
};

/// Options of `nbd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdOptions {
    /// `server`.
    pub server: NbdServerAddr,
    /// `export`: its name, at most 4096 bytes; the default export's is empty.
    pub export: String,
    /// `tls-creds`: the object with the credentials of TLS. `None`: without TLS.
    pub tls_creds: Option<String>,
    /// `tls-hostname`: the name in the server's certificate. `None`: that of `server.host`.
    pub tls_hostname: Option<String>,
    /// `reconnect-delay`, seconds: how long requests wait for the server to come back once the
    /// connection is lost. 0: they fail at once.
    pub reconnect_delay: u32,
    /// `open-timeout`, seconds: how long connecting is tried when the node is opened. 0: once.
    pub open_timeout: u32,
}

/// `server` of `nbd`: where the server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdServerAddr {
    /// `server.type=unix`.
    Unix {
        /// `server.path`: 1 to 107 bytes.
        path: PathBuf,
    },
    /// `server.type=unix` with `server.abstract=on`.
    Abstract {
        /// `server.path`: the name without the leading zero byte, 1 to 107 bytes.
        name: PathBuf,
        /// `server.tight`: whether the address ends with the name, or zero bytes fill it up.
        tight: bool,
    },
    /// `server.type=vsock`.
    Vsock {
        /// `server.cid`: the address of the guest or host.
        cid: u32,
        /// `server.port`.
        port: u32,
    },
    /// `server.type=inet`: TCP.
    Inet {
        /// `server.host`: a name or an address.
        host: String,
        /// `server.port`.
        port: u16,
        /// `server.ipv4`: whether IPv4 addresses are used.
        ipv4: bool,
        /// `server.ipv6`: whether IPv6 addresses are used.
        ipv6: bool,
    },
}

impl fmt::Display for NbdServerAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdServerAddr::Unix { path: name } | NbdServerAddr::Abstract { name, .. } => {
                write!(f, "{}", name.display())
            }
            NbdServerAddr::Vsock { cid, port } => write!(f, "{cid}:{port}"),
            NbdServerAddr::Inet { host, port, .. } if host.contains(':') => {
                write!(f, "[{host}]:{port}")
            }
            NbdServerAddr::Inet { host, port, .. } => write!(f, "{host}:{port}"),
        }
    }
}

/// What was given.
#[derive(Default)]
struct Draft {
    server: Option<NbdServerAddr>,
    export: String,
    tls_creds: Option<String>,
    tls_hostname: Option<String>,
    reconnect_delay: u32,
    open_timeout: u32,
}

static FIELDS: &[Field<Draft>] = &[
    Field {
        name: "server",
        kind: Kind::Nested { shape: server_shape, read: server },
        need: Need::Required,
        help: "where the server listens",
    },
    Field {
        name: "export",
        kind: Kind::Text {
            meta: "<name>",
            set: |node, name| {
                if name.len() > MAX_NAME {
                    return Err(OptionError::new("export name too long to send to server"));
                }
                if name.contains('\0') {
                    return Err(OptionError::new("Parameter 'export' contains a NUL byte"));
                }
                put(&mut node.export, name)
            },
        },
        need: Need::Default(""),
        help: "name of the server's export",
    },
    Field {
        name: "tls-creds",
        kind: Kind::Text { meta: "<id>", set: |node, id| put(&mut node.tls_creds, Some(id)) },
        need: Need::Optional("no TLS"),
        help: "credentials of TLS, an object with endpoint=client",
    },
    Field {
        name: "tls-hostname",
        kind: Kind::Text {
            meta: "<name>",
            set: |node, name| put(&mut node.tls_hostname, Some(name)),
        },
        need: Need::Optional("server.host, or no check of the name for unix sockets"),
        help: "name that the server's certificate must have",
    },
    Field::unoffered("x-dirty-bitmap", |node, value, name, at| {
        not_yet(node, value, name, at)
            .map_err(|error| error.hint("Block status is always that of base:allocation."))
    }),
    Field {
        name: "reconnect-delay",
        kind: Kind::Int {
            range: i64::MIN..=i64::MAX,
            set: |node, seconds| {
                put(&mut node.reconnect_delay, table::uint32("reconnect-delay", seconds)?)
            },
        },
        need: Need::Default("0"),
        help: "seconds that requests wait for the server to come back; then, and with 0 at once, \
               they fail until it is",
    },
    Field {
        name: "open-timeout",
        kind: Kind::Int {
            range: i64::MIN..=i64::MAX,
            set: |node, seconds| {
                put(&mut node.open_timeout, table::uint32("open-timeout", seconds)?)
            },
        },
        need: Need::Default("0"),
        help: "seconds that connecting is tried when the node is opened; 0 for once",
    },
];

/// `server.*` of type `unix` while it is read.
struct UnixDraft {
    path: PathBuf,
    is_abstract: bool,
    tight: bool,
}

impl Default for UnixDraft {
    fn default() -> Self {
        UnixDraft { path: PathBuf::new(), is_abstract: false, tight: true }
    }
}

/// `server.*` of type `vsock` while it is read.
#[derive(Default)]
struct VsockDraft {
    cid: u32,
    port: u32,
}

static UNIX: &[Field<UnixDraft>] = &[
    Field {
        name: "path",
        kind: Kind::Path(|server, path| {
            check_socket_path("server.path", &path)?;
            put(&mut server.path, path)
        }),
        need: Need::Required,
        help: "path of the server's socket",
    },
    Field {
        name: "abstract",
        kind: Kind::Bool(|server, on| put(&mut server.is_abstract, on)),
        need: Need::Default("off"),
        help: "whether the path is the name of an abstract socket",
    },
    Field {
        name: "tight",
        kind: Kind::Bool(|server, on| put(&mut server.tight, on)),
        need: Need::Default("on"),
        help: "whether an abstract address ends with the name; off fills it up with zero bytes",
    },
];

static VSOCK: &[Field<VsockDraft>] = &[
    Field {
        name: "cid",
        kind: Kind::Text {
            meta: "<cid>",
            set: |server, text| put(&mut server.cid, vsock_number("cid", &text)?),
        },
        need: Need::Required,
        help: "number of the server's guest; 2 is the host, 1 this machine",
    },
    Field {
        name: "port",
        kind: Kind::Text {
            meta: "<port>",
            set: |server, text| put(&mut server.port, vsock_number("port", &text)?),
        },
        need: Need::Required,
        help: "port of vsock",
    },
];

fn vsock_number(what: &str, text: &str) -> Result<u32, OptionError> {
    text.parse().map_err(|_| {
        OptionError::new(format!("Failed to parse {what} '{text}'"))
            .hint("The number is decimal, from 0 to 4294967295.")
    })
}

static INET: &[Field<InetDraft>] = &[
    InetDraft::host("name or address of the server"),
    InetDraft::PORT,
    InetDraft::IPV4,
    InetDraft::IPV6,
    Field::unoffered("keep-alive", only_off),
];

const TYPES: [&str; 3] = ["inet", "unix", "vsock"];

fn server_shape() -> Shape {
    let inet = ("inet", "TCP", table::members(INET));
    let unix = ("unix", "a unix socket", table::members(UNIX));
    let vsock = ("vsock", "a host or guest of this machine", table::members(VSOCK));
    addresses("kind of address", [inet, unix, vsock])
}

fn server(node: &mut Draft, value: Value, at: &Context) -> table::Set {
    let (kind, object) = table::take_type(value, at, &TYPES)?;
    node.server = Some(match kind.as_str() {
        "inet" => {
            let draft: InetDraft = table::read_typed(INET, object, at, &kind)?;
            let (port, (ipv4, ipv6)) = (draft.port()?, draft.families()?);
            NbdServerAddr::Inet { host: draft.host, port, ipv4, ipv6 }
        }
        "unix" => {
            let draft: UnixDraft = table::read_typed(UNIX, object, at, &kind)?;
            let UnixDraft { path, is_abstract, tight } = draft;
            match is_abstract {
                true => NbdServerAddr::Abstract { name: path, tight },
                false => NbdServerAddr::Unix { path },
            }
        }
        "vsock" => {
            let VsockDraft { cid, port } = table::read_typed(VSOCK, object, at, &kind)?;
            NbdServerAddr::Vsock { cid, port }
        }
        "fd" => {
            return Err(OptionError::not_yet("Parameter 'server.type' with value 'fd'"));
        }
        _ => return Err(table::not_accepted("type", at, &kind, TYPES.into_iter())),
    });
    Ok(())
}
