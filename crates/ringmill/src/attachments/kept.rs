//! The state of an attachment's daemon: the nodes as commands of its monitor have left them.
//!
//! A snapshot, a mirror or a commit moves the disk to other files. The next daemon of a device that waits opens these files.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use control::{
    Action, Command, Merged, SavedState, ServeOptions, Step, parse_args, without_configuration,
};
use daemon::state_file::StateFile;
use daemon::{DaemonError, Keeping};
use serde_json::{Map, Value as Json};

use super::identity::{Identity, Image, replaced};
use super::{Attached, FOLDER, failed};
use crate::list::image_of;

/// The state file. It has a folder of its own: the sandbox lets the daemon replace files there.
const NAME: &str = "state";

/// What the state file of an attachment has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept {
    /// The node of the export; empty: the export was removed.
    pub(crate) node: String,
    /// The image of that node; `None`: it is no file.
    pub(crate) image: Option<Image>,
    files: Map<String, Json>,
    /// Commands have changed the configuration.
    pub(super) is_changed: bool,
}

/// Returns what identifies a file, as the state file has it.
pub(crate) fn identify(path: &Path) -> Json {
    Identity::of(path).map_or(Json::Null, |identity| identity.to_json())
}

/// Opens the state file in its folder, and returns the steps of the daemon. `is_moved`: the file's configuration replaces that of
/// `given`.
pub(crate) fn keep(
    path: &Path,
    given: Vec<Step>,
    is_moved: bool,
) -> Result<(Keeping, Merged), DaemonError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| failed(path, &error))?;
    let (file, state) = StateFile::open(&path.join(NAME), None)?;
    if !is_moved {
        let keeping = Keeping::new(file, &given).with_files(identify, Map::new());
        return Ok((keeping, Merged { given, ..Merged::default() }));
    }
    let mut steps = state.command_line.clone();
    steps.extend(without_configuration(given));
    let merged = state.merge(&steps).map_err(DaemonError::from)?;
    let known = state.files.unwrap_or_default();
    Ok((Keeping::new(file, &steps).with_files(identify, known), merged))
}

/// Removes a state file, and its folder as far as the sandbox permits it.
pub(super) fn forget(folder: &Path) {
    for name in [NAME.to_owned(), format!("{NAME}.new")] {
        // There may be none.
        let _ = fs::remove_file(folder.join(name));
    }
    let _ = fs::remove_dir(folder);
}

/// Removes empty folders that confined daemons have left. `all`: what is recorded, under the lock of all records.
pub(crate) fn clear(all: &[Attached]) {
    let entries = fs::read_dir(FOLDER).into_iter().flatten().flatten();
    let folders = entries.map(|entry| entry.path());
    let is_left = |path: &PathBuf| {
        path.extension() == Some(OsStr::new("kept"))
            && !all.iter().any(|known| known.file("kept") == *path)
    };
    folders.filter(is_left).for_each(|folder| forget(&folder));
}

impl Kept {
    /// Reads the state of the attachment of this name in its folder. `None`: there is none, or it is being made.
    pub(super) fn read(path: &Path, id: &str) -> Option<Kept> {
        Kept::parse(&fs::read_to_string(path.join(NAME)).ok()?, id)
    }

    fn parse(text: &str, id: &str) -> Option<Kept> {
        let state = SavedState::parse(text).ok()?;
        let export = state.options.iter().find_map(|step| match &step.action {
            Action::Export(export) if export.id == id => export.nodes().next(),
            _ => None,
        });
        let node = export.cloned().unwrap_or_default();
        let is_changed = state.is_changed();
        let files = state.files.unwrap_or_default();
        let name = image_of(&state.options, Path::new("/"), &node);
        let identity = files.get(&name).map(Identity::from_json);
        let image = identity.map(|identity| Image { name, identity, base: None });
        Some(Kept { node, image, files, is_changed })
    }

    /// Adds the paths of the first command line's `--sandbox`: commands of the monitor have opened files there.
    pub(crate) fn add_paths(attached: &Attached, options: &mut ServeOptions) {
        let words = attached.command.iter().map(OsString::from);
        if let Ok(Command::Attach(first)) = parse_args(words)
            && let Some(paths) = &mut options.sandbox.paths
        {
            paths.extend(first.sandbox.paths.into_iter().flatten());
        }
    }

