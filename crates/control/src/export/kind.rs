//! What the rest of the program asks of an export type.

use std::path::{Path, PathBuf};

use block::job::OnError;

use crate::error::OptionError;
use crate::fd::FdName;

/// The options of an export type. No method has a default: a wrong answer opens the sandbox too far, or
/// lets two exports share what they cannot share.
pub trait ExportType {
    /// `type`.
    fn type_name(&self) -> &'static str;

    /// The nodes behind the first. `None`: the export has one node always.
    fn more_nodes(&self) -> Option<MoreNodes<'_>>;

    /// What no other export has.
    fn address(&self) -> Address;

    /// What the export needs of the sandbox, and which paths it names.
    fn needs(&self) -> ExportNeeds<'_>;

    /// What becomes of the export when the node gets another size.
    fn size_use(&self) -> SizeUse;

    /// `rerror` and `werror`. `None`: the other side is a client, which is told of each error.
    fn error_policies(&self) -> Option<(OnError, OnError)>;

    /// The option whose default is the node's name. It is written out when the export gets another node.
    fn named_by_node(&self) -> Option<&'static str>;
}

/// Nodes of an export that takes several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoreNodes<'a> {
    /// The option that lists all of them, and the member of QMP's description.
    pub list: &'static str,
    /// Those behind the first.
    pub nodes: &'a [String],
}

/// What an export has to do with the size of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeUse {
    /// The export follows changes.
    Follows,
    /// Clients read the size once.
    Fixed,
    /// An export that is writable changes the size itself.
    Changes,
}

/// What no two exports can share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A listening socket's path.
    Path(PathBuf),
    /// A listening socket that was inherited.
    Fd(FdName),
    /// A name on the NBD server.
    Nbd(String),
    /// A file that is mounted on.
    Mountpoint(PathBuf),
}

impl Address {
    /// The error for a second export, when export `id` has the address already.
    pub(crate) fn taken(&self, id: &str) -> OptionError {
        match self {
            Address::Nbd(name) => {
                OptionError::new(format!("NBD server already has export named '{name}'"))
            }
            Address::Mountpoint(path) => {
                OptionError::new(format!("There already is a FUSE export on '{}'", path.display()))
            }
            Address::Path(_) | Address::Fd(_) => {
                OptionError::new(format!("Export '{id}' has the same address"))
                    .hint("Each export needs a socket of its own.")
            }
        }
    }
}

/// What an export needs of the sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExportNeeds<'a> {
    /// A socket that is created there, and removed at the end.
    pub socket: Option<&'a Path>,
    /// Memory is pinned: `CAP_IPC_LOCK`.
    pub pins_memory: bool,
    /// A file that is mounted on, by the helper process.
    pub mountpoint: Option<&'a Path>,
}
