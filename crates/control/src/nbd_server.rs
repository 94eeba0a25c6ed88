//! `--nbd-server`: where NBD clients connect.

use std::path::PathBuf;

use serde_json::json;

use crate::address::{FD_ADDR, InetDraft, SocketDraft, addresses, check_socket_path};
use crate::error::OptionError;
use crate::fd::FdName;
use crate::shape::{Member, Shape};
use crate::storage_daemon::{Action, Step};
use crate::table::{self, Context, Field, Need, Row, only_off, put};
use crate::value::{Object, Value};

/// One `--nbd-server`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdServerOptions {
    /// `addr`.
    pub addr: NbdAddr,
    /// `max-connections` at the same time; 0: any number.
    pub max_connections: u32,
    /// `handshake-max-seconds`: time for the negotiation; 0: any time.
    pub handshake_max_seconds: u32,
    /// `tls-creds`: clients are served with TLS only, by these credentials.
    pub tls_creds: Option<String>,
    /// `tls-authz`: of those with a good certificate, this object lets in.
    pub tls_authz: Option<String>,
}

/// `addr`: where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdAddr {
    /// `addr.type=unix`: a socket is created at `addr.path`.
    Unix {
        /// The path, 1 to 107 bytes.
        path: PathBuf,
    },
    /// `addr.type=unix` with `addr.abstract=on`.
    Abstract {
        /// `addr.path`: the name without the leading zero byte, 1 to 107 bytes.
        name: PathBuf,
        /// `addr.tight`: whether the address ends with the name, or zero bytes fill it up.
        tight: bool,
    },
    /// `addr.type=vsock`.
    Vsock {
        /// `addr.cid`: the address of this machine; 4294967295 for any.
        cid: u32,
        /// `addr.port`.
        port: u32,
    },
    /// `addr.type=inet`: TCP.
    Inet {
        /// `host`: a name or an address; empty: all of this machine.
        host: String,
        /// `port`.
        port: u16,
        /// `to`: ports up to this one are tried; by default `port` alone.
        to: u16,
        /// `ipv4`: whether IPv4 addresses are used.
        ipv4: bool,
        /// `ipv6`: whether IPv6 addresses are used.
        ipv6: bool,
    },
    /// `addr.type=fd`: a listening socket that was inherited.
    Fd {
        /// Its descriptor.
        fd: FdName,
    },
}

impl Default for NbdServerOptions {
    fn default() -> Self {
        let addr = NbdAddr::Unix { path: PathBuf::new() };
        NbdServerOptions {
            addr,
            max_connections: 100,
            handshake_max_seconds: 10,
            tls_creds: None,
            tls_authz: None,
        }
    }
}

/// For `nbd-server-start`, whose arguments are not those of the option.
impl From<NbdServerOptions> for Step {
    fn from(options: NbdServerOptions) -> Self {
        let addr = match &options.addr {
            NbdAddr::Unix { path } => json!({"type": "unix", "path": path}),
            NbdAddr::Abstract { name, tight } => {
                json!({"type": "unix", "path": name, "abstract": true, "tight": tight})
            }
            NbdAddr::Vsock { cid, port } => {
                json!({"type": "vsock", "cid": cid.to_string(), "port": port.to_string()})
            }
            NbdAddr::Inet { host, port, to, ipv4, ipv6 } => json!({
                "type": "inet", "host": host, "port": port.to_string(), "to": to,
                "ipv4": ipv4, "ipv6": ipv6,
            }),
            NbdAddr::Fd { fd } => json!({"type": "fd", "str": fd.to_string()}),
        };
        let mut server = json!({
            "addr": addr,
            "max-connections": options.max_connections,
            "handshake-max-seconds": options.handshake_max_seconds,
        });
        for (name, id) in [("tls-creds", &options.tls_creds), ("tls-authz", &options.tls_authz)] {
            if let Some(id) = id {
                server[name] = id.as_str().into();
            }
        }
        Step { origin: format!("--nbd-server {server}"), action: Action::NbdServer(options) }
    }
}

