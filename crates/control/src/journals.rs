//! `journals`: lists and removes what killed daemons have left of qcow2 images.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::error::OptionError;
use crate::place::OneOf;
use crate::table::{Field, Row, put};

/// Options of `journals`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalsOptions {
    /// Journals by name or by image. None: all.
    pub chosen: Vec<OsString>,
    /// `--clear`: remove those of the chosen journals that no image needs.
    pub clear: bool,
    /// `--force`: remove also those that an image needs.
    pub force: bool,
    /// `--folder`: look nowhere else.
    pub folder: Option<PathBuf>,
    /// `--output`: as JSON.
    pub json: bool,
}

/// The options of the command line.
pub(crate) static OPTIONS: &[Field<JournalsOptions>] = &[
    Row::optional("clear", "only lists", "remove journals that no image needs")
        .flag(|on| on.clear = true),
    Row::optional(
        "force",
        "such journals stay",
        "with --clear: remove the named journals although an image may need them, which loses its writes since the last \
         flush",
    )
    .flag(|on| on.force = true),
    Row::optional("folder", "the folders of daemons on this host", "folder with journals")
        .path(|on, folder| put(&mut on.folder, Some(folder))),
    Row::default("output", "human", "form of the result").at(&OneOf {
        at: |on: &mut JournalsOptions| &mut on.json,
        words: &[("human", false, "for people"), ("json", true, "for programs")],
    }),
];

/// Takes what is chosen from the positional arguments.
pub(crate) fn start(chosen: Vec<OsString>) -> JournalsOptions {
    JournalsOptions { chosen, clear: false, force: false, folder: None, json: false }
}

/// Checks that options fit each other.
pub(crate) fn finish(options: JournalsOptions) -> Result<JournalsOptions, OptionError> {
    if options.force && (!options.clear || options.chosen.is_empty()) {
        return Err(OptionError::new("journals: --force needs --clear and the names of journals")
            .hint("Usage: ringmill journals --clear --force <journal>|<image>..."));
    }
    Ok(options)
}
