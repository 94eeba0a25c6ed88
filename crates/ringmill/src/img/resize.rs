//! `img resize`.

use std::process::ExitCode;

use control::{NewSize, ResizeOptions};
use daemon::DaemonError;
use img::Access;

use super::confine::Files;
use super::{failed, images, print, source};

/// Gives an image another size.
pub(super) fn run(options: &ResizeOptions) -> Result<ExitCode, DaemonError> {
    let ResizeOptions { common, image: name, size, shrink } = options;
    let mut images = images(common, Files::Change(&[name]))?;
    // The size of the image behind does not count.
    let access = Access { alone: true, ..Access::WRITE };
    let image = images.open(&source(name, common), &access).map_err(failed)?;
    if image.is_guessed_raw() && !common.quiet {
        log::warn!("'{name}' has no header of a format and is taken for raw: '-f raw' says so");
    }
    let before = image.size();
    let after = match *size {
        NewSize::To(size) => Some(size),
        NewSize::More(more) => before.checked_add(more),
        NewSize::Less(less) => before.checked_sub(less),
    };
    let after = after.filter(|after| *after > 0 && i64::try_from(*after).is_ok());
    let after = after.ok_or_else(|| DaemonError::new("New image size must be positive"))?;
    let after = after.checked_next_multiple_of(512).unwrap_or(after);
    if after < before && !shrink {
        log::warn!(
            "Shrinking an image will delete all data beyond the shrunken image's end. Before performing such an operation, \
             make sure there is no important data there."
        );
        return Err(DaemonError::new("Use the --shrink option to perform a shrink operation."));
    }
    images.resize(&image, after).map_err(failed)?;
    images.close(image).map_err(failed)?;
    if !common.quiet {
        print("Image resized.\n");
    }
    Ok(ExitCode::SUCCESS)
}
