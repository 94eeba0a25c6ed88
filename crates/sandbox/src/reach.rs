//! Landlock: which files a thread may open, and which TCP ports and abstract sockets it may use.
//!
//! Open descriptors, and those received over sockets, keep working.

use std::fmt;
use std::io;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, NetPort, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, Scope,
};

use crate::Failed;

/// What the control thread can reach once the daemon serves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reach {
    /// Files. `None`: all that its user may open.
    pub files: Option<Vec<Beneath>>,
    /// TCP ports to connect to; no new port can be listened on. `None`: any port for both.
    pub connect: Option<Vec<u16>>,
    /// Whether abstract unix sockets of other processes can be connected to.
    pub abstract_sockets: bool,
    /// Whether vsock can be connected to. Landlock has no rules for vsock, so seccomp denies its sockets.
    pub vsock: bool,
}

/// A file, or a folder with everything beneath it.
///
/// A path that does not exist gets no rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beneath {
    /// The file or folder.
    pub path: PathBuf,
    /// The allowed accesses.
    pub purpose: Purpose,
}

/// The accesses that are allowed beneath a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Reads files.
    Read,
    /// Reads, writes, truncates, creates and removes files, devices and sockets.
    Use,
    /// Removes files: sockets and a pid file.
    Remove,
    /// Renames and removes files, and creates empty ones: a pid file, which gets its name when the daemon serves.
    Rename,
    /// Creates, writes and renames files: a state file.
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
            Purpose::Rename => AccessFs::MakeReg | AccessFs::RemoveFile,
            Purpose::Replace => {
                AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile
            }
        }
    }
}

impl Reach {
    /// Writes `3 paths, TCP none`: what a version of Landlock enforces.
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
    // The innermost error of the crate is that of the system call.
    let error = io::Error::other(error);
    Failed { call: "landlock", error }
}

/// Denies opening, listening and connecting, and abstract sockets and signals to the outside.
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

/// Denies everything but `reach`.
pub(crate) fn only(reach: &Reach) -> Result<Option<i32>, Failed> {
    let mut ruleset = Ruleset::default();
    // No rule allows creating devices or executing files.
    let of_files = match reach.files {
        Some(_) => AccessFs::from_all(ABI::V5),
        None => AccessFs::Execute | AccessFs::MakeChar | AccessFs::MakeBlock,
    };
    ruleset = ruleset.handle_access(of_files).map_err(failed)?;
    if reach.connect.is_some() {
        ruleset = ruleset.handle_access(AccessNet::from_all(ABI::V4)).map_err(failed)?;
    }
    let mut scopes = Scope::from_all(ABI::V6);
    if reach.abstract_sockets {
        scopes.remove(Scope::AbstractUnixSocket);
    }
    ruleset = ruleset.scope(scopes).map_err(failed)?;
    let mut ruleset = ruleset.create().map_err(failed)?;
    for Beneath { path, purpose } in reach.files.iter().flatten() {
        // A rule holds for the inode. A file that is created at the path later is not covered.
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

/// Landlock's ABI version. `None`: the kernel has no Landlock.
fn version(status: &RestrictionStatus) -> Option<i32> {
    match status.landlock {
        LandlockStatus::Available { effective_abi, .. } => Some(effective_abi as i32),
        LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => None,
    }
}
