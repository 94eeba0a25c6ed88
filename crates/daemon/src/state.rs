//! `--state`: keeps the configuration in a file. The file has a change before its command is answered.
//!
//! A snapshot and the end of a mirror job move users to another image. The file has such a change while the
//! users' requests are still held. Otherwise a restart after a kill would open the old image, without the
//! latest writes.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

use control::{Action, SavedState, Step, check_configuration, configuration, relative_path};
use event_loop::until;
use serde_json::{Map, Value as Json, json};

use super::exports::ExportState;
use super::host::on_a_thread;
use super::signals::StopSignals;
use super::{Daemon, DaemonError};
use crate::state_file::StateFile;

/// The state file, and the part of its content that does not change.
pub struct Keeping {
    /// The state file, locked.
    pub file: Arc<StateFile>,
    /// The configuration options of the command line.
    command_line: Vec<String>,
    /// Identifies a file. `None`: the state file has no identities.
    identify: Option<Identify>,
    /// Identities in the state file. A file keeps the identity that it had when a node opened it.
    files: RefCell<Map<String, Json>>,
}

/// Returns what identifies the file of this path.
pub type Identify = fn(&Path) -> Json;

impl Keeping {
    /// Returns the state in `file`. `given`: the steps of the command line.
    pub fn new(file: StateFile, given: &[Step]) -> Self {
        let command_line = configuration(given);
        Keeping { file: Arc::new(file), command_line, identify: None, files: RefCell::default() }
    }

    /// Has the state file identify the files of all nodes, backing files included. `known`: identities that another
    /// process has recorded of files that are open since.
    #[must_use]
    pub fn with_files(self, identify: Identify, known: Map<String, Json>) -> Self {
        Keeping { identify: Some(identify), files: RefCell::new(known), ..self }
    }

    /// Returns the identities of these files.
    fn identities<'a>(&self, paths: impl Iterator<Item = &'a Path>) -> Option<Map<String, Json>> {
        let identify = self.identify?;
        let mut known = self.files.borrow_mut();
        let paths = paths.filter_map(|path| std::path::absolute(path).ok());
        let identity = |path: PathBuf| {
            let name = path.to_str()?;
            let identity = known.get(name).cloned().unwrap_or_else(|| identify(&path));
            Some((name.to_owned(), identity))
        };
        let files: Map<_, _> = paths.filter_map(identity).collect();
        known.clone_from(&files);
        Some(files)
    }
}

/// Returns the error for a change that was carried out and is not in the state file.
pub(super) fn not_recorded(error: DaemonError) -> DaemonError {
    error.of("carried out, but not kept for a restart")
}

/// Waits for a change. A stop signal ends the wait, unless `moving` is set: then the change is finished first, if half of
/// `--stop-timeout` suffices.
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
        let enough = stop.part_has_passed(2);
        let _ = until(change, until(stop.insisted(), enough)).await;
    }
    Err(signal)
}

impl Daemon {
    /// Carries out the steps of the state file that the command line lacks, as commands. Then writes the first
    /// state.
    pub(super) async fn make_kept(&mut self) -> Result<(), DaemonError> {
        let kept = std::mem::take(&mut self.origin.kept);
        let Some(keeping) = &self.origin.keeping else { return Ok(()) };
        // The user of `--user` may have no access to the folder.
        keeping.file.check_access().map_err(DaemonError::new)?;
        let path = keeping.file.path().display().to_string();
        for (index, step) in kept.iter().enumerate() {
            let made = self.make(std::slice::from_ref(step)).await;
            made.map_err(|error| {
                let advice = self.without(&kept[index..]);
                error.of(&format!("state file '{path}'")).and_hint(&advice)
            })?;
        }
        self.record().await
    }

    /// How to start without the first of these steps of the state file, and without those that refer to it.
    fn without(&self, steps: &[Step]) -> String {
        let (failed, rest) = steps.split_at(1);
        let mut inventory = self.inventory.clone();
        let fails = |step: &&Step| match inventory.with(step) {
            Ok(with) => {
                inventory = with;
                false
            }
            Err(_) => true,
        };
        let lines = failed.iter().chain(rest.iter().filter(fails));
        // As they are in the file.
        let lines: Vec<_> = lines.map(|step| format!("  {}", json!(step.shown()))).collect();
        format!("To start without it, remove from \"options\" in that file:\n{}", lines.join("\n"))
    }

    /// Writes the current configuration to the state file, on a separate thread: the write waits for the disk.
    ///
    /// # Errors
    ///
    /// If the state file cannot be written, or the configuration cannot be expressed. Both are logged, too.
    pub(super) async fn record(&self) -> Result<(), DaemonError> {
        let Some(keeping) = &self.origin.keeping else { return Ok(()) };
        let recorded = match self.state(keeping) {
            Ok(None) => return Ok(()),
            Ok(Some(text)) => {
                let file = keeping.file.clone();
                let replace = move || file.replace(&text);
                let written = on_a_thread(&*self.process.host, "state", replace).await;
                written.unwrap_or_else(|error| Err(format!("no thread can be started: {error}")))
            }
            Err(why) => Err(format!("state file '{}': {why}", keeping.file.path().display())),
        };
        recorded.map_err(|why| {
            log::error!("{why}; after a restart the configuration would be an older one");
            DaemonError::new(why)
        })
    }

    /// The text of the state file; `None` if the file has it. Most commands do not change it, and the check of all
    /// options takes longer than they do.
    fn state(&self, keeping: &Keeping) -> Result<Option<String>, String> {
        // An export that is shutting down is left out: a restart must not bring it back. An export with bitmaps is
        // left out, too: a kill leaves bitmaps inconsistent, and the restart would fail.
        let stays = |id: &str| {
            let is_ending = self.exports.state(id) == Some(ExportState::ShuttingDown);
            !is_ending && !self.inventory.shows_bitmaps(id)
        };
        let describe = |names: Vec<&str>| self.nodes.describe(names.into_iter());
        let options = self.inventory.configuration(describe, stays);
        let options = options.map_err(|error| error.to_string())?;
        let files = self.nodes.all().filter_map(|node| node.options.driver.local_file());
        let files = keeping.identities(files);
        let text = SavedState::text_with(&keeping.command_line, &options, files.as_ref());
        if keeping.file.has(&text) {
            return Ok(None);
        }
        check_configuration(&options).map_err(|error| error.to_string())?;
        Ok(Some(text))
    }

    /// Refuses relative paths if there is a state file: the next start may be in another folder.
    pub(super) fn check_paths(&self, action: &Action) -> Result<(), DaemonError> {
        if self.origin.keeping.is_some() { check_path(action) } else { Ok(()) }
    }
}

/// Refuses a relative path.
pub(super) fn check_path(action: &Action) -> Result<(), DaemonError> {
    match relative_path(action) {
        Some(path) => {
            let path = path.display();
            Err(DaemonError::new(format!("with --state, '{path}' must be an absolute path"))
                .with_hint("The daemon may be started in another folder next time."))
        }
        None => Ok(()),
    }
}
