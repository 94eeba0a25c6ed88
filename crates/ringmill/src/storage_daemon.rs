//! `ringmill storage-daemon`: QSD's command line, in the foreground or in the background.

use std::process::ExitCode;

use control::StorageDaemonOptions;

use crate::daemon::{self, DaemonError, Surroundings};
use crate::daemonize::{self, Daemon, Leaving, Role};
use crate::pidfile::Pidfile;
use crate::{sandbox, trace};

fn cannot_leave(error: std::io::Error) -> DaemonError {
    DaemonError::new(format!("cannot leave the terminal: {error}"))
}

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
    let mut surroundings = Surroundings::of_environment(parent)?;
    trace::start(&options.trace)?;
    surroundings.sandbox =
        sandbox::begin(&options.sandbox, &options.steps, options.pidfile.as_deref())?;
    // Outlives the daemon: while the file is there, so is what it stands for.
    let mut pidfile = None;
    daemon::run(&options.steps, surroundings, |daemon| {
        if let Some(path) = &options.pidfile {
            pidfile = Some(Pidfile::create(path).map_err(DaemonError::new)?);
        }
        let leaving = child.map(Daemon::leave).transpose().map_err(cannot_leave)?;
        daemon.confine()?;
        leaving.map(Leaving::ready).transpose().map_err(cannot_leave)?;
        Ok(None)
    })?;
    drop(pidfile);
    Ok(ExitCode::SUCCESS)
}
