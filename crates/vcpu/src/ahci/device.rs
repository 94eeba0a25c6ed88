//! The controller, its drives on their loops, and the interrupt line.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use block::node::BlockNode;
use devices::ahci::{Ahci, Drive, DriveConfig};
use event_loop::{LoopHandle, oneshot};
use guest_memory::GuestMemory;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

use crate::machine::{Machine, OnLoop};

/// A controller from a vCPU thread's side: registers, and the interrupt line.
#[derive(Clone)]
pub struct Controller {
    /// The registers.
    pub ahci: Arc<Ahci>,
    /// The line.
    pub line: Arc<Line>,
}

impl Controller {
    /// A controller with `ports` ports and no drives.
    ///
    /// # Errors
    ///
    /// `ports` is not 1 to 32, or eventfd(2) fails.
    pub fn new(ports: usize, memory: Arc<GuestMemory>) -> Result<Controller> {
        let line = Arc::new(Line::new()?);
        let told = line.clone();
        let ahci = Ahci::new(ports, memory, move |level| told.set(level));
        Ok(Controller { ahci: ahci.map_err(|error| anyhow!("{error}"))?, line })
    }
}

/// The interrupt line, as an interrupt controller sees it.
pub struct Line {
    level: AtomicBool,
    /// Written each time the line goes up.
    raised: OwnedFd,
}

impl Line {
    fn new() -> Result<Line> {
        let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        Ok(Line { level: AtomicBool::new(false), raised: fd.context("eventfd")?.into() })
    }

    fn set(&self, level: bool) {
        self.level.store(level, Ordering::Release);
        if level {
            // Cannot overflow: `wait` resets it to 0.
            let _ = nix::unistd::write(&self.raised, &1u64.to_ne_bytes());
        }
    }

    /// Whether it is up.
    pub fn is_up(&self) -> bool {
        self.level.load(Ordering::Acquire)
    }

    /// Sleeps until the line is up, at most `limit`. Returns at once if it is up, as for a level-triggered interrupt.
    /// Returns how often the line went up since the last call. For one thread at a time.
    ///
    /// # Errors
    ///
    /// ppoll(2) or read(2) on the eventfd.
    pub fn wait(&self, limit: Duration) -> Result<u64> {
        if !self.is_up() {
            let mut fds = [PollFd::new(self.raised.as_fd(), PollFlags::POLLIN)];
            match ppoll(&mut fds, Some(TimeSpec::from(limit)), None) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error).context("waiting for an interrupt"),
            }
        }
        let mut count = [0; 8];
        match nix::unistd::read(&self.raised, &mut count) {
            Ok(_) => Ok(u64::from_ne_bytes(count)),
            Err(Errno::EAGAIN) => Ok(0),
            Err(error) => Err(error).context("reading the interrupt's eventfd"),
        }
    }
}

/// A running AHCI controller: I/O thread i, modulo their number, serves port i. Dropping it detaches the drives and waits
/// until nothing is in flight.
pub struct AhciDevice {
    /// Dropped first: commands in flight still raise the controller's line.
    drives: Vec<OnLoop>,
    controller: Controller,
}

impl AhciDevice {
    /// A controller with a drive for each of `disks`.
    ///
    /// # Errors
    ///
    /// There are no disks, or more than 32, or an I/O thread cannot use one.
    pub fn start(machine: &Machine, disks: &[Arc<dyn BlockNode>]) -> Result<AhciDevice> {
        let controller = Controller::new(disks.len(), machine.memory().clone())?;
        let mut device = AhciDevice { drives: Vec::new(), controller };
        for (port, disk) in disks.iter().enumerate() {
            let ahci = &device.controller.ahci;
            let drive = start_drive(machine.loop_of(port), ahci, port, disk.clone())?;
            device.drives.push(drive);
        }
        Ok(device)
    }

    /// The controller, for the vCPUs.
    pub fn controller(&self) -> &Controller {
        &self.controller
    }
}

fn start_drive(
    handle: &LoopHandle,
    ahci: &Arc<Ahci>,
    port: usize,
    disk: Arc<dyn BlockNode>,
) -> Result<OnLoop> {
    let ahci = ahci.clone();
    OnLoop::start(handle, move |event_loop| {
        let geometry = disk.geometry();
        let config = DriveConfig {
            geometry,
            writable: true,
            write_cache: true,
            serial: format!("vcpu-{port}"),
            model: "ringmill".into(),
        };
        let channel = disk.open_channel(event_loop).context("opening the disk")?;
        let drive = Drive::attach(event_loop, &ahci, port, channel, config)
            .map_err(|error| anyhow!("{error}"))?;
        Ok(async move {
            let (sender, stopped) = oneshot::channel();
            drive.detach(move || sender.send(()));
            let _ = stopped.await;
        })
    })
}
