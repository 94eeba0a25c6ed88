//! Exports over vhost-user: a device of another process, usually a virtual machine monitor.

use std::path::{Path, PathBuf};

use block::job::OnError;

use super::on_error::{RERROR, WERROR};
use super::{Draft, ExportKind, NODE_NAME};
use crate::error::OptionError;
use crate::fd::FdName;
use crate::rows::{BLOCK_SIZE_HELP, PIN_MEMORY_HELP, block_size};
use crate::shape::{Shape, Union, Variant};
use crate::table::{self, Context, Field, Kind, Need, put};
use crate::value::Value;

/// What all exports over vhost-user have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostUserOptions {
    /// `addr`: where the front end connects.
    pub addr: Addr,
    /// `num-queues`: request virtqueues, 1 to [`MAX_QUEUES`].
    pub num_queues: u16,
    /// `logical-block-size` in bytes: a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// `pin-memory`: keep the guest's memory registered with io_uring.
    pub pin_memory: bool,
    /// `rerror`: what becomes of reads that fail.
    pub rerror: OnError,
    /// `werror`: what becomes of other requests that fail.
    pub werror: OnError,
}

impl Default for VhostUserOptions {
    fn default() -> Self {
        let addr = Addr::Unix { path: PathBuf::new() };
        VhostUserOptions {
            addr,
            num_queues: 1,
            logical_block_size: 512,
            pin_memory: false,
            rerror: OnError::Report,
            werror: OnError::Report,
        }
    }
}

/// The most queues of an export: vhost-user messages that pass a queue's eventfd name the queue in
/// 8 bits.
pub const MAX_QUEUES: u16 = 256;

/// `addr`: a Unix domain socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Addr {
    /// `addr.type=unix`: a socket is created at `addr.path`, to listen on.
    Unix {
        /// The path, 1 to 107 bytes.
        path: PathBuf,
    },
    /// `addr.type=fd`: a listening socket that was inherited.
    Fd {
        /// Its descriptor.
        fd: FdName,
    },
}

/// Options of `vhost-user-blk`.
pub(super) static BLK: &[Field<Draft>] =
    &[NODE_NAME, ADDR, LOGICAL_BLOCK_SIZE, NUM_QUEUES, PIN_MEMORY, RERROR, WERROR];

/// Options of `vhost-user-scsi`.
pub(super) static SCSI: &[Field<Draft>] = &[
    Field { need: Need::Optional("the nodes in luns"), ..NODE_NAME },
    Field {
        name: "luns",
        kind: Kind::Nested {
            shape: || {
                let name = Box::new(Shape::Text("<node-name>"));
                Shape::List(name, "block node of logical unit <n>, from 0")
            },
            read: |export, value, at| {
                export.luns = super::names(value, at, "list of strings")?;
                Ok(())
            },
        },
        need: Need::Optional("node-name is LUN 0, the only one"),
        help: "block nodes of the logical units, instead of node-name",
    },
    ADDR,
    LOGICAL_BLOCK_SIZE,
    NUM_QUEUES,
    PIN_MEMORY,
    RERROR,
    WERROR,
];

/// The most logical units of a target.
const MAX_LUNS: usize = 256;
/// The most request queues of `vhost-user-scsi`, which has two queues more.
const MAX_SCSI_QUEUES: u16 = MAX_QUEUES - 2;

/// The rest of `vhost-user-scsi`.
pub(super) fn scsi(draft: &mut Draft) -> Result<ExportKind, OptionError> {
    let mut luns = std::mem::take(&mut draft.luns).into_iter();
    match (draft.node_name.is_empty(), luns.next()) {
        (true, Some(first)) => draft.node_name = first,
        (true, None) => return Err(table::missing("node-name").hint(LUNS_HINT)),
        (false, Some(_)) => {
            return Err(OptionError::new("node-name and luns exclude each other").hint(LUNS_HINT));
        }
        (false, None) => {}
    }
    if luns.len() >= MAX_LUNS {
        return Err(OptionError::new(format!("luns must be at most {MAX_LUNS}")));
    }
    let options = std::mem::take(&mut draft.vhost_user);
    if options.num_queues > MAX_SCSI_QUEUES {
        return Err(OptionError::new(format!("num-queues must be at most {MAX_SCSI_QUEUES}"))
            .hint("The vhost-user protocol names a queue in 8 bits, and two carry no requests."));
    }
    Ok(ExportKind::VhostUserScsi { options, more_luns: luns.collect() })
}

const LUNS_HINT: &str = "One disk is node-name=<node>; several are luns.0=<node>,luns.1=<node>,…";