    /// Checks that the disk's files, backing files included, are those that the killed daemon had open.
    ///
    /// # Errors
    ///
    /// A file is missing or was replaced, or commands have removed the export.
    pub(crate) fn check(&self, attached: &Attached) -> Result<(), DaemonError> {
        let device = attached.device.display();
        if self.is_changed && self.node.is_empty() {
            let error = DaemonError::new(format!(
                "{device} waits, and a command of the monitor has removed its export"
            ));
            return Err(error.with_hint(&format!(
                "Give up what {device} has not written: ringmill detach --force {device}"
            )));
        }
        for (name, known) in &self.files {
            let (known, now) = (Identity::from_json(known), Identity::of(Path::new(name)).ok());
            if known.is_some() && known != now {
                let image = |identity| Image { name: name.clone(), identity, base: None };
                return Err(replaced(attached, &image(known), &image(now)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::attachments::Mode;

    const NODE: &str =
        "--blockdev driver=qcow2,node-name=disk0,file.driver=file,file.filename=/srv/a";

    fn export(node: &str) -> String {
        format!("--export ublk,id=e,node-name={node},writable=on,dev-id=7,recovery=on")
    }

    /// The state after a snapshot to `overlay`, and what is read of it.
    fn moved(overlay: &Path, known: &Json) -> Kept {
        let path = overlay.display();
        let over = format!(
            "--blockdev driver=qcow2,node-name=over,file.driver=file,file.filename={path},backing=disk0"
        );
        let files = json!({ overlay.to_str().expect("UTF-8"): known });
        let before = [NODE.to_owned(), export("disk0")];
        let now = [NODE.to_owned(), over, export("over")];
        let text = SavedState::text_with(&before, &now, files.as_object());
        Kept::parse(&text, "e").expect("a state")
    }

    fn attached(kept: Kept) -> Attached {
        Attached {
            id: "e".into(),
            image: Image { name: "/srv/a".into(), identity: None, base: None },
            mode: Mode::Write,
            device: "/dev/ublkb7".into(),
            command: ["ringmill", "attach", "/srv/a"].map(str::to_owned).into(),
            kept: Some(kept),
        }
    }

    #[test]
    fn an_unchanged_disk_has_not_moved() {
        let line = [NODE.to_owned(), export("disk0")];
        let kept = Kept::parse(&SavedState::text(&line, &line), "e").expect("a state");
        let attached = attached(kept);
        assert!(attached.moved().is_none());
        assert_eq!(attached.images().count(), 1);
        // A file that is being made.
        let kept = Kept::parse(&SavedState::text(&[], &[]), "e").expect("a state");
        assert!(kept.check(&attached).is_ok() && !kept.is_changed);
    }

    #[test]
    fn a_snapshot_moves_the_disk() {
        let path = std::env::temp_dir().join(format!("kept-{}", std::process::id()));
        fs::write(&path, "overlay").expect("a file");
        let attached = attached(moved(&path, &identify(&path)));
        let kept = attached.moved().expect("it has moved");
        assert_eq!(kept.node, "over");
        let name = path.display().to_string();
        assert_eq!(attached.images().next().map(|image| &image.name), Some(&name));
        assert!(kept.check(&attached).is_ok());
        let away = path.with_extension("away");
        fs::rename(&path, &away).expect("it moves");
        let refused = || kept.check(&attached).expect_err("refused").to_string();
        let words = ["was replaced: /dev/ublkb7 belongs to inode", &name, "detach /dev/ublkb7"];
        let why = refused();
        assert!(words.iter().all(|word| why.contains(word)), "{why}");
        assert!(why.contains("is no file now"), "{why}");
        fs::write(&path, "another").expect("a file");
        assert!(refused().contains("is inode"));
        fs::rename(&away, &path).expect("it is put back");
        assert!(kept.check(&attached).is_ok());
        fs::remove_file(&path).expect("it goes");
    }

    #[test]
    fn a_removed_export_is_told() {
        let before = [NODE.to_owned(), export("disk0")];
        let text = SavedState::text(&before, &[NODE.to_owned()]);
        let attached = attached(Kept::parse(&text, "e").expect("a state"));
        let why = attached.moved().expect("changed").check(&attached).expect_err("refused");
        assert!(why.to_string().contains("has removed its export"), "{why}");
    }
}
