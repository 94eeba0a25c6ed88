//! `--export`: nodes offered over a protocol.
//!
//! An export type is a file here: its options as rows, the type that they are read into, and its
//! [`ExportType`]. This file lists the types.

mod fuse;
mod kind;
mod nbd;
mod on_error;
mod ublk;
mod vduse;
mod vfio_user;
mod vhost_user;

pub use fuse::{AllowOther, FuseOptions};
pub use kind::{Address, ExportNeeds, ExportType, MoreNodes, SizeUse};
pub use nbd::{BitmapRef, NbdOptions};
pub use ublk::UblkOptions;
pub use vduse::VduseOptions;
pub(crate) use vfio_user::MAX_NVME_QUEUES;
pub use vfio_user::{AhciOptions, Doorbells, NvmeOptions};
pub use vhost_user::{Addr, MAX_QUEUES, ScsiOptions, VhostUserOptions};

use std::ops::Deref;

use crate::error::OptionError;
use crate::scalar::{IDENTIFIER_HINT, is_identifier};
use crate::shape::{Shape, Union, Variant};
use crate::table::{self, Context, Field, Row};
use crate::value::{Dialect, Object, Value};

/// One `--export`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportOptions {
    /// `id`: its name.
    pub id: String,
    /// `node-name` of the block node.
    pub node_name: String,
    /// `writable`: whether the other side may write.
    pub writable: bool,
    /// `writethrough`: flush after every write, before it is answered.
    pub writethrough: bool,
    /// `iothread`: the threads that serve it, in turn. Empty: the daemon chooses.
    pub iothreads: Vec<String>,
    /// `fixed-iothread`: the node must run in that thread. Always true in effect, since queues
    /// never move here.
    pub fixed_iothread: bool,
    /// `allow-inactive`: its node may be, or become, inactive.
    pub allow_inactive: bool,
    /// `stall-timeout-ms`: slower requests are logged; 0 disables this.
    pub stall_timeout_ms: u64,
    /// `type`, and the options of that type.
    pub kind: ExportKind,
}

/// The protocol of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExportKind {
    /// `vhost-user-blk`: a virtio-blk device of another process.
    VhostUserBlk(VhostUserOptions),
    /// `vhost-user-scsi`: logical units of a virtio-scsi device of another process. `node-name` is
    /// LUN 0's.
    VhostUserScsi(ScsiOptions),
    /// `nbd`: a network block device.
    Nbd(NbdOptions),
    /// `fuse`: a file.
    Fuse(FuseOptions),
    /// `ublk`: a block device of the host.
    Ublk(UblkOptions),
    /// `vduse-blk`: a vDPA device of the host.
    VduseBlk(VduseOptions),
    /// `vfio-user-ahci`: an AHCI controller of another process.
    VfioUserAhci(AhciOptions),
    /// `vfio-user-nvme`: an NVMe controller of another process. `node-name` is namespace 1's.
    VfioUserNvme(NvmeOptions),
}

impl Deref for ExportKind {
    type Target = dyn ExportType;

    fn deref(&self) -> &(dyn ExportType + 'static) {
        match self {
            ExportKind::VhostUserBlk(options) => options,
            ExportKind::VhostUserScsi(options) => options,
            ExportKind::Nbd(options) => options,
            ExportKind::Fuse(options) => options,
            ExportKind::Ublk(options) => options,
            ExportKind::VduseBlk(options) => options,
            ExportKind::VfioUserAhci(options) => options,
            ExportKind::VfioUserNvme(options) => options,
        }
    }
}

impl ExportOptions {
    /// Returns the nodes that it offers.
    pub fn nodes(&self) -> impl Iterator<Item = &String> {
        let more = self.kind.more_nodes().map_or(&[][..], |more| more.nodes);
        std::iter::once(&self.node_name).chain(more)
    }
}

