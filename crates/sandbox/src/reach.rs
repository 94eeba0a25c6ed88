//! Landlock: which files a thread may open, and which ports of TCP it may use.
//!
//! What is open stays as it is, and so does what comes over sockets.

use std::fmt;
use std::io;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, NetPort, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, Scope,
};

use crate::Failed;

/// What the control thread can reach once everything is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reach {
    /// Files; `None`: all that its user may open.
    pub files: Option<Vec<Beneath>>,
    /// Ports of TCP to connect to, nothing being listened on anew; `None`: all of both.
    pub connect: Option<Vec<u16>>,
}

/// A file, or a folder and all that is beneath it. What does not exist is left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beneath {
    /// Where.
    pub path: PathBuf,
    /// What for.
    pub purpose: Purpose,
}

/// What may be done beneath a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Files are read.
    Read,
    /// Files and devices are read and written, truncated and made, sockets too; all of them removed.
    Use,
    /// Files are removed, sockets and a pid file.
    Remove,
    /// Files are created, written, and renamed over existing files: a state file.
    Replace,
}

impl Purpose {
    fn access(self) -> BitFlags<AccessFs> {
        match self {
            Purpose::Read => AccessFs::ReadFile | AccessFs::ReadDir,
            Purpose::Use => {
                AccessFs::from_all(ABI::V5)
                    & !(AccessFs::Execute | AccessFs::MakeChar | AccessFs::MakeBlock)
            }
            Purpose::Remove => AccessFs::RemoveFile.into(),
            Purpose::Replace => {
                AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile
            }
        }
    }
}

impl Reach {
    /// `3 paths, TCP none`, as far as a version of Landlock can see to it.
    pub(crate) fn describe(&self, f: &mut fmt::Formatter<'_>, version: i32) -> fmt::Result {
        match self.files.as_deref() {
            None => f.write_str("any path")?,
            Some([_]) => f.write_str("1 path")?,
            Some(paths) => write!(f, "{} paths", paths.len())?,
        }
        match self.connect.as_deref() {
            Some(ports) if covers_tcp(version) => match ports {
                [] => f.write_str(", TCP none"),
                ports => write!(f, ", TCP to {ports:?}"),
            },
            _ => f.write_str(", TCP any"),
        }
    }
}

/// Whether a version of Landlock has rules for TCP.
pub(crate) fn covers_tcp(version: i32) -> bool {
    version >= ABI::V4 as i32
}

fn failed(error: RulesetError) -> Failed {
    // The crate's errors end in the system's.
    let error = io::Error::other(error);
    Failed { call: "landlock", error }
}

/// Nothing can be opened, listened on or connected to; neither can abstract sockets and processes outside
/// be reached.
pub(crate) fn nothing() -> Result<Option<i32>, Failed> {
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V9))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(ABI::V4)))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(ABI::V6)))
        .and_then(Ruleset::create)
        .and_then(|ruleset| ruleset.restrict_self())
        .map_err(failed)?;
    Ok(version(&status))
}

/// Only that can be reached.
pub(crate) fn only(reach: &Reach) -> Result<Option<i32>, Failed> {
    let mut ruleset = Ruleset::default();
    // Devices are not made, and nothing is executed, whatever may be opened.
    let of_files = match reach.files {
        Some(_) => AccessFs::from_all(ABI::V5),
        None => AccessFs::Execute | AccessFs::MakeChar | AccessFs::MakeBlock,
    };
    ruleset = ruleset.handle_access(of_files).map_err(failed)?;
    if reach.connect.is_some() {
        ruleset = ruleset.handle_access(AccessNet::from_all(ABI::V4)).map_err(failed)?;
    }
    ruleset = ruleset.scope(Scope::from_all(ABI::V6)).map_err(failed)?;
    let mut ruleset = ruleset.create().map_err(failed)?;
    for Beneath { path, purpose } in reach.files.iter().flatten() {
        // Whatever comes there later is not beneath what was there when the rules were made.
        let Ok(file) = PathFd::new(path) else { continue };
        let access = if path.is_dir() {
            purpose.access()
        } else {
            purpose.access() & AccessFs::from_file(ABI::V5)
        };
        if !access.is_empty() {
            ruleset = ruleset.add_rule(PathBeneath::new(file, access)).map_err(failed)?;
        }
    }
    for port in reach.connect.iter().flatten() {
        let rule = NetPort::new(*port, AccessNet::ConnectTcp);
        ruleset = ruleset.add_rule(rule).map_err(failed)?;
    }
    Ok(version(&ruleset.restrict_self().map_err(failed)?))
}

/// The version of Landlock in force; `None`: there is none.
fn version(status: &RestrictionStatus) -> Option<i32> {
    match status.landlock {
        LandlockStatus::Available { effective_abi, .. } => Some(effective_abi as i32),
        LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => None,
    }
}
