//! `img dd`.

use std::process::ExitCode;

use control::DdOptions;
use daemon::DaemonError;
use img::{Access, CopyOptions, NewImage, Source, Target};

use super::confine::Files;
use super::{failed, images, source};

/// Copies a part of an image to a new one.
pub(super) fn run(options: &DdOptions) -> Result<ExitCode, DaemonError> {
    let DdOptions { common, input, output, target_format, block, count, skip } = options;
    let mut images = images(common, Files::Copy { from: &[input], to: output })?;
    let access = Access { force_share: common.force_share, ..Access::READ };
    let from = images.open(&source(input, common), &access).map_err(failed)?;
    let size = from.size();
    // As in qemu-img, what is skipped counts.
    let end = count.map_or(size, |count| count.saturating_mul(*block));
    let start = skip.saturating_mul(*block).min(size);
    let range = start..end.min(size).max(start);
    if skip.saturating_mul(*block) > size {
        log::warn!("{input}: cannot skip to specified offset");
    }
    let format = target_format.as_deref().unwrap_or("raw");
    let place = Target::new(output).map_err(failed)?;
    let new = NewImage {
        name: output.clone(),
        format: format.to_owned(),
        size: Some(range.end - range.start),
        ..NewImage::default()
    };
    let renamed = |error| failed(place.named(error));
    let plan = images.plan(&new).map_err(renamed)?.in_place(place.name());
    images.make(&plan).map_err(renamed)?;
    let to = Source::with_format(place.name(), format);
    let access = Access { alone: true, no_flush: true, ..Access::WRITE };
    let target = images.open(&to, &access).map_err(renamed)?;
    let how = CopyOptions { target_is_zero: plan.reads_as_zeroes(), ..CopyOptions::default() };
    let copied = images.copy_range(&from, range, &target, &how, |_| {});
    copied.map_err(renamed)?;
    images.close(target).map_err(failed)?;
    images.close(from).map_err(failed)?;
    place.complete().map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}