/// One `--export` while it is read.
#[derive(Default)]
pub(crate) struct Draft {
    id: String,
    node_name: Option<String>,
    writable: bool,
    writethrough: bool,
    iothreads: Vec<String>,
    fixed_iothread: bool,
    allow_inactive: bool,
    /// `None`: the default.
    stall_timeout_ms: Option<u64>,
    vhost_user: VhostUserOptions,
    /// Of the options that list several.
    nodes: Vec<String>,
    nbd: nbd::NbdDraft,
    fuse: FuseOptions,
    ublk: ublk::UblkDraft,
    vduse: VduseOptions,
    serial: Option<String>,
    /// Of `vfio-user-nvme`.
    doorbells: Doorbells,
}

/// `stall-timeout-ms` that was not given.
pub(crate) const STALL_TIMEOUT_MS: u64 = 0;

/// An export type.
struct Type {
    name: &'static str,
    help: &'static str,
    /// A whole value of the option, with the nodes `disk0` and `disk1` and the threads `io0` and `io1`
    /// there to refer to.
    example: &'static str,
    /// What it has beside [`COMMON`].
    fields: &'static [Field<Draft>],
    /// The rest of what was read.
    kind: fn(&mut Draft) -> Result<ExportKind, OptionError>,
}

/// The export types there are.
static TYPES: &[Type] = &[
    Type {
        name: "vhost-user-blk",
        help: "a virtio-blk device for a virtual machine",
        example: "vhost-user-blk,id=e,node-name=disk0,addr.type=unix,addr.path=/run/disk0.sock,\
                  writable=on,num-queues=4,iothread.0=io0,iothread.1=io1",
        fields: vhost_user::BLK,
        kind: |draft| Ok(ExportKind::VhostUserBlk(vhost_user::blk(draft))),
    },
    Type {
        name: "vhost-user-scsi",
        help: "a virtio-scsi device for a virtual machine",
        example: "vhost-user-scsi,id=e,luns.0=disk0,luns.1=disk1,addr.type=unix,\
                  addr.path=/run/scsi.sock,writable=on",
        fields: vhost_user::SCSI,
        kind: |draft| Ok(ExportKind::VhostUserScsi(vhost_user::scsi(draft)?)),
    },
    Type {
        name: "nbd",
        help: "a network block device, on the server of --nbd-server",
        example: "nbd,id=e,node-name=disk0,name=disk,writable=on,iothread=io0",
        fields: nbd::NBD,
        kind: |draft| Ok(ExportKind::Nbd(nbd::finish(draft))),
    },
    Type {
        name: "fuse",
        help: "a file of this machine",
        example: "fuse,id=e,node-name=disk0,mountpoint=/run/disk0.img,writable=on,growable=on",
        fields: fuse::FUSE,
        kind: |draft| Ok(ExportKind::Fuse(std::mem::take(&mut draft.fuse))),
    },
    Type {
        name: "ublk",
        help: "a block device of this machine, /dev/ublkb<n>",
        example: "ublk,id=e,node-name=disk0,writable=on,dev-id=0,num-queues=2,iothread.0=io0,iothread.1=io1",
        fields: ublk::UBLK,
        kind: |draft| Ok(ExportKind::Ublk(ublk::finish(draft)?)),
    },
    Type {
        name: "vduse-blk",
        help: "a vDPA device of this machine: /dev/vd<x>, or a virtual machine's disk",
        example: "vduse-blk,id=e,node-name=disk0,writable=on,name=disk0,num-queues=2,iothread.0=io0,iothread.1=io1",
        fields: vduse::VDUSE,
        kind: |draft| Ok(ExportKind::VduseBlk(vduse::finish(draft))),
    },
    Type {
        name: "vfio-user-ahci",
        help: "SATA drives for a virtual machine without virtio drivers",
        example: "vfio-user-ahci,id=e,drives.0=disk0,drives.1=disk1,addr.type=unix,\
                  addr.path=/run/ahci0.sock,writable=on,serial=disk-0,iothread=io0",
        fields: vfio_user::AHCI,
        kind: |draft| Ok(ExportKind::VfioUserAhci(vfio_user::ahci(draft)?)),
    },
    Type {
        name: "vfio-user-nvme",
        help: "an NVMe controller for a virtual machine without virtio drivers",
        example: "vfio-user-nvme,id=e,namespaces.0=disk0,namespaces.1=disk1,addr.type=unix,\
                  addr.path=/run/nvme0.sock,writable=on,num-queues=4,iothread.0=io0,iothread.1=io1",
        fields: vfio_user::NVME,
        kind: |draft| Ok(ExportKind::VfioUserNvme(vfio_user::nvme(draft)?)),
    },
];