static FIELDS: &[Field<NbdServerOptions>] = &[
    Row::required("addr", "where clients connect").nested(addr_shape, addr),
    HANDSHAKE_MAX_SECONDS,
    MAX_CONNECTIONS,
    TLS_CREDS,
    TLS_AUTHZ,
];

/// The arguments of `nbd-server-start`.
///
/// Its address has another structure than the option's.
pub static NBD_SERVER_START: &[Field<NbdServerOptions>] = &[
    Row::required("addr", "where clients connect").nested(legacy_addr_shape, legacy_addr),
    HANDSHAKE_MAX_SECONDS,
    MAX_CONNECTIONS,
    TLS_CREDS,
    TLS_AUTHZ,
];

const HANDSHAKE_MAX_SECONDS: Field<NbdServerOptions> = Row::default(
    "handshake-max-seconds",
    "10",
    "send away clients that have not chosen an export by then; 0 for never",
)
.int(i64::MIN..=i64::MAX, |server, seconds| {
    server.handshake_max_seconds = table::uint32("handshake-max-seconds", seconds)?;
    Ok(())
});

const MAX_CONNECTIONS: Field<NbdServerOptions> = Row::default(
    "max-connections",
    "100",
    "connections at the same time, further ones wait; 0 for any number",
)
.int(i64::MIN..=i64::MAX, |server, connections| {
    server.max_connections = table::uint32("max-connections", connections)?;
    Ok(())
});

const TLS_CREDS: Field<NbdServerOptions> =
    Row::optional("tls-creds", "no TLS", "serve clients with TLS only, by these credentials")
        .text("<id>", |server, id| put(&mut server.tls_creds, Some(id)));

const TLS_AUTHZ: Field<NbdServerOptions> = Row::optional(
    "tls-authz",
    "all with a certificate of the CA",
    "object that says which clients are let in",
)
.text("<id>", |server, id| put(&mut server.tls_authz, Some(id)));

static INET: &[Field<InetDraft>] = &[
    InetDraft::host("name or address to listen on"),
    InetDraft::PORT,
    Row::optional("to", "port alone", "last port to try when those before are taken").int(
        i64::MIN..=i64::MAX,
        |addr, to| match u16::try_from(to) {
            Ok(to) => {
                addr.to = Some(to);
                Ok(())
            }
            Err(_) => Err(OptionError::new("Parameter 'to' expects uint16_t")),
        },
    ),
    InetDraft::IPV4,
    InetDraft::IPV6,
    Field::unoffered("numeric", only_off),
    Field::unoffered("keep-alive", only_off),
];

/// `addr.*` of type `unix` while it is read.
#[derive(Default)]
struct UnixDraft {
    path: PathBuf,
    is_abstract: bool,
    tight: Option<bool>,
}

static UNIX: &[Field<UnixDraft>] = &[
    Row::required("path", "path of the socket to create and listen on").path(|addr, path| {
        check_socket_path("addr.path", &path)?;
        put(&mut addr.path, path)
    }),
    Row::default("abstract", "off", "whether the path is the name of an abstract socket")
        .bool(|addr, on| put(&mut addr.is_abstract, on)),
    Row::default(
        "tight",
        "on",
        "whether an abstract address ends with the name; off fills it up with zero bytes",
    )
    .bool(|addr, on| put(&mut addr.tight, Some(on))),
];

/// `addr.*` of type `vsock` while it is read.
#[derive(Default)]
struct VsockDraft {
    cid: u32,
    port: u32,
}

static VSOCK: &[Field<VsockDraft>] = &[
    Row::required("cid", "number of this machine; 4294967295 for any")
        .text("<cid>", |addr, text| put(&mut addr.cid, vsock_number("cid", &text)?)),
    Row::required("port", "port of vsock")
        .text("<port>", |addr, text| put(&mut addr.port, vsock_number("port", &text)?)),
];