const ADDR: Field<Draft> = Field {
    name: "addr",
    kind: Kind::Nested { shape: addr_shape, read: addr },
    need: Need::Required,
    help: "where the front end connects",
};

const LOGICAL_BLOCK_SIZE: Field<Draft> = Field {
    name: "logical-block-size",
    kind: Kind::Bytes(|export, bytes| {
        // 0 stands for the default, as in QSD.
        let bytes = if bytes == 0 { 512 } else { bytes };
        put(&mut export.vhost_user.logical_block_size, block_size("logical-block-size", bytes)?)
    }),
    need: Need::Default("512"),
    help: BLOCK_SIZE_HELP,
};

const NUM_QUEUES: Field<Draft> = Field {
    name: "num-queues",
    kind: Kind::Int {
        range: i64::MIN..=i64::MAX,
        set: |export, queues| match u16::try_from(queues) {
            Ok(0) => Err(OptionError::new("num-queues must be greater than 0")),
            Ok(queues) if queues <= MAX_QUEUES => {
                export.vhost_user.num_queues = queues;
                Ok(())
            }
            Ok(_) => Err(OptionError::new(format!("num-queues must be at most {MAX_QUEUES}"))
                .hint("The vhost-user protocol names a queue in 8 bits.")),
            Err(_) => Err(OptionError::new("Parameter 'num-queues' expects uint16_t")),
        },
    },
    need: Need::Default("1"),
    help: "request queues the guest may use, 1 to 256",
};

const PIN_MEMORY: Field<Draft> = Field {
    name: "pin-memory",
    kind: Kind::Bool(|export, on| {
        export.vhost_user.pin_memory = on;
        Ok(())
    }),
    need: Need::Default("off"),
    help: PIN_MEMORY_HELP,
};

/// Whether a socket can be bound to `path`.
pub(crate) fn check_socket_path(name: &str, path: &Path) -> table::Set {
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
pub(crate) struct SocketDraft {
    pub(crate) path: PathBuf,
    pub(crate) fd: FdName,
}

impl Default for SocketDraft {
    fn default() -> Self {
        SocketDraft { path: PathBuf::new(), fd: FdName::Number(0) }
    }
}

/// `addr.*` of type `unix`.
pub(crate) static UNIX_ADDR: &[Field<SocketDraft>] = &[
    Field {
        name: "path",
        kind: Kind::Path(|addr, path| {
            check_socket_path("addr.path", &path)?;
            addr.path = path;
            Ok(())
        }),
        need: Need::Required,
        help: "path of the socket to create and listen on",
    },
    Field {
        name: "abstract",
        kind: Kind::Bool(|_, on| match on {
            true => Err(OptionError::not_yet("Parameter 'addr.abstract' with value 'on'")),
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

/// `addr.*` of type `fd`.
pub(crate) static FD_ADDR: &[Field<SocketDraft>] = &[Field {
    name: "str",
    kind: Kind::Text { meta: "<fd>", set: |addr, text| put(&mut addr.fd, FdName::read(&text)?) },
    need: Need::Required,
    help: "number of an inherited listening socket, or its name in LISTEN_FDNAMES",
}];

fn addr_shape() -> Shape {
    let variant =
        |name, help, fields| Variant { name, help, example: "", members: table::members(fields) };
    Shape::Union(Union {
        tag: "type",
        help: "kind of address the front end connects to",
        common: Vec::new(),
        variants: vec![
            variant("unix", "a unix socket", UNIX_ADDR),
            variant("fd", "a socket that was inherited", FD_ADDR),
        ],
    })
}

fn addr(export: &mut Draft, value: Value, at: &Context) -> table::Set {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let kind = match table::take(&mut object, "type") {
        Some(kind) => table::text(kind, &at.full("type"), at)?,
        None => return Err(table::missing(&at.full("type")).hint("Known values: unix, fd")),
    };
    let mut draft = SocketDraft::default();
    let fields = match kind.as_str() {
        "unix" => UNIX_ADDR,
        "fd" => FD_ADDR,
        "inet" | "vsock" => {
            return Err(OptionError::new(
                "Only socket address types 'unix' and 'fd' are supported",
            ));
        }
        _ => return Err(table::not_accepted("type", at, &kind, ["unix", "fd"].into_iter())),
    };
    table::read(fields, &mut draft, &mut object, at)?;
    let known = ["type"].into_iter().chain(fields.iter().map(|field| field.name));
    table::refuse_rest(&object, at, &format!("'{}' of type '{kind}'", at.whole()), known)?;
    export.vhost_user.addr = match kind.as_str() {
        "fd" => Addr::Fd { fd: draft.fd },
        _ => Addr::Unix { path: draft.path },
    };
    Ok(())
}
