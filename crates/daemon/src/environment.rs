//! The environment that a process is started in.

use std::env;
use std::path::PathBuf;
use std::rc::Rc;

use nix::unistd::Pid;
use sandbox::Sandbox;

use super::DaemonError;
use crate::host::{Host, OperatingSystem};
use crate::service_manager::ServiceManager;
use crate::socket_activation::ActivationSockets;

/// Inherited resources and limits, besides the command line.
#[derive(Debug)]
pub struct Environment {
    /// Sockets to listen on.
    pub given: ActivationSockets,
    /// The service manager to inform.
    pub manager: Option<ServiceManager>,
    /// The restrictions of the process; `None`: only those of its user.
    pub sandbox: Option<Sandbox>,
    /// The folder for journals of qcow2 images; `None`: that of the user or the service.
    pub journals: Option<PathBuf>,
    /// With a folder in `journals`: the folders of other daemons. Without: those of this host are used.
    pub journals_besides: Vec<PathBuf>,
    /// Threads and clock.
    pub host: Rc<dyn Host>,
}

impl Default for Environment {
    fn default() -> Self {
        Environment {
            given: ActivationSockets::default(),
            manager: None,
            sandbox: None,
            journals: None,
            journals_besides: Vec::new(),
            host: Rc::new(OperatingSystem),
        }
    }
}

impl Environment {
    /// Returns the environment of this process, or of `parent`.
    ///
    /// `parent` is the process that has started this one as its replacement, without a sandbox. Call this
    /// once, before any file is opened.
    ///
    /// # Errors
    ///
    /// The environment contains wrong values.
    pub fn of_environment(parent: Option<Pid>) -> Result<Self, DaemonError> {
        let given = ActivationSockets::of_environment(parent)?;
        let manager = ServiceManager::of_environment(parent)?;
        Ok(Environment { given, manager, ..Environment::default() })
    }

    /// Returns the environment of the previous process.
    ///
    /// Its inherited sockets come with the handover. `watchdog`: the previous process was watched.
    ///
    /// # Errors
    ///
    /// As of [`of_environment`](Self::of_environment).
    pub fn taken_over(watchdog: bool) -> Result<Self, DaemonError> {
        // The variable names the first process in the chain of upgrades.
        let watched = env::var("WATCHDOG_PID").ok().filter(|_| watchdog);
        let watched = watched.and_then(|pid| pid.parse().ok()).map(Pid::from_raw);
        let manager = ServiceManager::of_environment(watched)?;
        Ok(Environment { manager, ..Environment::default() })
    }
}
