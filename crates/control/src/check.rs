//! `check`: checks and repairs the metadata of an image.

use std::ffi::OsString;
use std::path::PathBuf;

use block::Repair;

use crate::error::OptionError;
use crate::place::OneOf;
use crate::table::{Field, Row};

/// Options of `check`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckOptions {
    /// The image.
    pub image: PathBuf,
    /// `--repair`.
    pub repair: Repair,
    /// `--output`: as JSON.
    pub json: bool,
}

/// The options of the command line.
pub(crate) static OPTIONS: &[Field<CheckOptions>] = &[
    Row::optional("repair", "only checks", "what is repaired").at(&OneOf {
        at: |check: &mut CheckOptions| &mut check.repair,
        words: &[
            ("leaks", Repair::Leaks, "clusters that are counted and not used"),
            ("all", Repair::All, "all that can be repaired"),
        ],
    }),
    Row::default("output", "human", "form of the result").at(&OneOf {
        at: |check: &mut CheckOptions| &mut check.json,
        words: &[("human", false, "for people"), ("json", true, "for programs")],
    }),
];

/// Takes the image from the positional arguments.
pub(crate) fn start(arguments: Vec<OsString>) -> Result<CheckOptions, OptionError> {
    let mut arguments = arguments.into_iter();
    let hint = "Usage: ringmill check <image> [options]";
    let image = arguments.next().filter(|image| !image.is_empty());
    let image = image.ok_or_else(|| OptionError::new("check: an image is missing").hint(hint))?;
    match arguments.next() {
        Some(extra) => {
            Err(OptionError::new(format!("{}: Unexpected argument", extra.to_string_lossy()))
                .hint("check takes one image."))
        }
        None => Ok(CheckOptions { image: image.into(), repair: Repair::None, json: false }),
    }
}
