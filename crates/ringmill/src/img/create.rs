//! `img create`.

use std::process::ExitCode;

use control::{CreateOptions, asks_for_help};
use daemon::DaemonError;
use img::{NewImage, list_options};

use super::confine::{Files, names_more};
use super::{failed, images, print};

/// Makes an image.
pub(super) fn run(options: &CreateOptions) -> Result<ExitCode, DaemonError> {
    let CreateOptions { common, image, size, options, backing, backing_format, is_unsafe } =
        options;
    let format = common.format.as_deref().unwrap_or("raw");
    if asks_for_help(options) {
        print(&list_options(format).map_err(failed)?);
        return Ok(ExitCode::SUCCESS);
    }
    let named: Vec<&str> =
        [Some(image), backing.as_ref()].into_iter().flatten().map(String::as_str).collect();
    let files = if names_more(options) { Files::Any } else { Files::Change(&named) };
    let mut images = images(common, files)?;
    let new = NewImage {
        name: image.clone(),
        format: format.to_owned(),
        size: *size,
        options: options.clone(),
        backing: backing.clone(),
        backing_format: backing_format.clone(),
        trusts_backing: *is_unsafe,
    };
    let plan = images.plan(&new).map_err(failed)?;
    if !common.quiet {
        print(&format!("{plan}\n"));
    }
    images.make(&plan).map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}
