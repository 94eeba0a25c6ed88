//! The daemon's process: what confines it, and which processes it has to do with.

use std::cell::OnceCell;
use std::rc::Rc;
use std::time::Duration;

use sandbox::{InForce, Sandbox};

use super::DaemonError;
use super::host::{Host, Successor};
use super::pidfile::Pidfile;
use super::service_manager::ServiceManager;
use super::spawner::Spawner;

/// The process. Once it is confined, only the spawner starts others.
pub(super) struct Process {
    pub(super) host: Rc<dyn Host>,
    pub(super) manager: Option<Rc<ServiceManager>>,
    /// `None` with the sandbox switched off.
    pub(super) sandbox: Option<Sandbox>,
    /// The restrictions in force. Empty until [`confine`](Self::confine).
    in_force: OnceCell<InForce>,
    pub(super) spawner: Option<Rc<Spawner>>,
    pub(super) pidfile: Rc<OnceCell<Pidfile>>,
    /// `--stop-timeout`.
    pub(super) stop_timeout: Option<Duration>,
}

impl Process {
    pub(super) fn new(
        host: Rc<dyn Host>,
        manager: Option<ServiceManager>,
        sandbox: Option<Sandbox>,
    ) -> Self {
        Process {
            host,
            manager: manager.map(Rc::new),
            sandbox,
            in_force: OnceCell::new(),
            spawner: None,
            pidfile: Rc::default(),
            stop_timeout: None,
        }
    }

    /// Confines this thread to what serving needs, and logs what is in force.
    pub(super) fn confine(&self, rings_are_restricted: bool) -> Result<(), DaemonError> {
        let Some(sandbox) = &self.sandbox else {
            log::info!("sandbox: off");
            return Ok(());
        };
        let in_force = sandbox.serve(rings_are_restricted);
        let in_force = in_force.map_err(|error| DaemonError::new(error).of("sandbox"))?;
        log::info!("sandbox: {in_force}");
        let _ = self.in_force.set(in_force);
        Ok(())
    }

    /// Whether [`confine`](Self::confine) is possible.
    pub(super) fn rehearse_confining(&self, rings_are_restricted: bool) -> Result<(), DaemonError> {
        let Some(sandbox) = &self.sandbox else { return Ok(()) };
        let rehearsed = sandbox.rehearse(rings_are_restricted);
        rehearsed.map(drop).map_err(|error| DaemonError::new(error).of("sandbox"))
    }

    pub(super) fn in_force(&self) -> Option<&InForce> {
        self.in_force.get()
    }

    /// The way to start the new program of an upgrade. `None`: there is none.
    pub(super) fn successor(&self) -> Option<Rc<dyn Successor>> {
        let spawner = || self.spawner.clone().filter(|spawner| spawner.starts());
        self.host.successor().or_else(|| spawner().map(|spawner| spawner as Rc<dyn Successor>))
    }

    /// Tells the service manager that the process ends.
    pub(super) fn is_stopping(&self) {
        if let Some(manager) = &self.manager {
            manager.stopping(self.stop_timeout);
        }
    }
}
