//! `upgrade`: replaces a running daemon by a newer version.

use std::ffi::OsString;

use crate::ctl::{self, CtlSocket};
use crate::error::OptionError;
use crate::table::Field;

/// Options of `upgrade`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpgradeOptions {
    /// Which daemon.
    pub daemon: UpgradeDaemon,
}

/// How the daemon is identified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UpgradeDaemon {
    /// By its process id.
    Pid(i32),
    /// By the socket of its QMP monitor, or the path of its pid file.
    At(CtlSocket),
}

/// The options of the command line: only the common ones.
pub(crate) static OPTIONS: &[Field<UpgradeOptions>] = &[];

/// Takes the daemon from the positional arguments.
pub(crate) fn start(arguments: Vec<OsString>) -> Result<UpgradeOptions, OptionError> {
    let mut arguments = arguments.into_iter();
    let daemon = arguments.next().filter(|daemon| !daemon.is_empty()).ok_or_else(|| {
        OptionError::new("upgrade: which daemon?")
            .hint("Usage: ringmill upgrade <pid>|<pidfile>|<socket>")
    })?;
    match arguments.next() {
        Some(extra) => {
            Err(OptionError::new(format!("{}: Unexpected argument", extra.to_string_lossy()))
                .hint("upgrade takes one daemon."))
        }
        None => Ok(UpgradeOptions {
            daemon: match daemon.to_str().and_then(|pid| pid.parse().ok()).filter(|pid| *pid > 0) {
                Some(pid) => UpgradeDaemon::Pid(pid),
                None => UpgradeDaemon::At(ctl::socket(daemon)),
            },
        }),
    }
}
