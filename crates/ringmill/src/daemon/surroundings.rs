//! What a process is born into.

use std::env;

use nix::unistd::Pid;
use sandbox::Sandbox;

use super::DaemonError;
use crate::given::GivenSockets;
use crate::service_manager::ServiceManager;

/// What the process was started with, beside its command line.
#[derive(Debug, Default)]
pub(crate) struct Surroundings {
    /// Sockets to listen on.
    pub(crate) given: GivenSockets,
    /// Who wants to know how it goes.
    pub(crate) manager: Option<ServiceManager>,
    /// What it may do; `None`: all that its user may.
    pub(crate) sandbox: Option<Sandbox>,
}

impl Surroundings {
    /// Those of this process, and of `parent`, which has started it to go on in its place, without a
    /// sandbox. To be called once, before anything is opened.
    ///
    /// # Errors
    ///
    /// The environment says what is not so.
    pub(crate) fn of_environment(parent: Option<Pid>) -> Result<Self, DaemonError> {
        let given = GivenSockets::of_environment(parent)?;
        let manager = ServiceManager::of_environment(parent)?;
        Ok(Surroundings { given, manager, sandbox: None })
    }

    /// Those that another process was in, which hands over. Sockets that it was given come with all else.
    /// `watchdog`: it had to give signs of life.
    ///
    /// # Errors
    ///
    /// As of [`of_environment`](Self::of_environment).
    pub(crate) fn taken_over(watchdog: bool) -> Result<Self, DaemonError> {
        // That of the first in the row.
        let watched = env::var("WATCHDOG_PID").ok().filter(|_| watchdog);
        let watched = watched.and_then(|pid| pid.parse().ok()).map(Pid::from_raw);
        let manager = ServiceManager::of_environment(watched)?;
        Ok(Surroundings { manager, ..Surroundings::default() })
    }
}
