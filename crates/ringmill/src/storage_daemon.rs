//! `ringmill storage-daemon`: QSD's command line, in the foreground or in the background.

use std::cell::OnceCell;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;

use control::{Merged, Step, StorageDaemonOptions};

use crate::daemonize::{self, Daemon, Detached, Role};
use crate::dry_run;
use crate::trace;
use daemon::confinement::Kept;
use daemon::pidfile::Pidfile;
use daemon::state_file::StateFile;
use daemon::{DaemonError, Environment, Keeping, Ready, Start};
use daemon::{confinement, spawner};

fn cannot_leave(error: std::io::Error) -> DaemonError {
    DaemonError::new(format!("cannot leave the terminal: {error}"))
}

/// Serves until a signal comes.
pub(crate) fn run(options: StorageDaemonOptions) -> Result<ExitCode, DaemonError> {
    if options.check {
        return dry_run::run(&options);
    }
    let (mut child, mut parent) = (None, None);
    if options.daemonize {
        match daemonize::split() {
            Ok(Role::Parent { code, .. }) => return Ok(ExitCode::from(code)),
            Ok(Role::Child(daemon)) => {
                parent = Some(daemon.parent());
                child = Some(daemon);
            }
            Err(error) => {
                return Err(DaemonError::new(format!("cannot go to the background: {error}")));
            }
        }
    }
    let mut environment = Environment::of_environment(parent)?;
    let kept = options.state.as_deref().map(|path| keep(path, &options)).transpose()?;
    let mut named = spawner::Named::default();
    named.add(&options.steps);
    if let Some((_, merged)) = &kept {
        named.add(&merged.kept);
    }
    let has_monitor = spawner::has_monitor(&options.steps);
    let spawner = spawner::start(&options.sandbox, &named, has_monitor);
    trace::start(&options.trace)?;
    let begun = |kept: Option<Kept<'_>>, steps: &[Step]| {
        confinement::begin(&options.sandbox, steps, options.pidfile.as_deref(), kept)
    };
    let pidfile = Rc::<OnceCell<_>>::default();
    let mut start = Start {
        spawner,
        pidfile: pidfile.clone(),
        stop_timeout: options.stop_timeout.limit(),
        ..Start::default()
    };
    match kept {
        None => {
            environment.sandbox = begun(None, &options.steps)?;
            start.steps = options.steps;
        }
        Some((keeping, merged)) => {
            let kept = Kept { file: keeping.file.path(), more: &merged.kept };
            environment.sandbox = begun(Some(kept), &merged.given)?;
            (start.keeping, start.steps, start.kept) = (Some(keeping), merged.given, merged.kept);
        }
    }
    daemon::run(start, environment, |daemon| {
        let path = options.pidfile.as_deref();
        let created = Pidfile::create_if(path, confinement::renaming(&options.sandbox, path)?)?;
        let detached = child.map(Daemon::detach).transpose().map_err(cannot_leave)?;
        daemon.confine()?;
        let pidfile = pidfile.clone();
        let tell = move || {
            Pidfile::fill_if(created, &pidfile)?;
            detached.map_or(Ok(()), Detached::ready).map_err(cannot_leave)
        };
        Ok(Ready { tell: Box::new(tell), ..Ready::new(None) })
    })?;
    drop(pidfile);
    Ok(ExitCode::SUCCESS)
}

/// `--state`: opens the file, and merges it with the command line.
fn keep(path: &Path, options: &StorageDaemonOptions) -> Result<(Keeping, Merged), DaemonError> {
    let (file, state) = StateFile::open(path, confinement::user(&options.sandbox)?)?;
    let of = |error| {
        let error = DaemonError::from(error);
        error.of(&format!("state file '{}'", path.display()))
    };
    let merged = state.merge(&options.steps).map_err(of)?;
    for change in merged.changes.iter().filter(|_| !state.command_line.is_empty()) {
        log::info!("state file '{}': the command line has {change}", path.display());
    }
    merged.warnings.iter().for_each(|warning| log::warn!("{warning}"));
    if !merged.kept.is_empty() {
        let (path, count) = (path.display(), merged.kept.len());
        log::info!(
            "state file '{path}': going on with {count} options that are not on the command line"
        );
    }
    Ok((Keeping::new(file, &options.steps), merged))
}
