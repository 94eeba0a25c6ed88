//! `ringmill upgrade`: asks a daemon to be replaced by a newer one, and reports the result.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use control::{CtlSocket, TAKE_OVER, UpgradeDaemon, UpgradeOptions};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Map;

use crate::ctl::client::Client;
use daemon::DaemonError;

/// Longer than the time limit of a daemon.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit for the new process to write its pid file after that.
const WRITES: Duration = Duration::from_secs(30);
/// Interval of checks for the end of the old process.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Performs the upgrade. Returns the text to print.
pub(crate) fn run(options: &UpgradeOptions) -> Result<String, DaemonError> {
    match &options.daemon {
        UpgradeDaemon::Pid(pid) => by_signal(*pid, None),
        UpgradeDaemon::At(CtlSocket::Unix(path)) if !is_socket(path) => {
            by_signal(running_daemon(path)?, Some(path))
        }
        UpgradeDaemon::At(socket) => by_monitor(socket),
    }
}

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

/// Returns the process of the running daemon that has locked this pid file.
pub(crate) fn running_daemon(pidfile: &Path) -> Result<i32, DaemonError> {
    let pid = pid_in(pidfile)?;
    check_is_locked(pidfile, pid)?;
    Ok(pid)
}

fn pid_in(pidfile: &Path) -> Result<i32, DaemonError> {
    let of =
        |why: &dyn std::fmt::Display| DaemonError::new(format!("{}: {why}", pidfile.display()));
    let text = fs::read_to_string(pidfile).map_err(|error| of(&error))?;
    let pid = text.trim().parse().ok().filter(|pid| *pid > 0);
    pid.ok_or_else(|| of(&"neither a pid file nor a monitor's socket"))
}

/// Checks that the pid file is locked, as a running daemon does. A stale pid file has the ID of a process that
/// has ended, or of an unrelated process.
fn check_is_locked(pidfile: &Path, pid: i32) -> Result<(), DaemonError> {
    let of = |why: &str| DaemonError::new(format!("{}: {why}", pidfile.display()));
    let file = File::open(pidfile).map_err(|error| of(&error.to_string()))?;
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_OFD_GETLK(&mut lock))
        .map_err(|errno| of(&format!("F_OFD_GETLK failed: {}", errno.desc())))?;
    match i32::from(lock.l_type) == libc::F_UNLCK {
        true => Err(of(&format!(
            "the file is not locked: its daemon has ended, and process {pid} is another program"
        ))),
        false => Ok(()),
    }
}

/// Checks that SIGUSR2 does not kill the process. If /proc hides it, as systemd does for services with
/// `ProtectProc=` or `PrivateUsers=`, a locked pid file is the proof.
fn check_takes_signal(pid: i32, is_in_locked_file: bool) -> Result<(), DaemonError> {
    let status = match fs::read_to_string(format!("/proc/{pid}/status")) {
        Err(error) if error.kind() == ErrorKind::NotFound && is_in_locked_file => return Ok(()),
        status => status.map_err(|error| DaemonError::new(format!("process {pid}: {error}")))?,
    };
    match takes_signal(&status) {
        true => Ok(()),
        false => Err(DaemonError::new(format!(
            "process {pid} does not wait for SIGUSR2, which would end it: it is no daemon that can be \
             upgraded"
        ))),
    }
}

/// Whether, according to its `/proc/PID/status`, a process blocks SIGUSR2, as a daemon with a
/// signalfd does, or handles it.
fn takes_signal(status: &str) -> bool {
    let bit = 1_u64 << (Signal::SIGUSR2 as u32 - 1);
    let has = |name: &str| {
        let set = status.lines().find_map(|line| line.strip_prefix(name));
        set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
            .is_some_and(|set| set & bit > 0)
    };
    has("SigBlk:") || has("SigCgt:")
}

fn by_monitor(socket: &CtlSocket) -> Result<String, DaemonError> {
    let mut client = Client::connect(socket).map_err(DaemonError::new)?;
    let upgraded = client.execute("x-upgrade", Map::new()).map_err(DaemonError::new)?;
    let (pid, pause_us) = (&upgraded["pid"], upgraded["pause-us"].as_u64().unwrap_or(0));
    Ok(format!("Process {pid} serves now; guests waited for {} ms.", pause_us.div_ceil(1000)))
}