/// What all exports have.
static COMMON: &[Field<Draft>] = &[
    Row::required("id", "name of the export").text("<id>", |export, id| {
        if !is_identifier(&id) {
            return Err(OptionError::new("Invalid block export id").hint(IDENTIFIER_HINT));
        }
        export.id = id;
        Ok(())
    }),
    Row::optional(
        "node-name",
        "none; only exports that take a list of nodes may do without",
        "block node to export",
    )
    .text("<node-name>", |export, name| {
        export.node_name = Some(name);
        Ok(())
    }),
    Row::default(
        "fixed-iothread",
        "off",
        "refuse to move the node to another thread; queues never move, so this only rules \
         out a list in iothread",
    )
    .bool(|export, on| {
        export.fixed_iothread = on;
        Ok(())
    }),
    Row::optional(
        "iothread",
        "a thread of the daemon's choice",
        "I/O thread that serves the export",
    )
    .nested(
        || {
            let list = Shape::List(
                Box::new(Shape::Text("<id>")),
                "I/O thread number <n>, from 0; queues, or connections, are dealt out to them \
                     in turn",
            );
            Shape::Either(vec![Shape::Text("<id>"), list])
        },
        iothreads,
    ),
    Row::default(
        "stall-timeout-ms",
        "0",
        "log requests that take longer, in milliseconds; 0 for none",
    )
    .int(0..=86_400_000, |export, ms| {
        export.stall_timeout_ms = Some(ms.unsigned_abs());
        Ok(())
    }),
    Row::default("writable", "off", "let the other side write").bool(|export, on| {
        export.writable = on;
        Ok(())
    }),
    Row::default("writethrough", "off", "flush after every write, before the write is answered")
        .bool(|export, on| {
            export.writethrough = on;
            Ok(())
        }),
    Row::default(
        "allow-inactive",
        "off",
        "let its node be inactive: requests wait in the guest's queues, or fail over NBD \
         but for reads, until blockdev-set-active",
    )
    .bool(|export, on| {
        export.allow_inactive = on;
        Ok(())
    }),
];

/// `iothread=io0`, or a list.
fn iothreads(export: &mut Draft, value: Value, at: &Context) -> table::Set {
    export.iothreads = match value {
        Value::Text(id) => vec![id],
        value => names(value, at, "string or list of strings")?,
    };
    Ok(())
}

/// A list of names, not empty. `expected`: what else could be there, for errors.
fn names(value: Value, at: &Context, expected: &str) -> Result<Vec<String>, OptionError> {
    let name = at.whole();
    match value {
        Value::List(ids) if ids.is_empty() => {
            Err(OptionError::new(format!("Parameter '{name}' must not be empty")))
        }
        Value::List(ids) => ids
            .into_iter()
            .enumerate()
            .map(|(n, id)| table::text(id, at.item(n).whole(), at))
            .collect(),
        Value::Object(_) if at.dialect == Dialect::Keyval => {
            Err(OptionError::new(format!("Parameters '{name}.*' are unexpected"))
                .hint(format!("A list is written {name}.0=<id>,{name}.1=<id>,…")))
        }
        _ => Err(table::wrong_type(name, expected)),
    }
}

