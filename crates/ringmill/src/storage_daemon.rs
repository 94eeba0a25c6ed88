//! `ringmill storage-daemon`: QSD's command line, in the foreground or in the background.

use std::process::ExitCode;

use control::StorageDaemonOptions;

use crate::daemon::{self, DaemonError, Surroundings};
use crate::daemonize::{self, Role};
use crate::pidfile::Pidfile;
use crate::trace;

/// Serves until a signal comes.
pub(crate) fn run(options: &StorageDaemonOptions) -> Result<ExitCode, DaemonError> {
    let (mut child, mut parent) = (None, None);
    if options.daemonize {
        match daemonize::split() {
            Ok(Role::Parent(code)) => return Ok(ExitCode::from(code)),
            Ok(Role::Child(daemon)) => {
                parent = Some(daemon.parent());
                child = Some(daemon);
            }
            Err(error) => {
                return Err(DaemonError::new(format!("cannot go to the background: {error}")));
            }
        }
    }
    let surroundings = Surroundings::of_environment(parent)?;
    trace::start(&options.trace)?;
    // Outlives the daemon: while the file is there, so is what it stands for.
    let mut pidfile = None;
    daemon::run(&options.steps, surroundings, |_| {
        if let Some(path) = &options.pidfile {
            pidfile = Some(Pidfile::create(path).map_err(DaemonError::new)?);
        }
        if let Some(child) = child {
            child
                .ready()
                .map_err(|error| DaemonError::new(format!("cannot leave the terminal: {error}")))?;
        }
        Ok(None)
    })?;
    drop(pidfile);
    Ok(ExitCode::SUCCESS)
}
