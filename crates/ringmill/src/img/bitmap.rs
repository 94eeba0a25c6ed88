//! `img bitmap`.

use std::process::ExitCode;

use control::{BitmapAction, ImgBitmapOptions};
use daemon::DaemonError;
use img::{Access, BitmapChange, Source};

use super::confine::Files;
use super::{failed, images, source};

/// Changes a bitmap.
pub(super) fn run(options: &ImgBitmapOptions) -> Result<ExitCode, DaemonError> {
    let ImgBitmapOptions {
        common,
        image: name,
        bitmap,
        actions,
        granularity,
        source: other,
        source_format,
    } = options;
    let names: Vec<&str> =
        [Some(name), other.as_ref()].into_iter().flatten().map(String::as_str).collect();
    let mut images = images(common, Files::Change(&names))?;
    let access = Access { alone: true, ..Access::WRITE };
    let image = images.open(&source(name, common), &access).map_err(failed)?;
    let other = other.as_ref().map(|name| {
        let source =
            Source { name: name.clone(), format: source_format.clone(), is_options: false };
        images.open(&source, &Access { alone: true, ..Access::READ })
    });
    let other = other.transpose().map_err(failed)?;
    for action in actions {
        let change = match action {
            BitmapAction::Add => BitmapChange::Add(*granularity),
            BitmapAction::Remove => BitmapChange::Remove,
            BitmapAction::Clear => BitmapChange::Clear,
            BitmapAction::Enable => BitmapChange::Enable,
            BitmapAction::Disable => BitmapChange::Disable,
            BitmapAction::Merge(from) => BitmapChange::Merge(from.clone()),
        };
        images.change_bitmap(&image, bitmap, &change, other.as_ref()).map_err(failed)?;
    }
    images.close(image).map_err(failed)?;
    other.into_iter().try_for_each(|image| images.close(image)).map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}
