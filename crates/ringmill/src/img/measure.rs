//! `img measure`.

use std::process::ExitCode;

use control::MeasureOptions;
use daemon::DaemonError;
use img::{Access, NewImage};

use super::confine::Files;
use super::{failed, images, print, source};

/// Prints the length of the file of a new image.
pub(super) fn run(options: &MeasureOptions) -> Result<ExitCode, DaemonError> {
    let MeasureOptions { common, image, size, target_format, options } = options;
    let named: Vec<&str> = image.as_deref().into_iter().collect();
    let mut images = images(common, Files::Follow(&named))?;
    let access = Access { force_share: common.force_share, ..Access::READ };
    let opened = image.as_ref().map(|name| images.open(&source(name, common), &access));
    let opened = opened.transpose().map_err(failed)?;
    let format = target_format.as_deref().unwrap_or("raw");
    let new = NewImage {
        format: format.to_owned(),
        size: *size,
        options: options.clone(),
        trusts_backing: true,
        ..NewImage::default()
    };
    let measured = images.measure(&new, opened.as_ref()).map_err(|error| {
        // The image has no name.
        DaemonError::new(error.message().trim_start_matches(": "))
    })?;
    let (required, full, bitmaps) = (measured.required, measured.fully_allocated, measured.bitmaps);
    print(&match common.json {
        true => {
            let bitmaps = bitmaps.map(|bytes| format!("    \"bitmaps\": {bytes},\n"));
            let bitmaps = bitmaps.unwrap_or_default();
            format!(
                "{{\n{bitmaps}    \"required\": {required},\n    \"fully-allocated\": {full}\n}}\n"
            )
        }
        false => {
            let bitmaps = bitmaps.map(|bytes| format!("bitmaps size: {bytes}\n"));
            let bitmaps = bitmaps.unwrap_or_default();
            format!("required size: {required}\nfully allocated size: {full}\n{bitmaps}")
        }
    });
    Ok(ExitCode::SUCCESS)
}
