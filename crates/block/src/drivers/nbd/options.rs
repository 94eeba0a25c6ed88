//! `nbd`: an export of an NBD server.

use std::fmt;
use std::path::PathBuf;

use crate::driver::{DriverKind, OptionTable};
use crate::options::Draft;
use ::options::FdName;
use ::options::address::{InetDraft, addresses, check_socket_path};
use ::options::place::{Checked, Custom, Of, Place, Text, write_tagged};
use ::options::shape::Shape;
use ::options::table::{self, Context, Field, Kind, Need, not_yet, only_off, put};
use ::options::{OptionError, Value};

/// Longest name of an export, bytes: the protocol's limit.
const MAX_NAME: usize = 4096;

pub(in crate::drivers) static NBD: DriverKind = DriverKind {
    name: "nbd",
    help: "an export of an NBD server",
    example: "nbd,node-name=n,server.type=unix,server.path=nbd.sock,export=disk",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: None,
    amend: None,
    library: None,
};

/// Options of `nbd`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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
    /// `server.type=fd`: a connected socket that the process inherited.
    Fd {
        /// `server.str`.
        fd: FdName,
    },
}

/// No server. A draft has it until its required row is read.
impl Default for NbdServerAddr {
    fn default() -> Self {
        NbdServerAddr::Unix { path: PathBuf::new() }
    }
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
            NbdServerAddr::Fd { fd } => write!(f, "file descriptor {fd}"),
        }
    }
}

type Node = Draft<NbdOptions>;

pub(super) static FIELDS: &[Field<Node>] = &[
    Field {
        name: "server",
        kind: Kind::At(&Custom {
            shape: server_shape,
            read: server,
            write: |node: &mut Node| Some(write_server(&node.server)),
        }),
        need: Need::Required,
        help: "where the server listens",
    },
    Field {
        name: "export",
        kind: Kind::At(&Checked {
            meta: "<name>",
            check: |name: &String| match name.contains('\0') {
                _ if name.len() > MAX_NAME => {
                    Err(OptionError::new("export name too long to send to server"))
                }
                true => Err(OptionError::new("Parameter 'export' contains a NUL byte")),
                false => Ok(()),
            },
            at: |node: &mut Node| &mut node.export,
        }),
        need: Need::Default(""),
        help: "name of the server's export",
    },
    Field {
        name: "tls-creds",
        kind: Kind::At(&Text("<id>", |node: &mut Node| &mut node.tls_creds)),
        need: Need::Optional("no TLS"),
        help: "credentials of TLS, an object with endpoint=client",
    },
    Field {
        name: "tls-hostname",
        kind: Kind::At(&Text("<name>", |node: &mut Node| &mut node.tls_hostname)),
        need: Need::Optional("server.host, or no check of the name for unix sockets"),
        help: "name that the server's certificate must have",
    },
    Field::unoffered("x-dirty-bitmap", |node, value, name, at| {
        not_yet(node, value, name, at)
            .map_err(|error| error.hint("Block status is always that of base:allocation."))
    }),
    Field {
        name: "reconnect-delay",
        kind: Kind::At(&Of(|node: &mut Node| &mut node.reconnect_delay)),
        need: Need::Default("0"),
        help: "seconds that requests wait for the server to come back; then, and with 0 at once, \
               they fail until it is",
    },
    Field {
        name: "open-timeout",
        kind: Kind::At(&Of(|node: &mut Node| &mut node.open_timeout)),
        need: Need::Default("0"),
        help: "seconds that connecting is tried when the node is opened; 0 for once",
    },
];

/// `server.*` of type `unix` while it is read.
#[derive(Default)]
struct UnixDraft {
    path: PathBuf,
    is_abstract: Option<bool>,
    tight: Option<bool>,
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
        kind: Kind::At(&Checked {
            meta: "",
            check: |path: &PathBuf| check_socket_path("server.path", path),
            at: |server: &mut UnixDraft| &mut server.path,
        }),
        need: Need::Required,
        help: "path of the server's socket",
    },
    Field {
        name: "abstract",
        kind: Kind::At(&Of(|server: &mut UnixDraft| &mut server.is_abstract)),
        need: Need::Default("off"),
        help: "whether the path is the name of an abstract socket",
    },
    Field {
        name: "tight",
        kind: Kind::At(&Of(|server: &mut UnixDraft| &mut server.tight)),
        need: Need::Default("on"),
        help: "whether an abstract address ends with the name; off fills it up with zero bytes",
    },
];

static VSOCK: &[Field<VsockDraft>] = &[
    Field {
        name: "cid",
        kind: Kind::At(&VsockNumber("<cid>", |server: &mut VsockDraft| &mut server.cid)),
        need: Need::Required,
        help: "number of the server's guest; 2 is the host, 1 this machine",
    },
    Field {
        name: "port",
        kind: Kind::At(&VsockNumber("<port>", |server: &mut VsockDraft| &mut server.port)),
        need: Need::Required,
        help: "port of vsock",
    },
];

