//! `--chardev` and `--monitor`: the connections of QMP clients.

use std::fmt;
use std::path::PathBuf;

use crate::address::{check_socket_path, tight};
use crate::error::OptionError;
use crate::fd::FdName;
use crate::scalar::{IDENTIFIER_HINT, is_identifier};
use crate::shape::{Member, Union, Variant};
use crate::table::{self, Choice, Context, Field, Kind, Need, Row, only_off, put};
use crate::value::{Object, Value};

/// `--chardev`: a byte stream to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChardevOptions {
    /// `id`: its name.
    pub id: String,
    /// Its kind.
    pub backend: ChardevBackend,
}

/// The kind of a character device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChardevBackend {
    /// `stdio`: standard input and output.
    Stdio,
    /// `socket`, with `server=on`: clients connect.
    Listen {
        /// The address.
        addr: SocketAddr,
        /// `wait`: the start waits for a client.
        wait: bool,
    },
    /// `socket`, with `server=off`: connected once, at the start.
    Connect(SocketAddr),
}

impl fmt::Display for ChardevBackend {
    /// In QEMU's format. A listening socket takes several clients, so it is never `disconnected`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (addr, server) = match self {
            ChardevBackend::Stdio => return f.write_str("stdio"),
            ChardevBackend::Listen { addr, .. } => (addr, ",server=on"),
            ChardevBackend::Connect(addr) => (addr, ""),
        };
        match addr {
            SocketAddr::Unix(path) => write!(f, "unix:{}{server}", path.display()),
            SocketAddr::Inet { host, port } => write!(f, "tcp:{host}:{port}{server}"),
            SocketAddr::Fd(fd) => write!(f, "fd:{fd}{server}"),
        }
    }
}

/// The address of a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SocketAddr {
    /// `path`: a unix socket, 1 to 107 bytes.
    Unix(PathBuf),
    /// `host` and `port`: TCP.
    Inet {
        /// A name or an address; empty: all addresses of this machine.
        host: String,
        /// The port number.
        port: u16,
    },
    /// `fd`: an inherited socket.
    Fd(FdName),
}

/// `--monitor`: QMP on a character device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorOptions {
    /// `chardev`: the device's name. No two monitors have the same.
    pub chardev: String,
    /// `pretty`: output is indented.
    pub pretty: bool,
}

/// A `--chardev` being parsed.
#[derive(Default)]
struct Draft {
    id: Option<String>,
    path: Option<PathBuf>,
    host: Option<String>,
    port: Option<String>,
    fd: Option<String>,
    server: bool,
    wait: Option<bool>,
}

/// Options common to all character devices.
static COMMON: &[Field<Draft>] = &[
    Row::optional("id", "required", "name of the character device, for --monitor to refer to")
        .text("<id>", |draft, id| {
            if !is_identifier(&id) {
                return Err(
                    OptionError::new("Parameter 'id' expects an identifier").hint(IDENTIFIER_HINT)
                );
            }
            put(&mut draft.id, Some(id))
        }),
    Field::unoffered("mux", only_off),
];

/// Options of `socket`.
static SOCKET: &[Field<Draft>] = &[
    Row::optional("path", "none", "path of a unix socket").path(|draft, path| {
        check_socket_path("path", &path)?;
        put(&mut draft.path, Some(path))
    }),
    Row::optional("host", "none", "name or address for TCP; empty: all addresses of this machine")
        .text("<host>", |draft, host| put(&mut draft.host, Some(host))),
    Row::optional("port", "none", "TCP port, with host")
        .text("<port>", |draft, port| put(&mut draft.port, Some(port))),
    Row::optional("fd", "none", "number of an inherited socket, or its name in LISTEN_FDNAMES")
        .text("<fd>", |draft, fd| put(&mut draft.fd, Some(fd))),
    Row::default("server", "off", "listen for clients, instead of connecting to one")
        .bool(|draft, on| put(&mut draft.server, on)),
    Row::optional("wait", "on, with server=on", "wait until a client has connected")
        .bool(|draft, on| put(&mut draft.wait, Some(on))),
    Field {
        name: "nodelay",
        // Accepted without effect: output is sent at once, a line at a time.
        kind: Kind::Bool(|_, _| Ok(())),
        need: Need::Default("off"),
        help: "send at once (TCP); without effect, as that is always done",
    },
    Field::unoffered("abstract", only_off),
    tight(),
    Field::unoffered("telnet", only_off),
    Field::unoffered("websocket", only_off),
];

