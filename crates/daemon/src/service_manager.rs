//! What a service manager is told, sd_notify(3): that the daemon serves, reloads, stops, still lives.
//!
//! A datagram of lines to the socket that `NOTIFY_SOCKET` names. Nothing is told, and nobody wakes for it,
//! where the variable is not set.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;
use std::{env, io};

use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

use crate::DaemonError;

/// How long a manager that does not read is waited for: it should not miss what it is told, and no request
/// waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// The longest status line, bytes: more is of no use to those who read it.
const MAX_STATUS: usize = 512;

/// The manager that has started this process and wants to know how it goes.
#[derive(Debug)]
pub struct ServiceManager {
    socket: UnixDatagram,
    /// In microseconds; `None`: no watchdog.
    watchdog_usec: Option<u64>,
}

impl ServiceManager {
    /// The one of the environment. A watchdog is asked for from this process, or from `parent`, which has
    /// started it to go on in its place.
    ///
    /// # Errors
    ///
    /// The variables are wrong, or there is no socket to be had.
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
        // Once and for all: what the daemon may do is less later.
        address.and_then(|address| socket.connect_addr(&address)).map_err(failed)?;
        socket.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        let ids = [Some(Pid::this()), parent];
        let watchdog_usec = watchdog(&ids, |name| env::var(name).ok()).map_err(DaemonError::new)?;
        Ok(Some(ServiceManager { socket, watchdog_usec }))
    }

    /// How long the manager waits for a sign of life before it ends the daemon, nanoseconds.
    pub(crate) fn watchdog_ns(&self) -> Option<u64> {
        self.watchdog_usec.map(|usec| usec.saturating_mul(1000))
    }

    /// Everything that was asked for serves; after [`reloading`](Self::reloading) as well. `status`
    /// says what.
    pub(crate) fn ready(&self, status: &str) {
        // The manager may have started another process, whose place this one has taken.
        self.tell(&format!("READY=1\nMAINPID={}\n{}", Pid::this(), status_line(status)));
    }

    /// A change of the whole daemon begins, which [`ready`](Self::ready) ends: by this process or by the
    /// one that takes its place.
    pub(crate) fn reloading(&self) {
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| {
            now.tv_sec().saturating_mul(1_000_000).saturating_add(now.tv_nsec() / 1000)
        });
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={now}"));
    }

    /// The process `pid` serves from here on, in the place of this one: to be told by this one, which the
    /// manager believes. That it is ready as well: when the other says so first, it is not believed yet.
    pub(crate) fn hand_over(&self, pid: u32) {
        self.tell(&format!("READY=1\nMAINPID={pid}"));
    }

    /// The daemon ends, in order.
    pub(crate) fn stopping(&self) {
        self.tell("STOPPING=1\nSTATUS=Finishing the requests in flight");
    }

    /// For people.
    pub(crate) fn status(&self, status: &str) {
        self.tell(&status_line(status));
    }

    /// All threads work.
    pub(crate) fn alive(&self) {
        self.tell("WATCHDOG=1");
    }

    fn tell(&self, lines: &str) {
        if let Err(error) = self.socket.send(lines.as_bytes()) {
            // Who is told nothing acts on it: there is no more to be done here.
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

/// The time of the watchdog, microseconds, if one of these processes is watched: sd_watchdog_enabled(3).
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
    fn whose_watchdog_it_is() {
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
