//! `img snapshot`.

use std::process::ExitCode;

use control::{SnapshotAction, SnapshotOptions};
use daemon::DaemonError;
use img::{Access, Error, Image, Images};

use super::confine::Files;
use super::text::{date, table};
use super::{failed, images, print, source};

/// Lists, makes, deletes or applies snapshots.
pub(super) fn run(options: &SnapshotOptions) -> Result<ExitCode, DaemonError> {
    let SnapshotOptions { common, image: name, action } = options;
    let names = [name.as_str()];
    let files = match action {
        SnapshotAction::List => Files::Read(name),
        SnapshotAction::Create(_) | SnapshotAction::Delete(_) | SnapshotAction::Apply(_) => {
            Files::Change(&names)
        }
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
    let change = |images: &mut Images,
                  change: &dyn Fn(&mut Images, &Image) -> Result<(), Error>| {
        let image = images.open(&source, &access(true)).map_err(failed)?;
        change(images, &image).map_err(failed)?;
        images.close(image).map_err(failed)
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
            change(&mut images, &|images, image| images.make_snapshot(image, snapshot))?;
        }
        SnapshotAction::Delete(snapshot) => {
            change(&mut images, &|images, image| images.delete_snapshot(image, snapshot))?;
        }
        SnapshotAction::Apply(snapshot) => {
            change(&mut images, &|images, image| images.apply_snapshot(image, snapshot))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