/// Options of `stdio`.
static STDIO: &[Field<Draft>] = &[Row::default(
    "signal",
    "on",
    "let the terminal's keys send signals; without effect, as they always do",
)
.bool(|_, _| Ok(()))];

/// A kind of character device.
struct Type {
    name: &'static str,
    help: &'static str,
    /// A whole value of the option.
    example: &'static str,
    fields: &'static [Field<Draft>],
}

/// All kinds.
static TYPES: &[Type] = &[
    Type {
        name: "socket",
        help: "a unix or TCP socket, to listen on or to connect to",
        example: "socket,id=c,path=/run/qmp.sock,server=on,wait=off",
        fields: SOCKET,
    },
    Type { name: "stdio", help: "standard input and output", example: "stdio,id=c", fields: STDIO },
];

/// Returns the names of the kinds of character devices.
pub fn chardev_types() -> impl Iterator<Item = &'static str> {
    TYPES.iter().map(|kind| kind.name)
}

/// The options of a character device.
pub(crate) fn options() -> Union {
    let variant = |kind: &Type| Variant {
        name: kind.name,
        help: kind.help,
        example: kind.example,
        members: table::members(kind.fields),
    };
    Union {
        tag: "backend",
        help: "what the device is",
        common: table::members(COMMON),
        variants: TYPES.iter().map(variant).collect(),
    }
}

/// Reads one `--chardev`.
pub(crate) fn read(mut object: Object, at: &Context) -> Result<ChardevOptions, OptionError> {
    let backend = match table::take(&mut object, "backend") {
        Some(backend) => table::text(backend, "backend", at)?,
        None => {
            let id = table::take(&mut object, "id");
            let id = id.as_ref().and_then(Value::as_text).unwrap_or_default();
            return Err(
                OptionError::new(format!("chardev: \"{id}\" missing backend")).hint(known_types())
            );
        }
    };
    let Some(Type { fields, .. }) = TYPES.iter().find(|kind| kind.name == backend) else {
        return Err(OptionError::new(format!("'{backend}' is not a valid char driver name"))
            .hint(known_types()));
    };
    let mut draft = Draft::default();
    table::read(COMMON, &mut draft, &mut object, at)?;
    table::read(fields, &mut draft, &mut object, at)?;
    if let Some((name, _)) = object.first() {
        let known: Vec<&str> = table::names(COMMON).chain(table::names(fields)).collect();
        return Err(OptionError::new(format!("Invalid parameter '{name}'"))
            .hint(format!("Known parameters of '{backend}': {}", known.join(", "))));
    }
    let Some(id) = draft.id.take() else {
        return Err(OptionError::new("chardev: no id specified"));
    };
    let backend = if backend == "stdio" { ChardevBackend::Stdio } else { socket(draft)? };
    Ok(ChardevOptions { id, backend })
}

fn known_types() -> String {
    let names: Vec<&str> = TYPES.iter().map(|kind| kind.name).collect();
    format!("Known character devices: {}", names.join(", "))
}

fn socket(draft: Draft) -> Result<ChardevBackend, OptionError> {
    let Draft { path, host, port, fd, server, wait, .. } = draft;
    let addr = match (path, fd, host) {
        (Some(path), None, None) => SocketAddr::Unix(path),
        (None, None, Some(host)) => {
            let port = port.ok_or_else(|| OptionError::new("chardev: socket: no port given"))?;
            let port = port.parse().map_err(|_| {
                OptionError::new(format!("Parameter 'port' expects a number, not '{port}'"))
                    .hint("Ports go from 0 to 65535; names of services are not known here.")
            })?;
            SocketAddr::Inet { host, port }
        }
        (None, Some(fd), None) => SocketAddr::Fd(FdName::read(&fd)?),
        (None, None, None) => {
            return Err(OptionError::new("Unable to parse FD number ")
                .hint("A socket needs 'path', 'host' and 'port', or 'fd'."));
        }
        _ => {
            return Err(OptionError::new("None or one of 'path', 'fd' or 'host' option required."));
        }
    };
    match (server, wait) {
        (true, wait) => Ok(ChardevBackend::Listen { addr, wait: wait.unwrap_or(true) }),
        (false, None) => Ok(ChardevBackend::Connect(addr)),
        (false, Some(_)) => Err(OptionError::new(
            "'wait' option is incompatible with socket in client connect mode",
        )),
    }
}