/// Upgrades by signal. The daemon does not answer, but it ends after a success.
fn by_signal(pid: i32, pidfile: Option<&Path>) -> Result<String, DaemonError> {
    let process = Pid::from_raw(pid);
    let failed = |errno: Errno| {
        DaemonError::new(format!("process {pid} cannot be signalled: {}", errno.desc()))
    };
    check_takes_signal(pid, pidfile.is_some())?;
    let successors = Successors::of(pid);
    kill(process, Signal::SIGUSR2).map_err(failed)?;
    let deadline = Instant::now() + PATIENCE;
    while kill(process, None).is_ok() && !has_ended(pid) {
        if Instant::now() > deadline {
            return Err(DaemonError::new(format!(
                "process {pid} still serves: its log has the reason why the upgrade failed"
            )));
        }
        thread::sleep(LOOK_AGAIN);
    }
    let deadline = Instant::now() + WRITES;
    loop {
        let serving = match pidfile {
            // The new process writes its ID before anything else.
            Some(pidfile) => pid_in(pidfile).ok().filter(|new| *new != pid),
            None => successors.serving(),
        };
        match serving {
            Some(new) => return Ok(format!("Process {new} serves now.")),
            None if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
            None => {
                let message = format!("process {pid} has ended, and no daemon serves now");
                return Err(DaemonError::new(message));
            }
        }
    }
}

/// Finds the processes that a daemon starts as replacements, by their command line.
struct Successors {
    command_line: Vec<u8>,
    /// Earlier processes with the same command line.
    before: Vec<i32>,
}

impl Successors {
    fn of(pid: i32) -> Self {
        let own = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let command_line = successors_line(&own);
        let before = with_command_line(&command_line);
        Successors { command_line, before }
    }

    /// The new process, if it serves.
    fn serving(&self) -> Option<i32> {
        let mut all = with_command_line(&self.command_line);
        all.retain(|pid| !self.before.contains(pid));
        all.into_iter().find(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            !name.is_empty() && name.trim_end() != TAKE_OVER
        })
    }
}

/// The command line of a replacement for a daemon with this one, as shown in /proc.
fn successors_line(daemon: &[u8]) -> Vec<u8> {
    let mut words: Vec<&[u8]> = daemon.split(|byte| *byte == 0).collect();
    if words.get(1).is_none_or(|first| *first != TAKE_OVER.as_bytes()) {
        words.insert(1, TAKE_OVER.as_bytes());
    }
    words.join(&0)
}

fn with_command_line(line: &[u8]) -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|own| own == line))
        .collect()
}

/// Whether a process is a zombie or gone.
fn has_ended(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_that_sigusr2_would_kill_gets_no_signal() {
        assert!(takes_signal("Name:\tx\nSigBlk:\t0000000000004803\nSigCgt:\t0000000000000000\n"));
        assert!(takes_signal("SigBlk:\t0000000000000000\nSigCgt:\t0000000000000800\n"));
        assert!(!takes_signal("SigBlk:\t0000000000004003\nSigIgn:\t0000000000000800\n"));
        let mut stranger = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(stranger.id()).unwrap();
        let refused = by_signal(pid, None).unwrap_err().to_string();
        assert!(refused.contains("does not wait for SIGUSR2"), "{refused}");
        // A SIGUSR2 would have killed it before.
        stranger.kill().unwrap();
        let status = stranger.wait().unwrap();
        assert!(status.to_string().contains("SIGKILL"), "{status}");
    }

    #[test]
    fn a_replacement_has_the_command_line_of_the_daemon() {
        let line = b"ringmill\0take-over\0serve\0disk.img\0";
        assert_eq!(successors_line(b"ringmill\0serve\0disk.img\0"), line);
        assert_eq!(successors_line(line), line);
    }

    #[test]
    fn a_stale_pid_file_is_refused() {
        let path = std::env::temp_dir().join(format!("upgrade-{}.pid", std::process::id()));
        let mut pidfile = daemon::pidfile::Pidfile::create(&path).unwrap();
        pidfile.fill().unwrap();
        assert!(check_is_locked(&path, 1).is_ok());
        drop(pidfile);
        fs::write(&path, "1\n").unwrap();
        let refused = check_is_locked(&path, 1).unwrap_err().to_string();
        fs::remove_file(&path).unwrap();
        assert!(refused.contains("the file is not locked"), "{refused}");
    }
}