/// The nodes behind the first, of an export that takes `node-name` or the option `list`, at most `max` nodes.
fn more_nodes(
    draft: &mut Draft,
    list: &'static str,
    max: usize,
) -> Result<Vec<String>, OptionError> {
    let hint =
        || format!("One disk is node-name=<node>; several are {list}.0=<node>,{list}.1=<node>,…");
    let mut nodes = std::mem::take(&mut draft.nodes).into_iter();
    match (&draft.node_name, nodes.next()) {
        (None, Some(first)) => draft.node_name = Some(first),
        (None, None) => return Err(table::missing("node-name").hint(hint())),
        (Some(_), Some(_)) => {
            let error = OptionError::new(format!("node-name and {list} exclude each other"));
            return Err(error.hint(hint()));
        }
        (Some(_), None) => {}
    }
    if nodes.len() >= max {
        return Err(OptionError::new(format!("{list} must be at most {max}")));
    }
    Ok(nodes.collect())
}

/// Returns what an export may have.
pub fn options() -> Union {
    let variant = |kind: &Type| Variant {
        name: kind.name,
        help: kind.help,
        example: kind.example,
        members: table::members(kind.fields),
    };
    Union {
        tag: "type",
        help: "the protocol it is offered over",
        common: table::members(COMMON),
        variants: TYPES.iter().map(variant).collect(),
    }
}

/// Reads one `--export`.
///
/// # Errors
///
/// What is wrong with its options.
pub fn read(mut object: Object, at: &Context) -> Result<ExportOptions, OptionError> {
    let names = || TYPES.iter().map(|kind| kind.name);
    let name = match table::take(&mut object, "type") {
        Some(name) => table::text(name, "type", at)?,
        None => {
            let names: Vec<&str> = names().collect();
            let hint = format!("Known export types: {}", names.join(", "));
            return Err(table::missing("type").hint(hint));
        }
    };
    let Some(kind) = TYPES.iter().find(|kind| kind.name == name) else {
        return Err(table::not_accepted("type", at, &name, names()));
    };
    let mut draft = Draft::default();
    table::read(COMMON, &mut draft, &mut object, at)?;
    let takes_list =
        table::names(kind.fields).any(|name| matches!(name, "drives" | "luns" | "namespaces"));
    if draft.node_name.is_none() && !takes_list {
        return Err(table::missing("node-name"));
    }
    table::read(kind.fields, &mut draft, &mut object, at)?;
    let known = table::names(COMMON).chain(table::names(kind.fields));
    let known = ["type"].into_iter().chain(known);
    table::refuse_rest(&object, at, &format!("export type '{name}'"), known)?;
    if draft.fixed_iothread && draft.iothreads.len() > 1 {
        return Err(OptionError::new("fixed-iothread is incompatible with multiple iothreads"));
    }
    let kind = (kind.kind)(&mut draft)?;
    Ok(ExportOptions {
        id: draft.id,
        node_name: draft.node_name.ok_or_else(|| table::missing("node-name"))?,
        writable: draft.writable,
        writethrough: draft.writethrough,
        iothreads: draft.iothreads,
        fixed_iothread: draft.fixed_iothread,
        allow_inactive: draft.allow_inactive,
        stall_timeout_ms: draft.stall_timeout_ms.unwrap_or(STALL_TIMEOUT_MS),
        kind,
    })
}

/// The export that `nbd-server-add` makes: its id is its name.
pub(crate) fn nbd_export(
    node: &str,
    name: &str,
    description: &str,
    bitmap: Option<&str>,
    writable: bool,
) -> Result<ExportOptions, OptionError> {
    let member = |name: &str, value: &str| (name.to_owned(), Value::Text(value.to_owned()));
    let mut object = vec![
        member("type", "nbd"),
        member("id", name),
        member("node-name", node),
        member("name", name),
        member("description", description),
        ("writable".to_owned(), Value::Bool(writable)),
    ];
    object.extend(
        bitmap.map(|name| ("bitmaps".to_owned(), Value::List(vec![Value::Text(name.to_owned())]))),
    );
    read(object, &Context::new(Dialect::Json))
}
