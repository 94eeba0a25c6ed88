//! `ringmill storage-daemon`: QSD's command line, in the foreground or in the background.

use std::cell::OnceCell;
use std::process::ExitCode;
use std::rc::Rc;

use control::StorageDaemonOptions;

use crate::daemon::{self, DaemonError, Start, Surroundings};
use crate::daemonize::{self, Daemon, Leaving, Role};
use crate::pidfile::Pidfile;
use crate::{sandbox, spawner, trace};

fn cannot_leave(error: std::io::Error) -> DaemonError {
    DaemonError::new(format!("cannot leave the terminal: {error}"))
}

/// Serves until a signal comes.
pub(crate) fn run(options: StorageDaemonOptions) -> Result<ExitCode, DaemonError> {
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
    let spawner = spawner::start(&options.sandbox);
    trace::start(&options.trace)?;
    surroundings.sandbox =
        sandbox::begin(&options.sandbox, &options.steps, options.pidfile.as_deref())?;
    let pidfile = Rc::<OnceCell<_>>::default();
    let start =
        Start { steps: options.steps, spawner, pidfile: pidfile.clone(), ..Start::default() };
    daemon::run(start, surroundings, |daemon| {
        if let Some(path) = &options.pidfile {
            let _ = pidfile.set(Pidfile::create(path).map_err(DaemonError::new)?);
        }
        let leaving = child.map(Daemon::leave).transpose().map_err(cannot_leave)?;
        daemon.confine()?;
        leaving.map(Leaving::ready).transpose().map_err(cannot_leave)?;
        Ok(None)
    })?;
    drop(pidfile);
    Ok(ExitCode::SUCCESS)
}
