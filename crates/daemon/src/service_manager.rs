//! Reports to a service manager, sd_notify(3): ready, reloading, stopping, alive.
//!
//! A report is a datagram to the socket that `NOTIFY_SOCKET` names. Without the variable there are no reports
//! and no wake-ups for them.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;
use std::{env, io};

use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

use crate::DaemonError;

/// How long to wait for a manager that does not read. It should not miss a report, and no request
/// waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// Longest status line in bytes; a longer one is not useful.
const MAX_STATUS: usize = 512;

/// Time from `--stop-timeout` to the end of the process, at most.
const STOP_MARGIN: Duration = Duration::from_secs(5);

/// The manager that has started this process and awaits reports.
#[derive(Debug)]
pub struct ServiceManager {
    socket: UnixDatagram,
    /// Interval of the watchdog in microseconds; `None`: no watchdog.
    watchdog_usec: Option<u64>,
}

impl ServiceManager {
    /// The manager named by the environment. The watchdog may name this process, or `parent`, if that has
    /// started this process as its replacement.
    ///
    /// # Errors
    ///
    /// The variables are wrong, or no socket can be created.
    pub(crate) fn of_environment(parent: Option<Pid>) -> Result<Option<Self>, DaemonError> {
        let Some(name) = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let name = name.into_vec();
        let address = match name.split_first() {
            Some((b'@', name)) => SocketAddr::from_abstract_name(name),
            Some((b'/', _)) => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(&name)),
            _ => Err(io::Error::from(io::ErrorKind::Unsupported)),
        };
        let failed = |error: io::Error| DaemonError::new(format!("NOTIFY_SOCKET: {error}"));
        let socket = UnixDatagram::unbound().map_err(failed)?;
        // Connected now: a confined daemon cannot connect later.
        address.and_then(|address| socket.connect_addr(&address)).map_err(failed)?;
        socket.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        let ids = [Some(Pid::this()), parent];
        let watchdog_usec = watchdog(&ids, |name| env::var(name).ok()).map_err(DaemonError::new)?;
        Ok(Some(ServiceManager { socket, watchdog_usec }))
    }

    /// The manager ends the daemon without a sign of life for this long, in nanoseconds.
    pub(crate) fn watchdog_ns(&self) -> Option<u64> {
        self.watchdog_usec.map(|usec| usec.saturating_mul(1000))
    }

    /// Reports that all configured services run, also at the end of [`reloading`](Self::reloading). `status`
    /// is the status line.
    pub(crate) fn ready(&self, status: &str) {
        // The manager may have started an earlier process of a chain of upgrades.
        self.tell(&format!("READY=1\nMAINPID={}\n{}", Pid::this(), status_line(status)));
    }

    /// Reports the beginning of an upgrade. [`ready`](Self::ready) ends it, from this process or the
    /// next one.
    pub(crate) fn reloading(&self) {
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| {
            now.tv_sec().saturating_mul(1_000_000).saturating_add(now.tv_nsec() / 1000)
        });
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={now}"));
    }

    /// Reports that the process `pid` replaces this one and is ready. This process has to report that, because
    /// the manager does not accept reports of an unknown process.
    pub(crate) fn hand_over(&self, pid: u32) {
        self.tell(&format!("READY=1\nMAINPID={pid}"));
    }

    /// Reports that the daemon stops, and how long that may take.
    pub(crate) fn stopping(&self, timeout: Option<Duration>) {
        let extended = timeout.map_or_else(String::new, |timeout| {
            format!("\nEXTEND_TIMEOUT_USEC={}", (timeout + STOP_MARGIN).as_micros())
        });
        self.tell(&format!("STOPPING=1\nSTATUS=Finishing the requests in flight{extended}"));
    }

    /// Reports a status line for people.
    pub fn status(&self, status: &str) {
        self.tell(&status_line(status));
    }

    /// Reports that all threads respond.
    pub(crate) fn alive(&self) {
        self.tell("WATCHDOG=1");
    }

    fn tell(&self, lines: &str) {
        if let Err(error) = self.socket.send(lines.as_bytes()) {
            // Nothing more can be done here.
            log::debug!("the service manager cannot be told of {lines:?}: {error}");
        }
    }
}

fn status_line(status: &str) -> String {
    let mut line = String::from("STATUS=");
    let chars = status.chars().map(|char| if char.is_control() { ' ' } else { char });
    for char in chars {
        if line.len() + char.len_utf8() > MAX_STATUS {
            break;
        }
        line.push(char);
    }
    line
}

/// Returns the watchdog's interval in microseconds: sd_watchdog_enabled(3).
///
/// `None`: none of these processes is watched.
///
/// # Errors
///
/// `WATCHDOG_PID` or `WATCHDOG_USEC` is no number above 0.
pub fn watchdog(
    ids: &[Option<Pid>],
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<u64>, String> {
    let number = |name: &str| match variable(name).map(|text| text.parse::<u64>()) {
        None => Ok(None),
        Some(Ok(number)) if number > 0 => Ok(Some(number)),
        Some(_) => Err(format!("{name} in the environment is not a number above 0")),
    };
    let is_meant = match number("WATCHDOG_PID")? {
        None => true,
        Some(pid) => i32::try_from(pid).is_ok_and(|pid| ids.contains(&Some(Pid::from_raw(pid)))),
    };
    Ok(number("WATCHDOG_USEC")?.filter(|_| is_meant))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_is_for_the_named_process() {
        let of = |variables: &[(&str, &str)]| {
            let variable = |name: &str| {
                let found = variables.iter().find(|(other, _)| *other == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            watchdog(&[Some(Pid::from_raw(7)), None], variable)
        };
        let usec = ("WATCHDOG_USEC", "3000000");
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&[usec]), Ok(Some(3_000_000)));
        assert_eq!(of(&[usec, ("WATCHDOG_PID", "7")]), Ok(Some(3_000_000)));
        assert_eq!(of(&[usec, ("WATCHDOG_PID", "8")]), Ok(None));
        assert_eq!(of(&[usec, ("WATCHDOG_PID", "4294967303")]), Ok(None));
        for wrong in ["", "0", "-1", "x"] {
            assert!(of(&[("WATCHDOG_USEC", wrong)]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_status_is_one_line_and_no_longer_than_it_may_be() {
        assert_eq!(status_line("a\nREADY=1"), "STATUS=a READY=1");
        let line = status_line(&"\u{20ac}".repeat(400));
        assert!(line.len() <= MAX_STATUS && line.len() > MAX_STATUS - 3, "{}", line.len());
    }
}
