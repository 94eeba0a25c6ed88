//! `img commit` and `img rebase`.

use std::process::ExitCode;

use control::{CommitOptions, RebaseOptions};
use daemon::DaemonError;
use img::{Access, NewBacking};

use super::confine::Files;
use super::convert::Progress;
use super::{failed, images, print, source};

/// Writes what an overlay has into an image behind.
pub(super) fn run(options: &CommitOptions) -> Result<ExitCode, DaemonError> {
    let CommitOptions { common, image, base, cache } = options;
    let mut images = images(common, Files::Change(&[image]))?;
    let source = source(image, common);
    let access = Access { direct: cache.is_direct(), no_flush: cache.is_unsafe(), ..Access::WRITE };
    let size = images.info(&source, &Access::READ).map_err(failed)?.virtual_size;
    let mut progress = Progress::new(common.progress && !common.quiet, size);
    let committed =
        images.commit(&source, base.as_deref(), &access, move |done| progress.tell(done));
    if common.progress && !common.quiet {
        print("\n");
    }
    committed.map_err(failed)?;
    if !common.quiet {
        print("Image committed.\n");
    }
    Ok(ExitCode::SUCCESS)
}

/// Gives an overlay another backing file.
pub(super) fn rebase(options: &RebaseOptions) -> Result<ExitCode, DaemonError> {
    let RebaseOptions { common, image, backing, backing_format, is_unsafe, cache, .. } = options;
    let named: Vec<&str> =
        [Some(image), backing.as_ref()].into_iter().flatten().map(String::as_str).collect();
    let mut images = images(common, Files::Change(&named))?;
    let source = source(image, common);
    let access = Access { direct: cache.is_direct(), no_flush: cache.is_unsafe(), ..Access::WRITE };
    let backing = match (backing.as_deref().unwrap_or_default(), backing_format.clone()) {
        ("", _) => None,
        (name, Some(format)) => Some(NewBacking { name: name.to_owned(), format }),
        (name, None) => {
            let why = "backing format must be specified";
            let why = format!("Could not change the backing file to '{name}': {why}");
            return Err(failed(img::Error::new(why)));
        }
    };
    if *is_unsafe {
        let opened = images.open(&source, &Access { alone: true, ..access }).map_err(failed)?;
        images.rename_backing(&opened, backing.as_ref()).map_err(failed)?;
        images.close(opened).map_err(failed)?;
        return Ok(ExitCode::SUCCESS);
    }
    let size = images.info(&source, &Access::READ).map_err(failed)?.virtual_size;
    let mut progress = Progress::new(common.progress && !common.quiet, size);
    let rebased =
        images.rebase(&source, backing.as_ref(), &access, move |done| progress.tell(done));
    if common.progress && !common.quiet {
        print("\n");
    }
    rebased.map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}
