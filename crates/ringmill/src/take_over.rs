//! `ringmill take-over`: the program that a daemon starts to be upgraded.

use std::cell::OnceCell;
use std::env;
use std::iter;
use std::process::ExitCode;
use std::rc::Rc;

use control::{Command, LogOptions, SandboxOptions, Step, StopTimeout, UsageError};

use crate::attachments::kept;
use crate::serve::GoOn;
use crate::{daemonize, serve};
use daemon::confinement::Kept;
use daemon::state_file::StateFile;
use daemon::{DaemonError, Environment, Keeping, Localize, Ready, Start};
use daemon::{confinement, spawner};

/// Takes over from the daemon at the other end of standard input, and serves.
pub(crate) fn run() -> Result<ExitCode, DaemonError> {
    let begun = daemon::block_signals();
    daemon::raise_limit();
    // Before there is anything that its copy would keep.
    let sandbox = sandbox_options();
    let (named, has_monitor) = named();
    let start = |sandbox| spawner::start(sandbox, &named, has_monitor);
    let spawner = sandbox.as_ref().ok().and_then(start);
    let mut taken = daemon::receive()?;
    let (state, detached) = (taken.state.take(), taken.detached);
    let prepare = || {
        begun.map_err(|errno| DaemonError::new(format!("sigprocmask failed: {}", errno.desc())))?;
        let sandbox = sandbox?;
        let mut environment = Environment::taken_over(taken.watchdog)?;
        let (steps, command_line, localize) = steps(&taken.arguments)?;
        let pidfile = taken.pidfile.as_ref().map(|(path, _)| path.as_path());
        let file = state.as_ref().map(|(path, _)| Kept { file: path, more: &[] });
        environment.sandbox = confinement::begin(&sandbox, &steps, pidfile, file)?;
        let keeping = state.map(|(path, fd)| {
            let (file, state) = StateFile::take_over(path, fd)?;
            let keeping = Keeping::new(file, &state.command_line);
            Ok::<_, DaemonError>(match state.files {
                Some(files) => keeping.with_files(kept::identify, files),
                None => keeping,
            })
        });
        Ok((environment, (steps, command_line, localize), keeping.transpose()?))
    };
    let prepared = prepare().inspect_err(|error| taken.refuse(error));
    let (environment, (steps, command_line, localize), keeping) = prepared?;
    // Outlives the daemon.
    let pidfile = Rc::<OnceCell<_>>::default();
    let taken = Some(taken);
    let pidfile_of = pidfile.clone();
    let start = Start {
        steps,
        command_line,
        spawner,
        pidfile: pidfile_of,
        taken,
        keeping,
        kept: Vec::new(),
        stop_timeout: stop_timeout().limit(),
        localize,
    };
    daemon::run(start, environment, |daemon| {
        if detached && let Err(error) = daemonize::drop_errors() {
            log::error!("standard error stays open: {error}");
        }
        // The daemon already serves. Its end would stop the guests, so it continues without the sandbox.
        if let Err(error) = daemon.confine() {
            let error = error.to_string();
            let why = error.strip_prefix("sandbox: ").unwrap_or(&error);
            log::error!("sandbox: NOT in force: {why}");
        }
        Ok(Ready::new(None))
    })?;
    drop(pidfile);
    Ok(ExitCode::SUCCESS)
}

/// Parses the first daemon's command line, which follows this command's name.
fn first() -> Result<Command, UsageError> {
    let mut words = env::args_os();
    let name = words.next().unwrap_or_default();
    control::parse_args(iter::once(name).chain(words.skip(1)))
}

/// Returns the log options of the first daemon's command line.
pub(crate) fn log_options() -> LogOptions {
    match first() {
        Ok(Command::StorageDaemon(options)) => options.log,
        Ok(Command::Serve(options) | Command::Attach(options)) => options.log,
        // Later steps refuse such a command line, once this process can report to the other one.
        Ok(_) | Err(_) => LogOptions::default(),
    }
}

/// Returns `--stop-timeout` of the first daemon's command line.
fn stop_timeout() -> StopTimeout {
    match first() {
        Ok(Command::StorageDaemon(options)) => options.stop_timeout,
        Ok(Command::Serve(options) | Command::Attach(options)) => options.stop_timeout,
        // As above.
        Ok(_) | Err(_) => StopTimeout::default(),
    }
}

fn sandbox_options() -> Result<SandboxOptions, DaemonError> {
    match first().map_err(DaemonError::new)? {
        Command::StorageDaemon(options) => Ok(options.sandbox),
        Command::Serve(options) | Command::Attach(options) => Ok(options.sandbox),
        _ => Err(DaemonError::new("the command line is that of no daemon")),
    }
}

/// What exports on the first daemon's command line need of the spawner, and whether it has a monitor.
fn named() -> (spawner::Named, bool) {
    let mut named = spawner::Named::default();
    match first() {
        Ok(Command::StorageDaemon(options)) => {
            named.add(&options.steps);
            (named, spawner::has_monitor(&options.steps))
        }
        Ok(Command::Serve(options)) => {
            named.mountpoints.extend(options.mount.into_iter().map(|mount| mount.mountpoint));
            (named, false)
        }
        Ok(Command::Attach(_)) => {
            named.devices.push(None);
            (named, true)
        }
        // As above.
        Ok(_) | Err(_) => (named, false),
    }
}

/// See [`steps`].
type Steps = (Vec<Step>, Option<Vec<String>>, Option<Localize>);

/// Returns the steps of the command line and, for `serve`, the equivalent command line of `storage-daemon`.
fn steps(arguments: &[String]) -> Result<Steps, DaemonError> {
    let words = iter::once("ringmill").chain(arguments.iter().map(String::as_str));
    match control::parse_args(words.map(Into::into)).map_err(DaemonError::new)? {
        Command::StorageDaemon(options) => Ok((options.steps, None, None)),
        Command::Serve(options) => {
            let GoOn { steps, command_line, localize } = serve::go_on(&options, arguments)?;
            Ok((steps, Some(command_line), localize))
        }
        _ => Err(DaemonError::new("what is handed over is no daemon")),
    }
}
