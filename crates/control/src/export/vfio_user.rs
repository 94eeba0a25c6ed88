//! Exports over vfio-user: a PCI device of another process, usually a virtual machine monitor.

use std::path::Path;

use block::job::OnError;

use super::vhost_user::{MAX_MEMORY, addr_shape};
use super::{Addr, Address, Draft, ExportNeeds, ExportType, MoreNodes, SizeUse};
use crate::error::OptionError;
use crate::shape::Shape;
use crate::table::{Choice, Field, Row, put};

/// What an AHCI controller over vfio-user has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AhciOptions {
    /// `addr`: where the client connects.
    pub addr: Addr,
    /// `serial`: the first drive's serial number, 1 to 20 printable ASCII characters. `None`: the export's id.
    pub serial: Option<String>,
    /// `drives.1` and on: the nodes of the drives behind the first.
    pub more_drives: Vec<String>,
    /// `max-memory`: bytes of memory that a client may have mapped. `None`: by the machine's memory.
    pub max_memory: Option<u64>,
}

/// What an NVMe controller over vfio-user has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeOptions {
    /// `addr`: where the client connects.
    pub addr: Addr,
    /// `serial`: the controller's serial number, 1 to 20 printable ASCII characters. `None`: the export's id.
    pub serial: Option<String>,
    /// `num-queues`: I/O queues, 1 to 64.
    pub num_queues: u16,
    /// `doorbells`: how the guest announces commands.
    pub doorbells: Doorbells,
    /// `namespaces.1` and on: the nodes of the namespaces behind the first.
    pub more_namespaces: Vec<String>,
    /// `max-memory`: bytes of memory that a client may have mapped. `None`: by the machine's memory.
    pub max_memory: Option<u64>,
}

/// How a guest announces NVMe commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Doorbells {
    /// `auto`: in memory, or by message where the driver has no shadow doorbells.
    #[default]
    Auto,
    /// `trapped`: by message.
    Trapped,
    /// `mapped`: in the registers' page, which the client maps.
    Mapped,
}

fn socket(addr: &Addr) -> Option<&Path> {
    match addr {
        Addr::Unix { path } => Some(path),
        Addr::Fd { .. } => None,
    }
}

fn address(addr: &Addr) -> Address {
    match addr {
        Addr::Unix { path } => Address::Path(path.clone()),
        Addr::Fd { fd } => Address::Fd(fd.clone()),
    }
}

