//! `img snapshot`.

use std::process::ExitCode;

use control::{SnapshotAction, SnapshotOptions};
use daemon::DaemonError;
use img::Access;

use super::confine::Files;
use super::text::{date, table};
use super::{failed, images, print, source};

/// Lists, makes or deletes snapshots.
pub(super) fn run(options: &SnapshotOptions) -> Result<ExitCode, DaemonError> {
    let SnapshotOptions { common, image: name, action } = options;
    let names = [name.as_str()];
    let files = match action {
        SnapshotAction::List => Files::Read(name),
        SnapshotAction::Create(_) | SnapshotAction::Delete(_) => Files::Change(&names),
    };
    let mut images = images(common, files)?;
    let source = source(name, common);
    // The disk's contents do not matter.
    let access = |write| Access {
        write,
        force_share: common.force_share && !write,
        alone: true,
        ..Access::READ
    };
    match action {
        SnapshotAction::List => {
            let info = images.info(&source, &access(false)).map_err(failed)?;
            if !info.snapshots.is_empty() {
                let lines = table(&info.snapshots, date);
                print(&format!("Snapshot list:\n{}\n", lines.join("\n")));
            }
        }
        SnapshotAction::Create(snapshot) => {
            let image = images.open(&source, &access(true)).map_err(failed)?;
            images.make_snapshot(&image, snapshot).map_err(failed)?;
            images.close(image).map_err(failed)?;
        }
        SnapshotAction::Delete(snapshot) => {
            let image = images.open(&source, &access(true)).map_err(failed)?;
            images.delete_snapshot(&image, snapshot).map_err(failed)?;
            images.close(image).map_err(failed)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
