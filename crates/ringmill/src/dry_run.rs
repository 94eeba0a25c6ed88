//! `storage-daemon --check`: reports everything that is wrong with a command line and its state file.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

use crate::check::print;
use control::{Merged, SavedState, StorageDaemonOptions};
use daemon::{DaemonError, Environment};

/// Checks, without serving anything. The exit code is 1 if something is wrong.
pub(crate) fn run(options: &StorageDaemonOptions) -> Result<ExitCode, DaemonError> {
    let mut problems: Vec<String> = options.problems.clone();
    let environment = Environment::of_environment(None)?;
    let (mut steps, with_state) = (options.steps.clone(), options.state.is_some());
    if let Some(path) = &options.state {
        match merged(path, options) {
            Ok(None) => {}
            Ok(Some((merged, has_run))) => {
                if has_run && !merged.changes.is_empty() {
                    let changes = merged.changes.join(", ");
                    log::warn!("not in use before a restart: the command line has {changes}");
                    if let Some(manager) = &environment.manager {
                        manager.status(&format!("Not in use before a restart: {changes}"));
                    }
                }
                merged.warnings.iter().for_each(|warning| log::warn!("{warning}"));
                steps = [merged.given, merged.kept].concat();
            }
            Err(error) => problems.push(error.to_string()),
        }
    }
    // The sockets of a service manager are for the daemon.
    let environment = Environment { manager: None, ..environment };
    problems.extend(daemon::check(steps, with_state, environment)?.iter().map(ToString::to_string));
    for problem in &problems {
        log::error!("{problem}");
    }
    match problems.len() {
        0 => {
            print("No problem was found.\n");
            Ok(ExitCode::SUCCESS)
        }
        _ => Ok(ExitCode::FAILURE),
    }
}

/// The command line merged with the state file, and whether a daemon has run with that file. `None`: there is no file.
/// The file is not locked: a daemon may use it.
fn merged(
    path: &Path,
    options: &StorageDaemonOptions,
) -> Result<Option<(Merged, bool)>, DaemonError> {
    let of = |error: DaemonError| error.of(&format!("state file '{}'", path.display()));
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(of(DaemonError::new(error))),
    };
    let state = SavedState::parse(&text).map_err(|error| of(error.into()))?;
    let merged = state.merge(&options.steps).map_err(|error| of(error.into()))?;
    Ok(Some((merged, !state.command_line.is_empty())))
}
