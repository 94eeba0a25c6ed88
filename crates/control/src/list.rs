//! `list`: what is served and attached on this host.

use std::ffi::OsString;

use crate::error::OptionError;
use crate::place::OneOf;
use crate::table::{Field, Row};

/// Options of `list`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListOptions {
    /// `--output`: as JSON.
    pub json: bool,
}

/// The options of the command line.
pub(crate) static OPTIONS: &[Field<ListOptions>] =
    &[Row::default("output", "human", "form of the result").at(&OneOf {
        at: |list: &mut ListOptions| &mut list.json,
        words: &[("human", false, "for people"), ("json", true, "for programs")],
    })];

/// Refuses positional arguments.
pub(crate) fn start(arguments: Vec<OsString>) -> Result<ListOptions, OptionError> {
    match arguments.first() {
        Some(extra) => {
            Err(OptionError::new(format!("{}: Unexpected argument", extra.to_string_lossy()))
                .hint("Usage: ringmill list [options]"))
        }
        None => Ok(ListOptions::default()),
    }
}
