//! The errors of the daemon.

use std::error::Error;
use std::fmt;

use block::OpenError;
use control::qmp::QmpError;
use control::{OptionError, advice_for_serve};

use super::open_files;

/// The error of a failed change. Earlier changes are unaffected.
#[derive(Debug)]
pub struct DaemonError {
    /// What failed, and why.
    pub(super) message: String,
    /// What to do about it.
    hint: Option<String>,
    /// Whether monitors show the hint.
    hint_everywhere: bool,
}

impl fmt::Display for DaemonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n{hint}"),
            None => Ok(()),
        }
    }
}

impl DaemonError {
    /// Returns an error of one line, without advice.
    pub fn new(error: impl fmt::Display) -> Self {
        DaemonError { message: error.to_string(), hint: None, hint_everywhere: false }
    }

    /// Returns an error, with advice if the limit of open files was reached.
    pub(super) fn with_advice(error: impl Error + 'static) -> Self {
        DaemonError { hint: open_files::advice(&error), ..DaemonError::new(error) }
    }

    /// Adds the advice.
    pub fn with_hint(self, hint: &str) -> Self {
        DaemonError { hint: Some(hint.to_owned()), ..self }
    }

    /// Adds further advice, on new lines.
    pub(super) fn and_hint(self, more: &str) -> Self {
        let hint = self.hint.map_or_else(|| more.to_owned(), |hint| format!("{hint}\n{more}"));
        DaemonError { hint: Some(hint), ..self }
    }

    /// Renames options in the advice to those of `serve`.
    ///
    /// In the message, only the part after the first colon is changed: the part before the colon may be a
    /// path.
    pub fn with_options_of_serve(self) -> Self {
        let message = match self.message.split_once(": ") {
            Some((what, why)) => format!("{what}: {}", advice_for_serve(why)),
            None => self.message,
        };
        DaemonError { message, hint: self.hint.as_deref().map(advice_for_serve), ..self }
    }

    /// Puts the object of the failure in front of the message.
    pub fn of(self, what: &str) -> Self {
        DaemonError { message: format!("{what}: {}", self.message), ..self }
    }
}

impl From<OptionError> for DaemonError {
    fn from(error: OptionError) -> Self {
        DaemonError { hint: error.hint, ..DaemonError::new(error.message) }
    }
}

impl From<OpenError> for DaemonError {
    fn from(error: OpenError) -> Self {
        match error.hint() {
            Some(hint) => DaemonError {
                hint: Some(hint.to_owned()),
                hint_everywhere: error.has_hint_everywhere(),
                ..DaemonError::new(&error)
            },
            None => DaemonError::with_advice(error),
        }
    }
}

impl From<DaemonError> for QmpError {
    /// Without the hint, as a rule, as QSD does it: programs compare descriptions.
    fn from(error: DaemonError) -> Self {
        QmpError::generic(match error.hint.filter(|_| error.hint_everywhere) {
            Some(hint) => format!("{}. {}", error.message, hint.replace('\n', " ")),
            None => error.message,
        })
    }
}
