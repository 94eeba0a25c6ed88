//! The properties of an export type that the rest of the program needs.

use std::path::{Path, PathBuf};

use block::job::OnError;

use crate::error::OptionError;
use crate::fd::FdName;

/// The options of an export type.
///
/// No method has a default, as a wrong answer opens the sandbox too far, or lets two exports share an address.
pub trait ExportType {
    /// Returns the value of `type`.
    fn type_name(&self) -> &'static str;

    /// Returns the nodes behind the first. `None`: the export has one node always.
    fn more_nodes(&self) -> Option<MoreNodes<'_>>;

    /// Returns the address, which no other export may have.
    fn address(&self) -> Address;

    /// Returns the export's requirements on the sandbox, and the paths that it names.
    fn needs(&self) -> ExportNeeds<'_>;

    /// Returns how the export handles a change of the node's size.
    fn size_use(&self) -> SizeUse;

    /// Returns `rerror` and `werror`.
    ///
    /// `None`: the other side is a client that gets each error.
    fn error_policies(&self) -> Option<(OnError, OnError)>;

    /// Returns the option with the node's name as default.
    ///
    /// It is made explicit when the export's node is replaced.
    fn named_by_node(&self) -> Option<&'static str>;

    /// Returns whether a read-only export serves reads of an inactive node.
    ///
    /// `false`: its node stays active, as a virtual machine would get errors.
    fn reads_inactive(&self) -> bool;

    /// Returns whether clients see dirty bitmaps. A restart after a kill may not find them.
    fn shows_bitmaps(&self) -> bool;
}

/// Nodes of an export that takes several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoreNodes<'a> {
    /// The option that lists all of them, and the member of QMP's description.
    pub list: &'static str,
    /// Those behind the first.
    pub nodes: &'a [String],
}

/// How an export handles its node's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeUse {
    /// The export follows changes.
    Follows,
    /// Clients read the size once.
    Fixed,
    /// A writable export changes the size itself.
    Changes {
        /// A read-only export takes the permission too.
        even_read_only: bool,
    },
}

/// The address of an export, which is unique.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A listening socket's path.
    Path(PathBuf),
    /// An inherited listening socket.
    Fd(FdName),
    /// A name on the NBD server.
    Nbd(String),
    /// A file that is mounted over.
    Mountpoint(PathBuf),
    /// A ublk device's number. `None`: the kernel's choice, which no two share.
    Ublk(Option<u32>),
    /// A VDUSE device's name.
    Vduse(String),
}

impl Address {
    /// The error for a second export with the address of export `id`.
    pub(crate) fn taken(&self, id: &str) -> OptionError {
        match self {
            Address::Nbd(name) => {
                OptionError::new(format!("NBD server already has export named '{name}'"))
            }
            Address::Mountpoint(path) => {
                OptionError::new(format!("There already is a FUSE export on '{}'", path.display()))
            }
            Address::Ublk(number) => {
                let number = number.map_or_else(String::new, |number| number.to_string());
                OptionError::new(format!("Export '{id}' has dev-id={number}"))
            }
            Address::Vduse(name) => {
                OptionError::new(format!("Export '{id}' has the VDUSE device '{name}'"))
            }
            Address::Path(_) | Address::Fd(_) => {
                OptionError::new(format!("Export '{id}' has the same address"))
                    .hint("Each export needs a socket of its own.")
            }
        }
    }
}

/// The requirements of an export on the sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExportNeeds<'a> {
    /// A socket that is created, and removed at the end.
    pub socket: Option<&'a Path>,
    /// The export pins memory: `CAP_IPC_LOCK`.
    pub pins_memory: bool,
    /// A file that the helper process mounts over.
    pub mountpoint: Option<&'a Path>,
    /// A ublk device, by its number. The number `None` is the kernel's choice.
    pub ublk: Option<Option<u32>>,
    /// The files of VDUSE.
    pub vduse: bool,
}