/// The place of a number that is written as text.
struct VsockNumber(&'static str, fn(&mut VsockDraft) -> &mut u32);

impl Place<VsockDraft> for VsockNumber {
    fn shape(&self) -> Shape {
        Shape::Text(self.0)
    }

    fn read(&self, into: &mut VsockDraft, value: Value, name: &str, at: &Context) -> table::Set {
        let text = table::text(value, &at.full(name), at)?;
        let number = text.parse().map_err(|_| {
            OptionError::new(format!("Failed to parse {name} '{text}'"))
                .hint("The number is decimal, from 0 to 4294967295.")
        })?;
        put((self.1)(into), number)
    }

    fn write(&self, from: &mut VsockDraft) -> Option<Value> {
        Some((self.1)(from).to_string().into())
    }
}

static INET: &[Field<InetDraft>] = &[
    InetDraft::host("name or address of the server"),
    InetDraft::PORT,
    InetDraft::IPV4,
    InetDraft::IPV6,
    Field::unoffered("keep-alive", only_off),
];

/// `server.*` of type `fd` while it is read.
#[derive(Default)]
struct FdDraft {
    fd: Option<FdName>,
}

static FD: &[Field<FdDraft>] = &[Field {
    name: "str",
    kind: Kind::At(&Fd),
    need: Need::Required,
    help: "number of an inherited socket that is connected to the server, or its name in LISTEN_FDNAMES",
}];

/// The place of an inherited socket's number or name.
struct Fd;

impl Place<FdDraft> for Fd {
    fn shape(&self) -> Shape {
        Shape::Text("<fd>")
    }

    fn read(&self, into: &mut FdDraft, value: Value, name: &str, at: &Context) -> table::Set {
        let text = table::text(value, &at.full(name), at)?;
        put(&mut into.fd, Some(FdName::read(&text)?))
    }

    fn write(&self, from: &mut FdDraft) -> Option<Value> {
        Some(from.fd.as_ref()?.to_string().into())
    }
}

const TYPES: [&str; 4] = ["inet", "unix", "vsock", "fd"];

fn server_shape() -> Shape {
    let inet = ("inet", "TCP", table::members(INET));
    let unix = ("unix", "a unix socket", table::members(UNIX));
    let vsock = ("vsock", "a host or guest of this machine", table::members(VSOCK));
    let fd = ("fd", "a connected socket that was inherited", table::members(FD));
    addresses("kind of address", [inet, unix, vsock, fd])
}

fn server(node: &mut Node, value: Value, at: &Context) -> table::Set {
    let (kind, object) = table::take_type(value, at, &TYPES)?;
    node.server = match kind.as_str() {
        "inet" => {
            let draft: InetDraft = table::read_typed(INET, object, at, &kind)?;
            let (port, (ipv4, ipv6)) = (draft.port()?, draft.families()?);
            NbdServerAddr::Inet { host: draft.host, port, ipv4, ipv6 }
        }
        "unix" => {
            let draft: UnixDraft = table::read_typed(UNIX, object, at, &kind)?;
            let UnixDraft { path, is_abstract, tight } = draft;
            match is_abstract {
                Some(true) => NbdServerAddr::Abstract { name: path, tight: tight.unwrap_or(true) },
                Some(false) | None => NbdServerAddr::Unix { path },
            }
        }
        "vsock" => {
            let VsockDraft { cid, port } = table::read_typed(VSOCK, object, at, &kind)?;
            NbdServerAddr::Vsock { cid, port }
        }
        "fd" => {
            let draft: FdDraft = table::read_typed(FD, object, at, &kind)?;
            let fd = draft.fd.ok_or_else(|| table::missing(&at.full("str")))?;
            NbdServerAddr::Fd { fd }
        }
        _ => return Err(table::not_accepted("type", at, &kind, TYPES.into_iter())),
    };
    Ok(())
}

/// Returns the `server` that [`server`] reads so.
pub(super) fn write_server(server: &NbdServerAddr) -> Value {
    match server.clone() {
        NbdServerAddr::Unix { path } => {
            write_tagged("type", "unix", UNIX, UnixDraft { path, ..UnixDraft::default() })
        }
        NbdServerAddr::Abstract { name, tight } => {
            let (is_abstract, tight) = (Some(true), Some(tight));
            write_tagged("type", "unix", UNIX, UnixDraft { path: name, is_abstract, tight })
        }
        NbdServerAddr::Vsock { cid, port } => {
            write_tagged("type", "vsock", VSOCK, VsockDraft { cid, port })
        }
        NbdServerAddr::Inet { host, port, ipv4, ipv6 } => {
            write_tagged("type", "inet", INET, InetDraft::of(host, port, ipv4, ipv6))
        }
        NbdServerAddr::Fd { fd } => write_tagged("type", "fd", FD, FdDraft { fd: Some(fd) }),
    }
}
