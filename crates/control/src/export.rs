//! `--export`: nodes offered over a protocol. So far vhost-user-blk.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use crate::error::OptionError;
use crate::scalar::{IDENTIFIER_HINT, is_identifier};
use crate::table::{self, Context, Field, Kind, Need, Row};
use crate::value::{Dialect, Object, Value};

/// `vhost-user-blk`: a node as a virtio-blk device of another process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostUserBlkExport {
    /// `id`: its name.
    pub id: String,
    /// `node-name` of the block node.
    pub node_name: String,
    /// `addr`: where the front end connects.
    pub addr: Addr,
    /// `writable`: whether the guest may write.
    pub writable: bool,
    /// `writethrough`: flush after every write, before it is answered.
    pub writethrough: bool,
    /// `num-queues`: request virtqueues, 1 to [`MAX_QUEUES`].
    pub num_queues: u16,
    /// `logical-block-size` in bytes: a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// `iothread`: the threads that serve the queues, in turn. Empty: the daemon chooses.
    pub iothreads: Vec<String>,
    /// `fixed-iothread`: the node must run in that thread. Always true in effect, since queues
    /// never move here.
    pub fixed_iothread: bool,
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
        /// Its descriptor, not negative.
        fd: RawFd,
    },
}

impl Default for VhostUserBlkExport {
    fn default() -> Self {
        Self {
            id: String::new(),
            node_name: String::new(),
            addr: Addr::Unix { path: PathBuf::new() },
            writable: false,
            writethrough: false,
            num_queues: 1,
            logical_block_size: 512,
            iothreads: Vec::new(),
            fixed_iothread: false,
        }
    }
}

/// What all exports have.
pub(crate) static COMMON: &[Field<VhostUserBlkExport>] = &[
    Field {
        name: "id",
        kind: Kind::Text {
            meta: "<id>",
            set: |export, id| {
                if !is_identifier(&id) {
                    return Err(OptionError::new("Invalid block export id").hint(IDENTIFIER_HINT));
                }
                export.id = id;
                Ok(())
            },
        },
        need: Need::Required,
        help: "name of the export",
    },
    Field {
        name: "fixed-iothread",
        kind: Kind::Bool(|export, on| {
            export.fixed_iothread = on;
            Ok(())
        }),
        need: Need::Default("off"),
        help: "refuse to move the node to another thread; queues never move, so this only \
               rules out a list in iothread",
    },
    Field {
        name: "iothread",
        kind: Kind::Nested {
            meta: "<id>",
            rows: || {
                vec![Row {
                    name: "<n>".to_owned(),
                    value: "<id>".to_owned(),
                    need: Need::Optional("one thread"),
                    help: "I/O thread number <n>, from 0; queues are dealt out to them in turn",
                }]
            },
            read: iothreads,
        },
        need: Need::Optional("a thread of the daemon's choice"),
        help: "I/O thread that serves the export",
    },
    Field {
        name: "node-name",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |export, name| {
                export.node_name = name;
                Ok(())
            },
        },
        need: Need::Required,
        help: "block node to export",
    },
    Field {
        name: "writable",
        kind: Kind::Bool(|export, on| {
            export.writable = on;
            Ok(())
        }),
        need: Need::Default("off"),
        help: "let the guest write",
    },
    Field {
        name: "writethrough",
        kind: Kind::Bool(|export, on| {
            export.writethrough = on;
            Ok(())
        }),
        need: Need::Default("off"),
        help: "flush after every write, before the write is answered",
    },
    Field {
        name: "allow-inactive",
        kind: Kind::Bool(|_, on| match on {
            true => Err(OptionError::new("Export type does not support inactive exports")),
            false => Ok(()),
        }),
        need: Need::Default("off"),
        help: "run on an inactive node; only off",
    },
];

/// Options of `vhost-user-blk`.
pub(crate) static VHOST_USER_BLK: &[Field<VhostUserBlkExport>] = &[
    Field {
        name: "addr",
        kind: Kind::Nested { meta: "", rows: addr_rows, read: addr },
        need: Need::Required,
        help: "",
    },
    Field {
        name: "logical-block-size",
        kind: Kind::Bytes(|export, bytes| {
            // 0 stands for the default, as in QSD.
            let bytes = if bytes == 0 { 512 } else { bytes };
            match u32::try_from(bytes) {
                Ok(size @ 512..=2_097_152) if size.is_power_of_two() => {
                    export.logical_block_size = size;
                    Ok(())
                }
                _ => Err(OptionError::new(
                    "parameter logical-block-size must be a power of 2 between 512 and 2097152",
                )),
            }
        }),
        need: Need::Default("512"),
        help: "unit in which the guest addresses the disk, a power of 2 from 512 to 2M",
    },
    Field {
        name: "num-queues",
        kind: Kind::Int {
            range: i64::MIN..=i64::MAX,
            set: |export, queues| match u16::try_from(queues) {
                Ok(0) => Err(OptionError::new("num-queues must be greater than 0")),
                Ok(queues) if queues <= MAX_QUEUES => {
                    export.num_queues = queues;
                    Ok(())
                }
                Ok(_) => Err(OptionError::new(format!("num-queues must be at most {MAX_QUEUES}"))
                    .hint("The vhost-user protocol names a queue in 8 bits.")),
                Err(_) => Err(OptionError::new("Parameter 'num-queues' expects uint16_t")),
            },
        },
        need: Need::Default("1"),
        help: "request queues the guest may use, 1 to 256",
    },
];

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

