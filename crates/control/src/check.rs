//! `check`: checks and repairs the metadata of an image.

use std::ffi::OsString;
use std::path::PathBuf;

use block::Repair;

use crate::error::OptionError;
use crate::table::{Choice, Field, Kind, Need, put};

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
    Field {
        name: "repair",
        kind: Kind::Choice(&[
            Choice {
                name: "leaks",
                help: "clusters that are counted and not used",
                set: |check| put(&mut check.repair, Repair::Leaks),
            },
            Choice {
                name: "all",
                help: "all that can be repaired",
                set: |check| put(&mut check.repair, Repair::All),
            },
        ]),
        need: Need::Optional("only checks"),
        help: "what is repaired",
    },
    Field {
        name: "output",
        kind: Kind::Choice(&[
            Choice { name: "human", help: "for people", set: |check| put(&mut check.json, false) },
            Choice { name: "json", help: "for programs", set: |check| put(&mut check.json, true) },
        ]),
        need: Need::Default("human"),
        help: "form of the result",
    },
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
