//! `img`: what people do to images. A command is a file here and a line in [`COMMANDS`].
//!
//! Names of options are those of `qemu-img`.

mod bitmap;
mod check;
mod commit;
mod common;
mod compare;
mod convert;
mod create;
mod dd;
mod info;
mod map;
mod measure;
mod rebase;
mod resize;
mod snapshot;

use std::ffi::{OsStr, OsString};

pub use bitmap::{BitmapAction, ImgBitmapOptions};
pub use check::ImgCheckOptions;
pub use commit::CommitOptions;
pub use common::{Cache, Common};
pub use compare::CompareOptions;
pub use convert::{ConvertOptions, SnapshotName};
pub use create::CreateOptions;
pub use dd::DdOptions;
pub use info::InfoOptions;
pub use map::MapOptions;
pub use measure::MeasureOptions;
pub use rebase::RebaseOptions;
pub use resize::{NewSize, ResizeOptions};
pub use snapshot::{SnapshotAction, SnapshotOptions};

use crate::cli::{Command, Names, QEMU_IMG, Subcommand, command_of, unexpected};
use crate::error::OptionError;
use crate::help::{self, last_word};
use crate::keyval;
use crate::scalar;
use crate::table::Field;

/// A parsed command of `img`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImgCommand {
    /// `img info`.
    Info(InfoOptions),
    /// `img create`.
    Create(CreateOptions),
    /// `img convert`.
    Convert(ConvertOptions),
    /// `img resize`.
    Resize(ResizeOptions),
    /// `img compare`.
    Compare(CompareOptions),
    /// `img map`.
    Map(MapOptions),
    /// `img measure`.
    Measure(MeasureOptions),
    /// `img check`.
    Check(ImgCheckOptions),
    /// `img snapshot`.
    Snapshot(SnapshotOptions),
    /// `img commit`.
    Commit(CommitOptions),
    /// `img rebase`.
    Rebase(RebaseOptions),
    /// `img bitmap`.
    Bitmap(ImgBitmapOptions),
    /// `img dd`.
    Dd(DdOptions),
}

/// The commands.
static COMMANDS: &[&Subcommand] = &[
    &bitmap::BITMAP,
    &check::CHECK,
    &commit::COMMIT,
    &compare::COMPARE,
    &convert::CONVERT,
    &create::CREATE,
    &dd::DD,
    &info::INFO,
    &map::MAP,
    &measure::MEASURE,
    &rebase::REBASE,
    &resize::RESIZE,
    &snapshot::SNAPSHOT,
];

pub(crate) static IMG: Subcommand = Subcommand {
    name: "img",
    usage: "<command> [options]",
    help: "make, describe, copy and change images",
    about: "Does to images what qemu-img does, with its options and output. Called by the name qemu-img, the program is \
            'ringmill img'. Formats: raw, qcow2 and luks; images: files, block devices, nbd://, rbd:, http://, https:// \
            and s3:// URLs, options (--image-opts) and json:{...}.",
    options: Vec::new,
    letters: &[],
    commands: COMMANDS,
    examples: &[],
    read,
};

/// Reads the rest of a command line.
pub(crate) fn read(
    program: &'static str,
    parser: &mut lexopt::Parser,
) -> Result<Command, OptionError> {
    let called = called(program);
    let advice = format!("Try '{called} --help' for more info");
    let find = |name: &OsStr| {
        let known = COMMANDS.iter().find(|known| last_word(known.name) == name);
        known.ok_or_else(|| {
            let name = name.to_string_lossy();
            OptionError::new(format!("Command not found: {name}")).hint(&*advice)
        })
    };
    match parser.next().map_err(unexpected)? {
        Some(lexopt::Arg::Value(name)) if name == "help" => {
            Ok(Command::Print(help::command(&IMG, program)))
        }
        Some(lexopt::Arg::Value(name)) => (find(&name)?.read)(program, parser),
        Some(lexopt::Arg::Long("help") | lexopt::Arg::Short('h')) => {
            Ok(Command::Print(help::command(&IMG, program)))
        }
        Some(lexopt::Arg::Long("version") | lexopt::Arg::Short('V')) => {
            Ok(Command::Print(help::version(program)))
        }
        Some(lexopt::Arg::Long(name)) => {
            Err(OptionError::new(format!("unrecognized option '--{name}'")).hint(advice))
        }
        Some(lexopt::Arg::Short(name)) => {
            Err(OptionError::new(format!("invalid option -- '{name}'")).hint(advice))
        }
        None => Err(OptionError::new("Not enough arguments").hint(advice)),
    }
}

/// The words before a command.
fn called(program: &str) -> String {
    if program == QEMU_IMG { program.to_owned() } else { format!("{program} img") }
}

/// Reads the rest of a command line of a command.
fn read_with<T>(
    program: &'static str,
    command: &'static Subcommand,
    options: &'static [Field<T>],
    parser: &mut lexopt::Parser,
    start: impl FnOnce(Vec<OsString>) -> Result<T, OptionError>,
    finish: impl FnOnce(T) -> Result<ImgCommand, OptionError>,
) -> Result<Command, OptionError> {
    let finish = |options| finish(options).map(|command| Command::Img(Box::new(command)));
    let read = command_of(program, Names::Abbreviated, command, options, parser, start, finish);
    let advice =
        || format!("Try '{} {} --help' for more info", called(program), last_word(command.name));
    read.map_err(|error| match error.hint {
        None => error.hint(advice()),
        Some(_) => error,
    })
}

/// Returns whether `-o` asks for the list of a format's options.
pub fn asks_for_help(options: &[String]) -> bool {
    options.iter().flat_map(|text| keyval::split(text)).any(keyval::is_help)
}

/// Reads a number of bytes, in qemu-img's words.
fn size_argument(text: &str) -> Result<u64, OptionError> {
    match scalar::size(text) {
        Some(size) if i64::try_from(size).is_ok() => Ok(size),
        Some(_) => {
            let most = i64::MAX;
            let why = format!("Invalid image size specified. Must be between 0 and {most}.");
            Err(OptionError::new(why))
        }
        None => Err(OptionError::new(format!("Invalid image size specified: '{text}'."))
            .hint("A number of bytes, or one with the suffix k, M, G, T, P or E")),
    }
}