fn vsock_number(name: &str, text: &str) -> Result<u32, OptionError> {
    text.parse().map_err(|_| {
        OptionError::new(format!("Failed to parse {name} '{text}'"))
            .hint("The number is decimal, from 0 to 4294967295.")
    })
}

const TYPES: [&str; 4] = ["inet", "unix", "vsock", "fd"];

fn addr_shape() -> Shape {
    let inet = ("inet", "TCP", table::members(INET));
    let unix = ("unix", "a unix socket", table::members(UNIX));
    let vsock = ("vsock", "guests, or the host, of this machine", table::members(VSOCK));
    let fd = ("fd", "a socket that was inherited", table::members(FD_ADDR));
    addresses("kind of address that clients connect to", [inet, unix, vsock, fd])
}

fn addr(server: &mut NbdServerOptions, value: Value, at: &Context) -> table::Set {
    let (kind, object) = table::take_type(value, at, &TYPES)?;
    server.addr = match kind.as_str() {
        "inet" => {
            let draft: InetDraft = table::read_typed(INET, object, at, &kind)?;
            let (port, (ipv4, ipv6)) = (draft.port()?, draft.families()?);
            NbdAddr::Inet { host: draft.host, port, to: draft.to.unwrap_or(port), ipv4, ipv6 }
        }
        "unix" => {
            let UnixDraft { path, is_abstract, tight } =
                table::read_typed(UNIX, object, at, &kind)?;
            match is_abstract {
                true => NbdAddr::Abstract { name: path, tight: tight.unwrap_or(true) },
                false => NbdAddr::Unix { path },
            }
        }
        "vsock" => {
            let VsockDraft { cid, port } = table::read_typed(VSOCK, object, at, &kind)?;
            NbdAddr::Vsock { cid, port }
        }
        "fd" => {
            let draft: SocketDraft = table::read_typed(FD_ADDR, object, at, &kind)?;
            NbdAddr::Fd { fd: draft.fd }
        }
        _ => return Err(table::not_accepted("type", at, &kind, TYPES.into_iter())),
    };
    Ok(())
}

/// With what depends on the type in a member `data`.
fn legacy_addr_shape() -> Shape {
    let Shape::Union(mut union) = addr_shape() else { return Shape::Any };
    for variant in &mut union.variants {
        let members = std::mem::take(&mut variant.members);
        let help = "what depends on the type";
        let shape = Shape::Object(members);
        variant.members.push(Member { name: "data", shape, need: Need::Required, help });
    }
    Shape::Union(union)
}

fn legacy_addr(server: &mut NbdServerOptions, value: Value, at: &Context) -> table::Set {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let kind = match table::take(&mut object, "type") {
        Some(kind) => table::text(kind, &at.full("type"), at)?,
        None => return Err(table::missing(&at.full("type"))),
    };
    if !TYPES.contains(&kind.as_str()) {
        return Err(table::not_accepted("type", at, &kind, TYPES.into_iter()));
    }
    let data = table::take(&mut object, "data").ok_or_else(|| table::missing(&at.full("data")))?;
    table::refuse_rest(&object, at, &format!("'{}'", at.whole()), ["type", "data"].into_iter())?;
    let Value::Object(mut data) = data else {
        return Err(table::wrong_type(&at.full("data"), "object"));
    };
    data.push(("type".into(), Value::Text(kind)));
    addr(server, Value::Object(data), &at.below("data"))
}

/// What the option may have.
pub(crate) fn members() -> Vec<Member> {
    table::members(FIELDS)
}

/// Reads one `--nbd-server`.
pub(crate) fn read(mut object: Object, at: &Context) -> Result<NbdServerOptions, OptionError> {
    let mut server = NbdServerOptions::default();
    table::read(FIELDS, &mut server, &mut object, at)?;
    table::refuse_rest(&object, at, "--nbd-server", table::names(FIELDS))?;
    Ok(server)
}
