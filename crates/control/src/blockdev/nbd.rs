//! `nbd`: an export of an NBD server.

use std::path::PathBuf;

use block::options::{Driver, NbdOptions, NbdServerAddr};

use super::{DriverRow, OwnTable};
use crate::error::OptionError;
use crate::export::check_socket_path;
use crate::shape::{Shape, Union, Variant};
use crate::table::{self, Context, Field, Kind, Need, put};
use crate::value::Value;

/// Longest name of an export, bytes: the protocol's limit.
const MAX_NAME: usize = 4096;

pub(super) static NBD: DriverRow = DriverRow {
    name: "nbd",
    help: "an export of an NBD server",
    example: "nbd,node-name=n,server.type=unix,server.path=nbd.sock,export=disk",
    own: &OwnTable {
        fields: FIELDS,
        start: |_| Draft::default(),
        build: |draft| {
            let Draft { server, export, reconnect_delay, open_timeout } = draft;
            let server = server.ok_or_else(|| table::missing("server"))?;
            Ok(Driver::Nbd(NbdOptions { server, export, reconnect_delay, open_timeout }))
        },
    },
};

/// What was given.
#[derive(Default)]
struct Draft {
    server: Option<NbdServerAddr>,
    export: String,
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
        kind: Kind::Text {
            meta: "<id>",
            set: |_, _| Err(OptionError::not_yet("Parameter 'tls-creds'")),
        },
        need: Need::Optional("no TLS"),
        help: "not supported so far",
    },
    Field {
        name: "tls-hostname",
        kind: Kind::Text {
            meta: "<name>",
            set: |_, _| Err(OptionError::not_yet("Parameter 'tls-hostname'")),
        },
        need: Need::Optional("the host of server"),
        help: "not supported so far",
    },
    Field {
        name: "x-dirty-bitmap",
        kind: Kind::Text {
            meta: "<context>",
            set: |_, _| {
                Err(OptionError::not_yet("Parameter 'x-dirty-bitmap'")
                    .hint("Block status is always that of base:allocation."))
            },
        },
        need: Need::Optional("base:allocation"),
        help: "another context for block status; not supported",
    },
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

/// `server.*` while it is read.
#[derive(Default)]
struct Server {
    path: PathBuf,
    host: String,
    port: String,
    ipv4: Option<bool>,
    ipv6: Option<bool>,
}

static UNIX: &[Field<Server>] = &[
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
        kind: Kind::Bool(|_, on| match on {
            true => Err(OptionError::not_yet("Parameter 'server.abstract' with value 'on'")),
            false => Ok(()),
        }),
        need: Need::Default("off"),
        help: "abstract socket name; only off so far",
    },
    Field {
        name: "tight",
        // Only of abstract sockets.
        kind: Kind::Bool(|_, _| Ok(())),
        need: Need::Default("on"),
        help: "how abstract names are padded; without effect on paths",
    },
];

static INET: &[Field<Server>] = &[
    Field {
        name: "host",
        kind: Kind::Text { meta: "<host>", set: |server, host| put(&mut server.host, host) },
        need: Need::Required,
        help: "name or address of the server",
    },
    Field {
        name: "port",
        kind: Kind::Text { meta: "<port>", set: |server, port| put(&mut server.port, port) },
        need: Need::Required,
        help: "TCP port",
    },
    Field {
        name: "ipv4",
        kind: Kind::Bool(|server, on| put(&mut server.ipv4, Some(on))),
        need: Need::Optional("what host has"),
        help: "whether IPv4 addresses are used",
    },
    Field {
        name: "ipv6",
        kind: Kind::Bool(|server, on| put(&mut server.ipv6, Some(on))),
        need: Need::Optional("what host has"),
        help: "whether IPv6 addresses are used",
    },
    Field {
        name: "keep-alive",
        kind: Kind::Bool(|_, on| match on {
            true => Err(OptionError::not_yet("Parameter 'server.keep-alive' with value 'on'")),
            false => Ok(()),
        }),
        need: Need::Default("off"),
        help: "probe idle connections; only off so far",
    },
];

const TYPES: [&str; 2] = ["inet", "unix"];

fn server_shape() -> Shape {
    let variant = |name, help, fields| {
        let members = table::members(fields);
        Variant { name, help, example: "", members }
    };
    Shape::Union(Union {
        tag: "type",
        help: "kind of address",
        common: Vec::new(),
        variants: vec![variant("inet", "TCP", INET), variant("unix", "a unix socket", UNIX)],
    })
}

fn server(node: &mut Draft, value: Value, at: &Context) -> table::Set {
    let (kind, object) = table::take_type(value, at, &TYPES)?;
    let fields = match kind.as_str() {
        "inet" => INET,
        "unix" => UNIX,
        "fd" | "vsock" => {
            let what = format!("Parameter 'server.type' with value '{kind}'");
            return Err(OptionError::not_yet(&what));
        }
        _ => return Err(table::not_accepted("type", at, &kind, TYPES.into_iter())),
    };
    let server: Server = table::read_typed(fields, object, at, &kind)?;
    node.server = Some(match kind.as_str() {
        "unix" => NbdServerAddr::Unix { path: server.path },
        _ => inet(server)?,
    });
    Ok(())
}

fn inet(server: Server) -> Result<NbdServerAddr, OptionError> {
    let Server { host, port, ipv4, ipv6, .. } = server;
    let Ok(port) = port.parse::<u16>() else {
        return Err(OptionError::new(format!(
            "address resolution failed for {host}:{port}: Servname not supported for ai_socktype"
        ))
        .hint("A port is a number from 0 to 65535."));
    };
    // Asking for one kind alone leaves the other out.
    let (ipv4, ipv6) = match (ipv4, ipv6) {
        (Some(true), None) => (true, false),
        (None, Some(true)) => (false, true),
        (ipv4, ipv6) => (ipv4.unwrap_or(true), ipv6.unwrap_or(true)),
    };
    if !ipv4 && !ipv6 {
        return Err(OptionError::new("Cannot disable IPv4 and IPv6 at same time"));
    }
    Ok(NbdServerAddr::Inet { host, port, ipv4, ipv6 })
}
