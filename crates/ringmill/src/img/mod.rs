//! `ringmill img`: what people do to images, a file per command. The work is done by the crate `img`.

mod bitmap;
mod commit;
mod compare;
pub(crate) mod confine;
mod convert;
mod create;
mod dd;
mod info;
mod map;
mod measure;
mod resize;
mod snapshot;
mod text;

use std::io::{self, Write};
use std::process::ExitCode;

use control::{
    CheckOptions, ImgCheckOptions, ImgCommand, ImgCommon, LOG_VARIABLE, LogOptions, program_name,
};
use daemon::DaemonError;
use img::{Error, Images, Source};

use confine::{Files, confine};

/// Returns how a command logs. A description has no log: programs read what is printed beside it, too.
pub(crate) fn log_options(command: &ImgCommand) -> Option<LogOptions> {
    let is_quiet = match command {
        ImgCommand::Info(_) => std::env::var_os(LOG_VARIABLE).is_none(),
        ImgCommand::Create(_)
        | ImgCommand::Convert(_)
        | ImgCommand::Resize(_)
        | ImgCommand::Compare(_)
        | ImgCommand::Map(_)
        | ImgCommand::Measure(_)
        | ImgCommand::Check(_)
        | ImgCommand::Snapshot(_)
        | ImgCommand::Commit(_)
        | ImgCommand::Rebase(_)
        | ImgCommand::Bitmap(_)
        | ImgCommand::Dd(_) => false,
    };
    (!is_quiet).then(LogOptions::default)
}

/// Runs a command.
pub(crate) fn run(command: ImgCommand) -> Result<ExitCode, DaemonError> {
    match command {
        ImgCommand::Info(options) => info::run(&options),
        ImgCommand::Create(options) => create::run(&options),
        ImgCommand::Convert(options) => convert::run(&options),
        ImgCommand::Resize(options) => resize::run(&options),
        ImgCommand::Compare(options) => compare::run(&options),
        ImgCommand::Map(options) => map::run(&options),
        ImgCommand::Measure(options) => measure::run(&options),
        ImgCommand::Check(options) => check(options),
        ImgCommand::Snapshot(options) => snapshot::run(&options),
        ImgCommand::Commit(options) => commit::run(&options),
        ImgCommand::Rebase(options) => commit::rebase(&options),
        ImgCommand::Bitmap(options) => bitmap::run(&options),
        ImgCommand::Dd(options) => dd::run(&options),
    }
}

/// `img check`: the same as `check`.
fn check(options: ImgCheckOptions) -> Result<ExitCode, DaemonError> {
    let ImgCheckOptions { common, image, repair } = options;
    if common.format.as_deref().is_some_and(|format| format != "qcow2") {
        return Ok(crate::check::no_checks());
    }
    let check = CheckOptions { image: image.into(), repair, json: common.json };
    crate::check::run_quietly(&check, common.quiet)
}

/// Returns the program's name in messages.
fn program() -> &'static str {
    program_name(&std::env::args_os().next().unwrap_or_default())
}

/// Returns the set of images of a command, with its secrets and the journals that killed daemons have left.
///
/// From then on the process reaches the command's files alone.
fn images(common: &ImgCommon, files: Files<'_>) -> Result<Images, DaemonError> {
    let mut images = Images::new().map_err(failed)?;
    let (folder, user) = daemon::journal_folder();
    // Without the folder, writes of a killed daemon that it would have are lost, as with qemu-img.
    if folder.is_dir() {
        images = images.with_journals(&folder, user).map_err(failed)?;
    }
    for object in &common.objects {
        daemon::add_credentials(images.credentials(), object)?;
    }
    confine(common, files)?;
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
