//! Exports over vfio-user: a PCI device of another process, usually a virtual machine monitor.

use std::path::Path;

use block::job::OnError;

use super::vhost_user::addr_shape;
use super::{Addr, Address, Draft, ExportNeeds, ExportType, SizeUse};
use crate::error::OptionError;
use crate::table::{Field, Kind, Need, put};

/// What an AHCI controller over vfio-user has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AhciOptions {
    /// `addr`: where the client connects.
    pub addr: Addr,
    /// `serial`: the drive's serial number, 1 to 20 printable ASCII characters. `None`: the export's id.
    pub serial: Option<String>,
}

impl AhciOptions {
    fn socket(&self) -> Option<&Path> {
        match &self.addr {
            Addr::Unix { path } => Some(path),
            Addr::Fd { .. } => None,
        }
    }
}

impl ExportType for AhciOptions {
    fn type_name(&self) -> &'static str {
        "vfio-user-ahci"
    }

    fn more_luns(&self) -> Option<&[String]> {
        None
    }

    fn address(&self) -> Address {
        match &self.addr {
            Addr::Unix { path } => Address::Path(path.clone()),
            Addr::Fd { fd } => Address::Fd(fd.clone()),
        }
    }

    fn needs(&self) -> ExportNeeds<'_> {
        ExportNeeds { socket: self.socket(), ..ExportNeeds::default() }
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
}

/// The most characters of a serial number (ATA8-ACS, IDENTIFY DEVICE).
const MAX_SERIAL: usize = 20;

/// Options of `vfio-user-ahci`.
pub(super) static AHCI: &[Field<Draft>] = &[
    Field {
        name: "addr",
        kind: Kind::Nested { shape: addr_shape, read: super::vhost_user::addr },
        need: Need::Required,
        help: "where the virtual machine monitor connects",
    },
    Field {
        name: "serial",
        kind: Kind::Text {
            meta: "<text>",
            set: |export, serial| {
                let is_printable =
                    serial.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
                if serial.is_empty() || serial.len() > MAX_SERIAL || !is_printable {
                    return Err(OptionError::new(format!(
                        "serial must be 1 to {MAX_SERIAL} printable ASCII characters"
                    )));
                }
                put(&mut export.serial, Some(serial))
            },
        },
        need: Need::Optional("the export's id, its first 20 characters"),
        help: "serial number of the drive, up to 20 characters",
    },
];

/// The rest of `vfio-user-ahci`.
pub(super) fn ahci(draft: &mut Draft) -> AhciOptions {
    let addr = std::mem::take(&mut draft.vhost_user).addr;
    AhciOptions { addr, serial: draft.serial.take() }
}
