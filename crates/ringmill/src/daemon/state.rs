//! `--state`: the configuration is in a file before a command that changed it is answered.
//!
//! A change that moves users to another image, a snapshot or the end of a mirror job, is in the file while
//! their requests are still held: else what they write there would be missing after a kill.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use control::{Action, State, Step, configuration, relative_path};
use event_loop::oneshot;

use super::exports::State as ExportState;
use super::signal::until;
use super::signals::StopSignals;
use super::upgrade::words;
use super::{Daemon, DaemonError};
use crate::state_file::StateFile;

/// The file, and what belongs in it.
pub(crate) struct Keeping {
    pub(crate) file: Arc<StateFile>,
    /// Options of the command line that are configuration.
    command_line: Vec<String>,
}

impl Keeping {
    /// `given`: the steps of the command line.
    pub(crate) fn new(file: StateFile, given: &[Step]) -> Self {
        Keeping { file: Arc::new(file), command_line: configuration(given) }
    }
}

/// What is told of a change that is made and not in the file.
pub(super) fn not_recorded(error: DaemonError) -> DaemonError {
    error.of("carried out, but not kept for a restart")
}

/// While it is there, a signal that stops the daemon waits for the change that is under way.
pub(super) struct Moving(Rc<Cell<bool>>);

impl Moving {
    pub(super) fn new(moving: &Rc<Cell<bool>>) -> Self {
        moving.set(true);
        Moving(moving.clone())
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Waits for a change, until a signal comes while it can be left half done.
pub(super) async fn unless_stopped<T>(
    change: impl Future<Output = T>,
    moving: &Cell<bool>,
    stop: &mut StopSignals,
) -> Result<T, &'static str> {
    let mut change = pin!(change);
    let signal = match until(change.as_mut(), stop.next()).await {
        Ok(changed) => return Ok(changed),
        Err(signal) => signal,
    };
    if moving.get() {
        let _ = until(change, stop.insisted(signal)).await;
    }
    Err(signal)
}

impl Daemon {
    /// Makes what the state file has beside the command line, as commands would, and writes the first state.
    pub(super) async fn make_kept(&mut self) -> Result<(), DaemonError> {
        let kept = std::mem::take(&mut self.kept);
        let Some(keeping) = &self.keeping else { return Ok(()) };
        let path = keeping.file.path().display().to_string();
        self.make(&kept).await.map_err(|error| error.of(&format!("state file '{path}'")))?;
        self.record().await
    }

    /// Has the state file say what there is now. On a thread of its own, since that waits for the disk.
    ///
    /// # Errors
    ///
    /// It does not. The log has it, too.
    pub(super) async fn record(&self) -> Result<(), DaemonError> {
        let Some(keeping) = &self.keeping else { return Ok(()) };
        let recorded = match self.state(keeping) {
            Ok(text) => {
                let (done, is_done) = oneshot::channel();
                let file = keeping.file.clone();
                let write = move || done.send(file.replace(&text));
                match thread::Builder::new().name("state".into()).spawn(write) {
                    Ok(_) => is_done.await.unwrap_or_else(|_| Err("its thread has ended".into())),
                    Err(error) => Err(format!("no thread can be started: {error}")),
                }
            }
            Err(why) => Err(format!("state file '{}': {why}", keeping.file.path().display())),
        };
        recorded.map_err(|why| {
            log::error!("{why}; after a restart the configuration would be an older one");
            DaemonError::new(why)
        })
    }

    fn state(&self, keeping: &Keeping) -> Result<String, String> {
        // What is about to be gone does not come back.
        let offered = |id: &str| {
            let stays = self.exports.state(id) != Some(ExportState::ShuttingDown);
            stays.then(|| self.exports.nodes_of(id))
        };
        let options = self.definitions.configuration(&self.nodes, offered)?;
        words(&options)?;
        Ok(State::text(&keeping.command_line, &options))
    }

    /// With a state file, paths must not depend on the folder that the daemon is in.
    pub(super) fn check_paths(&self, action: &Action) -> Result<(), DaemonError> {
        match relative_path(action).filter(|_| self.keeping.is_some()) {
            Some(path) => {
                let path = path.display();
                Err(DaemonError::new(format!("with --state, '{path}' must be an absolute path"))
                    .with_hint("The daemon may be started in another folder next time."))
            }
            None => Ok(()),
        }
    }
}
