//! Addresses of sockets, as options name them.

use std::path::{Path, PathBuf};

use crate::error::OptionError;
use crate::fd::FdName;
use crate::place::{Of, Text};
use crate::shape::{Member, Shape, Union, Variant};
use crate::table::{self, Field, Kind, Need, Row, only_off, put};

/// Returns the shape of an address that has one of these types.
///
/// A type has a name, a help text and members.
pub fn addresses<const N: usize>(
    help: &'static str,
    types: [(&'static str, &'static str, Vec<Member>); N],
) -> Shape {
    let variant = |(name, help, members)| Variant { name, help, example: "", members };
    let variants = types.into_iter().map(variant).collect();
    Shape::Union(Union { tag: "type", help, common: Vec::new(), variants })
}

/// Checks that a socket can be bound to `path`.
///
/// # Errors
///
/// The path is empty, has a NUL byte, or is longer than 107 bytes.
pub fn check_socket_path(name: &str, path: &Path) -> table::Set {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.is_empty() || bytes.contains(&0) {
        return Err(OptionError::new(format!("Parameter '{name}' expects a path")));
    }
    if bytes.len() > 107 {
        return Err(OptionError::new(format!("UNIX socket path '{}' is too long", path.display()))
            .hint("Path must be less than 108 bytes"));
    }
    Ok(())
}

/// `addr.*` of a unix or an inherited socket while it is read.
pub struct SocketDraft {
    /// `path`, of a unix socket.
    pub path: PathBuf,
    /// `str`, of an inherited socket.
    pub fd: FdName,
}

impl Default for SocketDraft {
    fn default() -> Self {
        SocketDraft { path: PathBuf::new(), fd: FdName::Number(0) }
    }
}

/// Returns the row `tight` of any unix socket.
pub const fn tight<Draft>() -> Field<Draft> {
    Field {
        name: "tight",
        // Only of abstract sockets.
        kind: Kind::Bool(|_, _| Ok(())),
        need: Need::Default("on"),
        help: "how abstract names are padded; without effect on paths",
    }
}

/// `addr.*` of type `unix`.
pub static UNIX_ADDR: &[Field<SocketDraft>] = &[
    Row::required("path", "path of the socket to create and listen on").path(|addr, path| {
        check_socket_path("addr.path", &path)?;
        addr.path = path;
        Ok(())
    }),
    Field::unoffered("abstract", only_off),
    tight(),
];

/// `addr.*` of type `fd`.
pub static FD_ADDR: &[Field<SocketDraft>] = &[Row::required(
    "str",
    "number of an inherited listening socket, or its name in LISTEN_FDNAMES",
)
.text("<fd>", |addr, text| put(&mut addr.fd, FdName::read(&text)?))];

/// An address of type `inet` while it is read.
#[derive(Default)]
pub struct InetDraft {
    /// `host`.
    pub host: String,
    port: String,
    /// `to`: the last port of a range.
    pub to: Option<u16>,
    ipv4: Option<bool>,
    ipv6: Option<bool>,
}

impl InetDraft {
    /// Returns the options that give this address. `port`: 0 to 65535.
    pub fn of(host: String, port: u16, ipv4: bool, ipv6: bool) -> InetDraft {
        let family = |on| (!(ipv4 && ipv6)).then_some(on);
        let (port, ipv4, ipv6) = (port.to_string(), family(ipv4), family(ipv6));
        InetDraft { host, port, to: None, ipv4, ipv6 }
    }

    /// Returns the row `host`, with this help text.
    pub const fn host(help: &'static str) -> Field<InetDraft> {
        Row::required("host", help).at(&Text("<host>", |addr: &mut InetDraft| &mut addr.host))
    }

    /// `port`.
    pub const PORT: Field<InetDraft> = Row::required("port", "TCP port")
        .at(&Text("<port>", |addr: &mut InetDraft| &mut addr.port));

    /// `ipv4`.
    pub const IPV4: Field<InetDraft> =
        Row::optional("ipv4", "what host has", "whether IPv4 addresses are used")
            .at(&Of(|addr: &mut InetDraft| &mut addr.ipv4));

    /// `ipv6`.
    pub const IPV6: Field<InetDraft> =
        Row::optional("ipv6", "what host has", "whether IPv6 addresses are used")
            .at(&Of(|addr: &mut InetDraft| &mut addr.ipv6));

    /// Returns the port's number.
    ///
    /// # Errors
    ///
    /// The port is no number from 0 to 65535: names of services are not looked up.
    pub fn port(&self) -> Result<u16, OptionError> {
        let InetDraft { host, port, .. } = self;
        port.parse().map_err(|_| {
            OptionError::new(format!(
                "address resolution failed for {host}:{port}: \
                 Servname not supported for ai_socktype"
            ))
            .hint("A port is a number from 0 to 65535.")
        })
    }

    /// Returns whether IPv4 is used, and whether IPv6 is.
    ///
    /// # Errors
    ///
    /// Both are switched off.
    pub fn families(&self) -> Result<(bool, bool), OptionError> {
        // Asking for one kind alone leaves the other out.
        match (self.ipv4, self.ipv6) {
            (Some(true), None) => Ok((true, false)),
            (None, Some(true)) => Ok((false, true)),
            (Some(false), Some(false)) => {
                Err(OptionError::new("Cannot disable IPv4 and IPv6 at same time"))
            }
            (ipv4, ipv6) => Ok((ipv4.unwrap_or(true), ipv6.unwrap_or(true))),
        }
    }
}
