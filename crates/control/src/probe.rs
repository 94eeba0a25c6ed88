//! `probe`: what this machine offers.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::error::OptionError;
use crate::table::Field;

/// Options of `probe`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProbeOptions {
    /// A file or block device to look at as an image.
    pub file: Option<PathBuf>,
}

/// The options of the command line: none beside the common ones.
pub(crate) static OPTIONS: &[Field<ProbeOptions>] = &[];

/// Takes the file from the positional arguments.
pub(crate) fn start(arguments: Vec<OsString>) -> Result<ProbeOptions, OptionError> {
    let mut arguments = arguments.into_iter();
    let file = arguments.next().map(PathBuf::from);
    match arguments.next() {
        Some(extra) => {
            Err(OptionError::new(format!("{}: Unexpected argument", extra.to_string_lossy()))
                .hint("probe takes at most one file."))
        }
        None => Ok(ProbeOptions { file }),
    }
}
