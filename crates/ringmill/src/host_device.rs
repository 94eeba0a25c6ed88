//! The kinds of block devices that `attach` makes: ublk, and the kernel's NBD client.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use control::HostDevice as Kind;
use daemon::ublk::control::{self as ublk, Order};
use daemon::ublk::wire::{Command as UblkCommand, Info, owner};
use daemon::{DaemonError, check_ublk};
use nix::errno::Errno;

use crate::kernel_nbd;

/// The file that the module of ublk makes.
const UBLK: &str = "/dev/ublk-control";

/// A device of this host, by its kind and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostDevice {
    pub(crate) kind: Kind,
    pub(crate) number: u32,
}

impl HostDevice {
    /// Returns the device with this path; `None`: it is of another kind.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let path = path.to_str()?;
        let of = |kind: Kind| {
            let number = path.strip_prefix(prefix(kind))?.parse().ok()?;
            Some(HostDevice { kind, number })
        };
        of(Kind::Ublk).or_else(|| of(Kind::Nbd))
    }

    pub(crate) fn path(self) -> PathBuf {
        format!("{}{}", prefix(self.kind), self.number).into()
    }

    /// Returns whether the device is there, of whatever program.
    pub(crate) fn is_there(self) -> bool {
        match self.kind {
            Kind::Ublk => self.path().exists(),
            Kind::Nbd => kernel_nbd::owner(self.number).is_some(),
        }
    }

    /// Returns whether the device is there, and is that of the export `id`.
    pub(crate) fn is_of(self, id: &str) -> bool {
        let is_own = |info: Option<Info>| info.is_some_and(|info| info.owner == owner(id));
        match self.kind {
            // Without an answer, it may be.
            Kind::Ublk => self.is_there() && ublk::info(self.number).map_or(true, is_own),
            Kind::Nbd => kernel_nbd::is_of(self.number, id),
        }
    }

    /// Removes the device of the export `id`, which no daemon serves. Requests fail.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub(crate) fn remove(self, id: &str) -> Result<(), Errno> {
        let number = self.number;
        match self.kind {
            Kind::Ublk => {
                let info = ublk::info(number).map_err(ublk::Failed::errno)?;
                if info.is_none_or(|info| info.owner != owner(id)) {
                    return Ok(());
                }
                for command in [UblkCommand::Stop, UblkCommand::DeleteLater] {
                    let order = Order { command, id: number, data: 0, memory: Vec::new() };
                    ublk::carry_out(order).map_err(ublk::Failed::errno)?;
                }
                Ok(())
            }
            Kind::Nbd if self.is_of(id) => kernel_nbd::disconnect(number).map_err(errno_of),
            Kind::Nbd => Ok(()),
        }
    }
}

fn errno_of(error: std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn prefix(kind: Kind) -> &'static str {
    match kind {
        Kind::Ublk => "/dev/ublkb",
        Kind::Nbd => "/dev/nbd",
    }
}

/// Returns the name of a kind, in lists.
pub(crate) fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Ublk => "ublk",
        Kind::Nbd => "nbd",
    }
}

/// Returns the lowest number of a device that is not there. `taken`: numbers that are recorded.
///
/// # Errors
///
/// The kernel's, of ublk.
pub(crate) fn free_number(
    kind: Kind,
    taken: impl Fn(HostDevice) -> bool,
) -> Result<u32, DaemonError> {
    let made = match kind {
        Kind::Ublk => ublk::devices().map_err(|failed| {
            let why = failed.errno().desc();
            let error = DaemonError::new(format!("looking for ublk devices failed: {why}"));
            error.with_hint(
                "ublk devices need root, or CAP_SYS_ADMIN and access to /dev/ublk-control.",
            )
        })?,
        Kind::Nbd => Vec::new(),
    };
    let is_free = |number: &u32| {
        let device = HostDevice { kind, number: *number };
        !taken(device) && made.iter().all(|made| made.id != *number) && !device.is_there()
    };
    Ok((0..).find(is_free).unwrap_or_default())
}

/// Chooses a kind: the one that the user has asked for, else ublk, or the NBD client where there is no ublk. Loads the
/// module.
///
/// # Errors
///
/// This kernel has no such devices, or this process may not make them.
pub(crate) fn choose(wanted: Option<Kind>) -> Result<Kind, DaemonError> {
    let no_ublk = match wanted {
        Some(Kind::Nbd) => None,
        Some(Kind::Ublk) | None => {
            let has_ublk = || Path::new(UBLK).exists();
            if !has_ublk() {
                load("ublk_drv");
            }
            match check_ublk() {
                Ok(()) => return Ok(Kind::Ublk),
                Err(error) if wanted.is_some() || has_ublk() => return Err(error),
                Err(error) => Some(error),
            }
        }
    };
    let has_nbd = || {
        kernel_nbd::is_there()
            .map_err(|error| DaemonError::new(format!("netlink cannot be used: {error}")))
    };
    if !has_nbd()? {
        load("nbd");
    }
    match (has_nbd()?, no_ublk) {
        (true, None) => Ok(Kind::Nbd),
        (true, Some(_)) => {
            log::warn!(
                "there is no ublk (modprobe ublk_drv): the device is one of the kernel's NBD client, \
                 which costs more per request"
            );
            Ok(Kind::Nbd)
        }
        (false, no_ublk) => Err(no_ublk.unwrap_or_else(|| {
            DaemonError::new("the kernel has no NBD client")
                .with_hint("Load its module: modprobe nbd. It needs Linux 4.12 or later.")
        })),
    }
}

/// Loads a module, if this process may, and the host has it. What was loaded shows in what can be done.
fn load(module: &str) {
    let mut modprobe = Command::new("modprobe");
    modprobe.args(["-q", module]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _ = modprobe.status();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_its_path() {
        for kind in [Kind::Ublk, Kind::Nbd] {
            let device = HostDevice { kind, number: 12 };
            assert_eq!(HostDevice::of(&device.path()), Some(device));
        }
        for other in ["/dev/nbd", "/dev/nbd0p1", "/dev/ublkc0", "nbd0", "/dev/nbd-1", "/dev/sda"] {
            assert_eq!(HostDevice::of(Path::new(other)), None, "{other}");
        }
    }
}
