//! `ringmill upgrade`: asks a daemon to give place to a newer one, and says how it went.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use control::{CtlSocket, UpgradeDaemon, UpgradeOptions};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Map;

use crate::ctl::client::Client;
use crate::daemon::DaemonError;

/// Longer than a daemon tries.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longer than who serves then takes to write its pid file.
const WRITES: Duration = Duration::from_secs(5);
/// How often is looked whether it is gone.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Does it; gives what is to be printed.
pub(crate) fn run(options: &UpgradeOptions) -> Result<String, DaemonError> {
    match &options.daemon {
        UpgradeDaemon::Pid(pid) => by_signal(*pid, None),
        UpgradeDaemon::At(CtlSocket::Unix(path)) if !is_socket(path) => {
            by_signal(pid_in(path)?, Some(path))
        }
        UpgradeDaemon::At(socket) => by_monitor(socket),
    }
}

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

fn pid_in(pidfile: &Path) -> Result<i32, DaemonError> {
    let of =
        |why: &dyn std::fmt::Display| DaemonError::new(format!("{}: {why}", pidfile.display()));
    let text = fs::read_to_string(pidfile).map_err(|error| of(&error))?;
    let pid = text.trim().parse().ok().filter(|pid| *pid > 0);
    pid.ok_or_else(|| of(&"neither a pid file nor a monitor's socket"))
}

fn by_monitor(socket: &CtlSocket) -> Result<String, DaemonError> {
    let mut client = Client::connect(socket).map_err(DaemonError::new)?;
    let upgraded = client.execute("x-upgrade", Map::new()).map_err(DaemonError::new)?;
    let (pid, pause_us) = (&upgraded["pid"], upgraded["pause-us"].as_u64().unwrap_or(0));
    Ok(format!("Process {pid} serves now; guests waited for {} ms.", pause_us.div_ceil(1000)))
}

/// The daemon says nothing; but it ends, unless it goes on.
fn by_signal(pid: i32, pidfile: Option<&Path>) -> Result<String, DaemonError> {
    let process = Pid::from_raw(pid);
    let failed = |errno: Errno| {
        DaemonError::new(format!("process {pid} cannot be signalled: {}", errno.desc()))
    };
    kill(process, Signal::SIGUSR2).map_err(failed)?;
    let deadline = Instant::now() + PATIENCE;
    while kill(process, None).is_ok() && !has_ended(pid) {
        if Instant::now() > deadline {
            return Err(DaemonError::new(format!(
                "process {pid} still serves: its log says why nobody has taken over"
            )));
        }
        thread::sleep(LOOK_AGAIN);
    }
    let Some(pidfile) = pidfile else {
        return Ok(format!("Process {pid} has handed over and ended."));
    };
    // Who serves now does so before anything else.
    let deadline = Instant::now() + WRITES;
    loop {
        match pid_in(pidfile) {
            Ok(new) if new != pid => return Ok(format!("Process {new} serves now.")),
            _ if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
            _ => {
                let message = format!("process {pid} has ended, and nobody serves now");
                return Err(DaemonError::new(message));
            }
        }
    }
}

/// Whether all that is left of a process is its parent's to take.
fn has_ended(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
}