impl ExportType for AhciOptions {
    fn type_name(&self) -> &'static str {
        "vfio-user-ahci"
    }

    fn more_nodes(&self) -> Option<MoreNodes<'_>> {
        Some(MoreNodes { list: "drives", nodes: &self.more_drives })
    }

    fn address(&self) -> Address {
        address(&self.addr)
    }

    fn needs(&self) -> ExportNeeds<'_> {
        ExportNeeds { socket: socket(&self.addr), ..ExportNeeds::default() }
    }

    /// A drive tells its size when it is identified.
    fn size_use(&self) -> SizeUse {
        SizeUse::Fixed
    }

    fn error_policies(&self) -> Option<(OnError, OnError)> {
        None
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

impl ExportType for NvmeOptions {
    fn type_name(&self) -> &'static str {
        "vfio-user-nvme"
    }

    fn more_nodes(&self) -> Option<MoreNodes<'_>> {
        Some(MoreNodes { list: "namespaces", nodes: &self.more_namespaces })
    }

    fn address(&self) -> Address {
        address(&self.addr)
    }

    fn needs(&self) -> ExportNeeds<'_> {
        ExportNeeds { socket: socket(&self.addr), ..ExportNeeds::default() }
    }

    fn size_use(&self) -> SizeUse {
        SizeUse::Follows
    }

    fn error_policies(&self) -> Option<(OnError, OnError)> {
        None
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

/// The most characters of a serial number (ATA8-ACS, IDENTIFY DEVICE; NVM Express 1.4, section 5.15).
const MAX_SERIAL: usize = 20;

/// Options of `vfio-user-ahci`.
pub(super) static AHCI: &[Field<Draft>] = &[
    ADDR,
    Row::optional(
        "drives",
        "node-name is the drive at port 0, the only one",
        "block nodes of the drives, instead of node-name; up to 32",
    )
    .nested(
        || {
            let name = Box::new(Shape::Text("<node-name>"));
            Shape::List(name, "block node of the drive at port <n>, from 0")
        },
        |export, value, at| {
            export.nodes = super::names(value, at, "list of strings")?;
            Ok(())
        },
    ),
    MAX_MEMORY,
    SERIAL,
];

/// Options of `vfio-user-nvme`.
pub(super) static NVME: &[Field<Draft>] = &[
    ADDR,
    Row::optional(
        "namespaces",
        "node-name is namespace 1, the only one",
        "block nodes of the namespaces, instead of node-name",
    )
    .nested(
        || {
            let name = Box::new(Shape::Text("<node-name>"));
            Shape::List(name, "block node of namespace <n> + 1, from 0")
        },
        |export, value, at| {
            export.nodes = super::names(value, at, "list of strings")?;
            Ok(())
        },
    ),
    Row::default("num-queues", "4", "I/O queues the guest may use, 1 to 64").int(
        1..=MAX_NVME_QUEUES as i64,
        |export, queues| {
            export.vhost_user.num_queues = u16::try_from(queues).ok();
            Ok(())
        },
    ),
    Row::default("doorbells", "auto", "how the guest announces commands").choice(&[
        Choice::new(
            "auto",
            "in the guest's memory if its driver has shadow doorbells, else by message",
            |export| set_doorbells(export, Doorbells::Auto),
        ),
        Choice::new("trapped", "by message: shadow doorbells are not offered", |export| {
            set_doorbells(export, Doorbells::Trapped)
        }),
        Choice::new(
            "mapped",
            "in a page that the client maps; the I/O threads poll it and do not sleep",
            |export| set_doorbells(export, Doorbells::Mapped),
        ),
    ]),
    MAX_MEMORY,
    SERIAL,
];

fn set_doorbells(export: &mut Draft, doorbells: Doorbells) -> Result<(), OptionError> {
    export.doorbells = doorbells;
    Ok(())
}

/// Most I/O queues: each needs an eventfd for its interrupt, and monitors have few descriptors for them.
pub(crate) const MAX_NVME_QUEUES: u16 = 64;
/// Default number of I/O queues.
const NVME_QUEUES: u16 = 4;
/// The most drives: an AHCI controller has 32 ports.
const MAX_DRIVES: usize = 32;
/// The most namespaces.
const MAX_NAMESPACES: usize = 256;

const ADDR: Field<Draft> = Row::required("addr", "where the virtual machine monitor connects")
    .nested(addr_shape, super::vhost_user::addr);

const SERIAL: Field<Draft> = Row::optional(
    "serial",
    "the export's id, its first 20 characters",
    "serial number of the drive or controller, up to 20 characters",
)
.text("<text>", |export, serial| {
    let is_printable = serial.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    if serial.is_empty() || serial.len() > MAX_SERIAL || !is_printable {
        return Err(OptionError::new(format!(
            "serial must be 1 to {MAX_SERIAL} printable ASCII characters"
        )));
    }
    put(&mut export.serial, Some(serial))
});

/// The rest of `vfio-user-ahci`.
pub(super) fn ahci(draft: &mut Draft) -> Result<AhciOptions, OptionError> {
    let more_drives = super::more_nodes(draft, "drives", MAX_DRIVES)?;
    let common = std::mem::take(&mut draft.vhost_user);
    let (addr, max_memory) = (common.addr, common.max_memory);
    Ok(AhciOptions { addr, serial: draft.serial.take(), more_drives, max_memory })
}

/// The rest of `vfio-user-nvme`.
pub(super) fn nvme(draft: &mut Draft) -> Result<NvmeOptions, OptionError> {
    let more_namespaces = super::more_nodes(draft, "namespaces", MAX_NAMESPACES)?;
    let common = std::mem::take(&mut draft.vhost_user);
    Ok(NvmeOptions {
        addr: common.addr,
        serial: draft.serial.take(),
        num_queues: common.num_queues.unwrap_or(NVME_QUEUES),
        doorbells: draft.doorbells,
        more_namespaces,
        max_memory: common.max_memory,
    })
}
