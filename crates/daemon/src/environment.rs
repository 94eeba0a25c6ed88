//! What a process is born into.

use std::env;

use nix::unistd::Pid;
use sandbox::Sandbox;

use super::DaemonError;
use crate::service_manager::ServiceManager;
use crate::socket_activation::ActivationSockets;

/// What the process was started with, beside its command line.
#[derive(Debug, Default)]
pub struct Environment {
    /// Sockets to listen on.
    pub given: ActivationSockets,
    /// Who wants to know how it goes.
    pub manager: Option<ServiceManager>,
    /// What it may do; `None`: all that its user may.
    pub sandbox: Option<Sandbox>,
}

impl Environment {
    /// Those of this process, and of `parent`, which has started it to go on in its place, without a
    /// sandbox. To be called once, before anything is opened.
    ///
    /// # Errors
    ///
    /// The environment says what is not so.
    pub fn of_environment(parent: Option<Pid>) -> Result<Self, DaemonError> {
        let given = ActivationSockets::of_environment(parent)?;
        let manager = ServiceManager::of_environment(parent)?;
        Ok(Environment { given, manager, sandbox: None })
    }

    /// Those that another process was in, which hands over. Sockets that it was given come with all else.
    /// `watchdog`: it had to give signs of life.
    ///
    /// # Errors
    ///
    /// As of [`of_environment`](Self::of_environment).
    pub fn taken_over(watchdog: bool) -> Result<Self, DaemonError> {
        // That of the first in the row.
        let watched = env::var("WATCHDOG_PID").ok().filter(|_| watchdog);
        let watched = watched.and_then(|pid| pid.parse().ok()).map(Pid::from_raw);
        let manager = ServiceManager::of_environment(watched)?;
        Ok(Environment { manager, ..Environment::default() })
    }
}
