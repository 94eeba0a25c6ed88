//! Exports over vhost-user: a device of another process, usually a virtual machine monitor.

use std::path::PathBuf;

use block::job::OnError;

use super::on_error::{RERROR, WERROR};
use super::{Address, Draft, ExportNeeds, ExportType, MoreNodes, SizeUse};
use crate::address::{FD_ADDR, SocketDraft, UNIX_ADDR, addresses};
use crate::error::OptionError;
use crate::fd::FdName;
use crate::rows::{
    BLOCK_SIZE_HELP, MAX_MEMORY_DEFAULT, MAX_MEMORY_HELP, PIN_MEMORY_HELP, block_size,
};
use crate::shape::Shape;
use crate::table::{self, Context, Field, Need, Row, put};
use crate::value::Value;

/// What all exports over vhost-user have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostUserOptions {
    /// `addr`: where the front end connects.
    pub addr: Addr,
    /// `num-queues`: request virtqueues, 1 to [`MAX_QUEUES`]. `None`, for virtio-scsi only: as many as a
    /// front end asks for.
    pub num_queues: Option<u16>,
    /// `logical-block-size` in bytes: a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// `pin-memory`: keep the guest's memory registered with io_uring.
    pub pin_memory: bool,
    /// `max-memory`: bytes of memory that a front end may have mapped. `None`: by the machine's memory.
    pub max_memory: Option<u64>,
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
            num_queues: None,
            logical_block_size: 512,
            pin_memory: false,
            max_memory: None,
            rerror: OnError::Report,
            werror: OnError::Report,
        }
    }
}

/// Maximum number of queues of an export.
///
/// vhost-user messages that pass a queue's eventfd name the queue in 8 bits.
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

/// What an export over virtio-scsi has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScsiOptions {
    /// What it has in common with virtio-blk.
    pub options: VhostUserOptions,
    /// `luns.1` and on: the nodes of the other logical units.
    pub more_luns: Vec<String>,
}

impl ExportType for VhostUserOptions {
    fn type_name(&self) -> &'static str {
        "vhost-user-blk"
    }

    fn more_nodes(&self) -> Option<MoreNodes<'_>> {
        None
    }

    fn address(&self) -> Address {
        match &self.addr {
            Addr::Unix { path } => Address::Path(path.clone()),
            Addr::Fd { fd } => Address::Fd(fd.clone()),
        }
    }

    fn needs(&self) -> ExportNeeds<'_> {
        let socket = match &self.addr {
            Addr::Unix { path } => Some(path.as_path()),
            Addr::Fd { .. } => None,
        };
        ExportNeeds { socket, pins_memory: self.pin_memory, ..ExportNeeds::default() }
    }

    fn size_use(&self) -> SizeUse {
        SizeUse::Follows
    }

    fn error_policies(&self) -> Option<(OnError, OnError)> {
        Some((self.rerror, self.werror))
    }

    fn named_by_node(&self) -> Option<&'static str> {
        None
    }

    fn reads_inactive(&self) -> bool {
        false
    }

    fn shows_bitmaps(&self) -> bool {
        false
    }
}

impl ExportType for ScsiOptions {
    fn type_name(&self) -> &'static str {
        "vhost-user-scsi"
    }

    fn more_nodes(&self) -> Option<MoreNodes<'_>> {
        Some(MoreNodes { list: "luns", nodes: &self.more_luns })
    }

    fn address(&self) -> Address {
        self.options.address()
    }

    fn needs(&self) -> ExportNeeds<'_> {
        self.options.needs()
    }

    fn size_use(&self) -> SizeUse {
        SizeUse::Follows
    }

    fn error_policies(&self) -> Option<(OnError, OnError)> {
        self.options.error_policies()
    }

    fn named_by_node(&self) -> Option<&'static str> {
        None
    }

    fn reads_inactive(&self) -> bool {
        false
    }

    fn shows_bitmaps(&self) -> bool {
        false
    }
}

/// Options of `vhost-user-blk`.
pub(super) static BLK: &[Field<Draft>] =
    &[ADDR, LOGICAL_BLOCK_SIZE, MAX_MEMORY, NUM_QUEUES, PIN_MEMORY, RERROR, WERROR];