/// `addr.*` while it is read.
#[derive(Default)]
struct AddrDraft {
    path: PathBuf,
    fd: RawFd,
}

static UNIX: &[Field<AddrDraft>] = &[
    Field {
        name: "path",
        kind: Kind::Path(|addr, path| {
            check_socket_path("addr.path", &path)?;
            addr.path = path;
            Ok(())
        }),
        need: Need::Required,
        help: "path of the socket to create and listen on (type unix)",
    },
    Field {
        name: "abstract",
        kind: Kind::Bool(|_, on| match on {
            true => Err(OptionError::not_yet("Parameter 'addr.abstract' with value 'on'")),
            false => Ok(()),
        }),
        need: Need::Default("off"),
        help: "abstract socket name (type unix); only off so far",
    },
    Field {
        name: "tight",
        // Only of abstract sockets.
        kind: Kind::Bool(|_, _| Ok(())),
        need: Need::Default("on"),
        help: "how abstract names are padded (type unix); without effect on paths",
    },
];

static FD: &[Field<AddrDraft>] = &[Field {
    name: "str",
    kind: Kind::Text {
        meta: "<fd>",
        set: |addr, text| {
            let fd: RawFd = text
                .parse()
                .map_err(|_| OptionError::new(format!("Unable to parse FD number {text}")))?;
            if fd < 0 {
                return Err(OptionError::new(format!("File descriptor '{fd}' is not a socket")));
            }
            addr.fd = fd;
            Ok(())
        },
    },
    need: Need::Required,
    help: "number of an inherited listening socket (type fd)",
}];

fn addr_rows() -> Vec<Row> {
    let own = Row {
        name: "type".to_owned(),
        value: "unix|fd".to_owned(),
        need: Need::Required,
        help: "kind of address the front end connects to",
    };
    let below = UNIX.iter().chain(FD).flat_map(Field::rows);
    std::iter::once(own).chain(below).collect()
}

fn addr(export: &mut VhostUserBlkExport, value: Value, at: &Context) -> table::Set {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let kind = match table::take(&mut object, "type") {
        Some(kind) => table::text(kind, &at.full("type"), at)?,
        None => return Err(table::missing(&at.full("type")).hint("Known values: unix, fd")),
    };
    let mut draft = AddrDraft::default();
    let fields = match kind.as_str() {
        "unix" => UNIX,
        "fd" => FD,
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
    export.addr = match kind.as_str() {
        "fd" => Addr::Fd { fd: draft.fd },
        _ => Addr::Unix { path: draft.path },
    };
    Ok(())
}

/// `iothread=io0`, or a list.
fn iothreads(export: &mut VhostUserBlkExport, value: Value, at: &Context) -> table::Set {
    let name = at.whole();
    export.iothreads = match value {
        Value::Text(id) => vec![id],
        Value::List(ids) if ids.is_empty() => {
            return Err(OptionError::new(format!("Parameter '{name}' must not be empty")));
        }
        Value::List(ids) => ids
            .into_iter()
            .enumerate()
            .map(|(n, id)| table::text(id, &format!("{name}.{n}"), at))
            .collect::<Result<_, _>>()?,
        Value::Object(_) if at.dialect == Dialect::Keyval => {
            return Err(OptionError::new(format!("Parameters '{name}.*' are unexpected"))
                .hint(format!("A list is written {name}.0=<id>,{name}.1=<id>,…")));
        }
        _ => return Err(table::wrong_type(name, "string or list of strings")),
    };
    Ok(())
}

/// The export types there are, with what they are for.
pub(crate) static TYPES: &[(&str, &str)] =
    &[("vhost-user-blk", "a virtio-blk device for a virtual machine")];

/// The rows of an export type's table.
pub(crate) fn rows(_type: &str) -> Vec<Row> {
    COMMON.iter().chain(VHOST_USER_BLK).flat_map(Field::rows).collect()
}

/// Reads one `--export`.
pub(crate) fn read(mut object: Object, at: &Context) -> Result<VhostUserBlkExport, OptionError> {
    let kind = match table::take(&mut object, "type") {
        Some(kind) => table::text(kind, "type", at)?,
        None => {
            let names: Vec<&str> = TYPES.iter().map(|(name, _)| *name).collect();
            let hint = format!("Known export types: {}", names.join(", "));
            return Err(table::missing("type").hint(hint));
        }
    };
    if !TYPES.iter().any(|(name, _)| *name == kind) {
        let known = TYPES.iter().map(|(name, _)| *name);
        return Err(table::not_accepted("type", at, &kind, known));
    }
    let mut export = VhostUserBlkExport::default();
    let known = || COMMON.iter().chain(VHOST_USER_BLK).map(|field| field.name);
    table::read(COMMON, &mut export, &mut object, at)?;
    table::read(VHOST_USER_BLK, &mut export, &mut object, at)?;
    let known = ["type"].into_iter().chain(known());
    table::refuse_rest(&object, at, "export type 'vhost-user-blk'", known)?;
    if export.fixed_iothread && export.iothreads.len() > 1 {
        return Err(OptionError::new("fixed-iothread is incompatible with multiple iothreads"));
    }
    Ok(export)
}
