//! Exports over FUSE: a node as a file.

use std::path::PathBuf;

use block::job::OnError;

use super::{Address, Draft, ExportNeeds, ExportType, MoreNodes, SizeUse};
use crate::error::OptionError;
use crate::table::{Choice, Field, Kind, Need, put};

/// Options of an export over FUSE.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FuseOptions {
    /// `mountpoint`: a regular file, over which the node is mounted.
    pub mountpoint: PathBuf,
    /// `growable`: writes past the end extend the node.
    pub growable: bool,
    /// `allow-other`: the users that can access the file.
    pub allow_other: AllowOther,
}

/// `allow-other`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AllowOther {
    /// `off`: only the daemon's user.
    Off,
    /// `on`: all users, according to the file's mode.
    On,
    /// `auto`: as `on` where permitted, else as `off`.
    #[default]
    Auto,
}

impl ExportType for FuseOptions {
    fn type_name(&self) -> &'static str {
        "fuse"
    }

    fn more_nodes(&self) -> Option<MoreNodes<'_>> {
        None
    }

    fn address(&self) -> Address {
        Address::Mountpoint(self.mountpoint.clone())
    }

    fn needs(&self) -> ExportNeeds<'_> {
        ExportNeeds { mountpoint: Some(&self.mountpoint), ..ExportNeeds::default() }
    }

    fn size_use(&self) -> SizeUse {
        // As in QSD.
        SizeUse::Changes { even_read_only: self.growable }
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

/// Options of `fuse`.
pub(super) static FUSE: &[Field<Draft>] = &[
    Field {
        name: "mountpoint",
        kind: Kind::Path(|export, path| {
            if path.as_os_str().is_empty() {
                return Err(OptionError::new("mountpoint must not be empty"));
            }
            put(&mut export.fuse.mountpoint, path)
        }),
        need: Need::Required,
        help: "regular file that the node is mounted on; it must exist",
    },
    Field {
        name: "growable",
        kind: Kind::Bool(|export, on| put(&mut export.fuse.growable, on)),
        need: Need::Default("off"),
        help: "let writes past the end make the node longer",
    },
    Field {
        name: "allow-other",
        kind: Kind::Choice(&[
            Choice {
                name: "off",
                help: "the daemon's user alone",
                set: |export| put(&mut export.fuse.allow_other, AllowOther::Off),
            },
            Choice {
                name: "on",
                help: "all users, as the file's owner and mode say, which chmod and chown change",
                set: |export| put(&mut export.fuse.allow_other, AllowOther::On),
            },
            Choice {
                name: "auto",
                help: "as on if the system allows it, else as off",
                set: |export| put(&mut export.fuse.allow_other, AllowOther::Auto),
            },
        ]),
        need: Need::Default("auto"),
        help: "users that reach the file",
    },
];