/// Options of `vhost-user-scsi`.
pub(super) static SCSI: &[Field<Draft>] = &[
    Row::optional(
        "luns",
        "node-name is LUN 0, the only one",
        "block nodes of the logical units, instead of node-name",
    )
    .nested(
        || {
            let name = Box::new(Shape::Text("<node-name>"));
            Shape::List(name, "block node of logical unit <n>, from 0")
        },
        |export, value, at| {
            export.nodes = super::names(value, at, "list of strings")?;
            Ok(())
        },
    ),
    ADDR,
    LOGICAL_BLOCK_SIZE,
    MAX_MEMORY,
    Field {
        need: Need::Optional("as many as the front end asks for, up to 254"),
        help: "request queues the guest may use, 1 to 254",
        ..NUM_QUEUES
    },
    PIN_MEMORY,
    RERROR,
    WERROR,
];

/// Completes the options of `vhost-user-blk`.
pub(super) fn blk(draft: &mut Draft) -> VhostUserOptions {
    let options = std::mem::take(&mut draft.vhost_user);
    VhostUserOptions { num_queues: options.num_queues.or(Some(1)), ..options }
}

/// The most logical units of a target.
const MAX_LUNS: usize = 256;
/// The most request queues of `vhost-user-scsi`, which has two queues more.
const MAX_SCSI_QUEUES: u16 = MAX_QUEUES - 2;

/// The rest of `vhost-user-scsi`.
pub(super) fn scsi(draft: &mut Draft) -> Result<ScsiOptions, OptionError> {
    let more_luns = super::more_nodes(draft, "luns", MAX_LUNS)?;
    let options = std::mem::take(&mut draft.vhost_user);
    if options.num_queues > Some(MAX_SCSI_QUEUES) {
        return Err(OptionError::new(format!("num-queues must be at most {MAX_SCSI_QUEUES}"))
            .hint("The vhost-user protocol names a queue in 8 bits, and two carry no requests."));
    }
    Ok(ScsiOptions { options, more_luns })
}

const ADDR: Field<Draft> =
    Row::required("addr", "where the front end connects").nested(addr_shape, addr);

const LOGICAL_BLOCK_SIZE: Field<Draft> = Row::default("logical-block-size", "512", BLOCK_SIZE_HELP)
    .bytes(|export, bytes| {
        // 0 stands for the default, as in QSD.
        let bytes = if bytes == 0 { 512 } else { bytes };
        put(&mut export.vhost_user.logical_block_size, block_size("logical-block-size", bytes)?)
    });

const NUM_QUEUES: Field<Draft> =
    Row::default("num-queues", "1", "request queues the guest may use, 1 to 256").int(
        i64::MIN..=i64::MAX,
        |export, queues| match u16::try_from(queues) {
            Ok(0) => Err(OptionError::new("num-queues must be greater than 0")),
            Ok(queues) if queues <= MAX_QUEUES => {
                export.vhost_user.num_queues = Some(queues);
                Ok(())
            }
            Ok(_) => Err(OptionError::new(format!("num-queues must be at most {MAX_QUEUES}"))
                .hint("The vhost-user protocol names a queue in 8 bits.")),
            Err(_) => Err(OptionError::new("Parameter 'num-queues' expects uint16_t")),
        },
    );

/// Of all exports to which a virtual machine monitor gives its guest's memory.
pub(super) const MAX_MEMORY: Field<Draft> =
    Row::optional("max-memory", MAX_MEMORY_DEFAULT, MAX_MEMORY_HELP)
        .bytes(|export, bytes| put(&mut export.vhost_user.max_memory, Some(bytes)));

const PIN_MEMORY: Field<Draft> =
    Row::default("pin-memory", "off", PIN_MEMORY_HELP).bool(|export, on| {
        export.vhost_user.pin_memory = on;
        Ok(())
    });

const TYPES: [&str; 2] = ["unix", "fd"];

pub(super) fn addr_shape() -> Shape {
    let unix = ("unix", "a unix socket", table::members(UNIX_ADDR));
    let fd = ("fd", "a socket that was inherited", table::members(FD_ADDR));
    addresses("kind of address the front end connects to", [unix, fd])
}

pub(super) fn addr(export: &mut Draft, value: Value, at: &Context) -> table::Set {
    let (kind, object) = table::take_type(value, at, &TYPES)?;
    let fields = match kind.as_str() {
        "unix" => UNIX_ADDR,
        "fd" => FD_ADDR,
        "inet" | "vsock" => {
            return Err(OptionError::new(
                "Only socket address types 'unix' and 'fd' are supported",
            ));
        }
        _ => return Err(table::not_accepted("type", at, &kind, TYPES.into_iter())),
    };
    let draft: SocketDraft = table::read_typed(fields, object, at, &kind)?;
    export.vhost_user.addr = match kind.as_str() {
        "fd" => Addr::Fd { fd: draft.fd },
        _ => Addr::Unix { path: draft.path },
    };
    Ok(())
}