static MONITOR: &[Field<MonitorOptions>] = &[
    Row::required("chardev", "character device that the client is on")
        .text("<id>", |monitor, id| put(&mut monitor.chardev, id)),
    Row::optional("id", "none", "name of the monitor; nothing refers to it")
        .text("<id>", |_, _| Ok(())),
    Row::default("mode", "control", "the protocol; only control").choice(&[
        Choice::new("control", "QMP", |_| Ok(())),
        Choice::new("readline", "QEMU's monitor for people", |_| {
            Err(OptionError::new("Only QMP is supported"))
        }),
    ]),
    Row::default("pretty", "off", "indent what is sent")
        .bool(|monitor, on| put(&mut monitor.pretty, on)),
];

/// The options of `--monitor`.
pub(crate) fn monitor_members() -> Vec<Member> {
    table::members(MONITOR)
}

/// Reads one `--monitor`.
pub(crate) fn read_monitor(
    mut object: Object,
    at: &Context,
) -> Result<MonitorOptions, OptionError> {
    let mut monitor = MonitorOptions { chardev: String::new(), pretty: false };
    table::read(MONITOR, &mut monitor, &mut object, at)?;
    let known = table::names(MONITOR);
    table::refuse_rest(&object, at, "--monitor", known)?;
    Ok(monitor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyval;
    use crate::value::Dialect;

    fn chardev(text: &str) -> Result<ChardevOptions, String> {
        let at = Context::new(Dialect::Keyval);
        let parsed = keyval::parse_opts(text, Some("backend"), |key| options().has(key));
        parsed.and_then(|parsed| read(parsed.object, &at)).map_err(|error| error.message)
    }

    #[test]
    fn sockets_in_qsds_forms() {
        let unix = SocketAddr::Unix("a,b".into());
        let listen = |addr, wait| Ok(ChardevBackend::Listen { addr, wait });
        let backend = |text: &str| chardev(text).map(|options| options.backend);
        assert_eq!(backend("socket,id=m,path=a,,b,server=on"), listen(unix.clone(), true));
        assert_eq!(backend("socket,id=m,path=a,,b,server,nowait"), listen(unix.clone(), false));
        assert_eq!(
            backend("socket,id=m,path=a,,b,nodelay,server,wait"),
            listen(unix.clone(), true)
        );
        assert_eq!(backend("socket,id=m,path=a,,b"), Ok(ChardevBackend::Connect(unix)));
        let inet = SocketAddr::Inet { host: "::1".into(), port: 4444 };
        assert_eq!(
            backend("socket,host=::1,port=4444,id=m,server=on,wait=off"),
            listen(inet, false)
        );
        assert_eq!(
            backend("backend=socket,fd=3,id=m"),
            Ok(ChardevBackend::Connect(SocketAddr::Fd(FdName::Number(3))))
        );
        assert_eq!(backend("stdio,id=m"), Ok(ChardevBackend::Stdio));
    }

    /// Compared with qemu-storage-daemon 11.1.
    #[test]
    fn errors_are_worded_as_qsd_words_them() {
        for (text, message) in [
            ("socket,id=m", "Unable to parse FD number "),
            ("socket,path=x", "chardev: no id specified"),
            ("socket,id=m,path=x,server=maybe", "Parameter 'server' expects 'on' or 'off'"),
            ("socket,id=m,path=x,frob=1", "Invalid parameter 'frob'"),
            ("socket,id=m,path=x,frob", "Invalid parameter 'frob'"),
            ("frob,id=m", "'frob' is not a valid char driver name"),
            ("id=m", "chardev: \"m\" missing backend"),
            ("socket,id=m,host=127.0.0.1", "chardev: socket: no port given"),
            ("socket,id=1m,path=x", "Parameter 'id' expects an identifier"),
            (
                "socket,id=m,path=x,host=y,port=1",
                "None or one of 'path', 'fd' or 'host' option required.",
            ),
            (
                "socket,id=m,path=x,wait=off",
                "'wait' option is incompatible with socket in client connect mode",
            ),
        ] {
            assert_eq!(chardev(text).expect_err(text), message, "{text}");
        }
    }
}
