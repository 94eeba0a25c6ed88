//! `ringmill img`: what people do to images, a file per command. The work is done by the crate `img`.

mod confine;
mod create;
mod info;
mod text;

use std::io::{self, Write};
use std::process::ExitCode;

use control::{ImgCommand, ImgCommon, LOG_VARIABLE, LogOptions};
use daemon::DaemonError;
use img::{Error, Images, Source};

/// Returns how a command logs. A description has no log: programs read what is printed beside it, too.
pub(crate) fn log_options(command: &ImgCommand) -> Option<LogOptions> {
    let is_quiet = match command {
        ImgCommand::Info(_) => std::env::var_os(LOG_VARIABLE).is_none(),
        ImgCommand::Create(_) => false,
    };
    (!is_quiet).then(LogOptions::default)
}

/// Runs a command.
pub(crate) fn run(command: ImgCommand) -> Result<ExitCode, DaemonError> {
    match command {
        ImgCommand::Info(options) => info::run(&options),
        ImgCommand::Create(options) => create::run(&options),
    }
}

/// Returns the set of images of a command, with its secrets and the journals that killed daemons have left.
fn images(common: &ImgCommon) -> Result<Images, DaemonError> {
    let mut images = Images::new().map_err(failed)?;
    let (folder, user) = daemon::journal_folder();
    // Without the folder, writes of a killed daemon that it would have are lost, as with qemu-img.
    if folder.is_dir() {
        images = images.with_journals(&folder, user).map_err(failed)?;
    }
    for object in &common.objects {
        daemon::add_credentials(images.credentials(), object)?;
    }
    Ok(images)
}

/// Returns an image as the user has named it.
fn source(name: &str, common: &ImgCommon) -> Source {
    Source { name: name.to_owned(), format: common.format.clone(), is_options: common.image_opts }
}

fn failed(error: Error) -> DaemonError {
    let plain = DaemonError::new(error.message());
    match error.hint() {
        Some(hint) => plain.with_hint(hint),
        None => plain,
    }
}

/// Prints text as it is. A closed pipe, as after `head`, does not change the exit code.
fn print(text: &str) {
    let _ = io::stdout().write_all(text.as_bytes());
}
