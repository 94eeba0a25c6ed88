//! `--metrics`: where Prometheus asks for the daemon's numbers.

use crate::address::{FD_ADDR, SocketDraft, UNIX_ADDR, addresses};
use crate::chardev::SocketAddr;
use crate::error::OptionError;
use crate::shape::{Member, Shape};
use crate::table::{self, Context, Field, Row};
use crate::value::{Object, Value};

/// One `--metrics`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsOptions {
    /// `addr`: where to listen for HTTP.
    pub addr: SocketAddr,
}

#[derive(Default)]
struct Draft {
    addr: Option<SocketAddr>,
}

static FIELDS: &[Field<Draft>] =
    &[Row::required("addr", "where the numbers are asked for").nested(addr_shape, addr)];

/// `addr.*` of type `inet` while it is read.
#[derive(Default)]
struct InetDraft {
    host: String,
    port: u16,
}

static INET: &[Field<InetDraft>] = &[
    Row::required("host", "name or address to listen on; empty: all addresses of this machine")
        .text("<host>", |addr, host| {
            addr.host = host;
            Ok(())
        }),
    Row::required("port", "TCP port").text("<port>", |addr, port| {
        let number = port.parse::<u16>().ok().filter(|port| *port > 0);
        addr.port = number.ok_or_else(|| {
            OptionError::new(format!("Parameter 'addr.port' cannot be '{port}'"))
                .hint("A port is a number from 1 to 65535.")
        })?;
        Ok(())
    }),
];

const TYPES: [&str; 3] = ["inet", "unix", "fd"];

fn addr_shape() -> Shape {
    let inet = ("inet", "TCP", table::members(INET));
    let unix = ("unix", "a unix socket", table::members(UNIX_ADDR));
    let fd = ("fd", "a socket that was inherited", table::members(FD_ADDR));
    addresses("kind of address", [inet, unix, fd])
}

fn addr(metrics: &mut Draft, value: Value, at: &Context) -> table::Set {
    let (kind, object) = table::take_type(value, at, &TYPES)?;
    metrics.addr = Some(match kind.as_str() {
        "inet" => {
            let InetDraft { host, port } = table::read_typed(INET, object, at, &kind)?;
            SocketAddr::Inet { host, port }
        }
        "unix" => {
            SocketAddr::Unix(table::read_typed::<SocketDraft>(UNIX_ADDR, object, at, &kind)?.path)
        }
        "fd" => SocketAddr::Fd(table::read_typed::<SocketDraft>(FD_ADDR, object, at, &kind)?.fd),
        _ => return Err(table::not_accepted("type", at, &kind, TYPES.into_iter())),
    });
    Ok(())
}

/// What the option may have.
pub(crate) fn members() -> Vec<Member> {
    table::members(FIELDS)
}

/// Reads one `--metrics`.
pub(crate) fn read(mut object: Object, at: &Context) -> Result<MetricsOptions, OptionError> {
    let mut draft = Draft::default();
    table::read(FIELDS, &mut draft, &mut object, at)?;
    let known = table::names(FIELDS);
    table::refuse_rest(&object, at, "--metrics", known)?;
    let addr = draft.addr.ok_or_else(|| table::missing("addr"))?;
    Ok(MetricsOptions { addr })
}
