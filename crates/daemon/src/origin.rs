//! Where the configuration comes from.

use control::Step;

use super::state::Keeping;
use super::upgrade::{TakenListener, TakenOver, TakenPart};

/// Where the configuration comes from, and how far it has been carried out: the command line or another process
/// first, then the state file.
#[derive(Default)]
pub(super) struct Origin {
    /// The command line of a daemon without a monitor whose configuration its options do not show (`serve`).
    pub(super) command_line: Option<Vec<String>>,
    /// The state that another process has handed over, until it is taken over.
    pub(super) taken: Option<TakenOver>,
    /// `None` without `--state`.
    pub(super) keeping: Option<Keeping>,
    /// Steps from the state file that the command line lacks. Empty once carried out.
    pub(super) kept: Vec<Step>,
    /// The command line is carried out.
    pub(super) serves: bool,
}

impl Origin {
    /// Takes the socket of that purpose, if another process has handed it over.
    pub(super) fn listener(&mut self, name: &str) -> Option<TakenListener> {
        self.taken.as_mut()?.listener(name)
    }

    /// Takes the sockets of the NBD server that another process has handed over.
    pub(super) fn nbd_listeners(&mut self) -> Vec<TakenListener> {
        self.taken.as_mut().map(TakenOver::nbd_listeners).unwrap_or_default()
    }

    /// Takes what another process has handed over of an export.
    pub(super) fn export(&mut self, id: &str) -> Option<TakenPart<'_>> {
        self.taken.as_mut()?.export(id)
    }
}
