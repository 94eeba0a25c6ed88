//! Errors about options: QSD's sentence, followed by a correction.

use std::fmt;

/// Why an option, or a value in it, is refused.
///
/// Printed as one line in QSD's wording, and a second line with a hint if there is one: the accepted values,
/// the parameters, the names defined so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionError {
    /// The error, in QSD's words where QSD has the same error.
    pub message: String,
    /// A correction.
    pub hint: Option<String>,
}

impl OptionError {
    /// Returns an error without a hint.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    /// Adds the second line.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Returns a value or parameter of QSD that ringmill does not support yet.
    pub fn not_yet(what: impl fmt::Display) -> Self {
        Self::new(format!("{what} is not supported by ringmill yet"))
    }

    /// Puts the option in front, as QSD does: `--blockdev foo: …`.
    pub fn of(mut self, option: &str) -> Self {
        self.message = format!("{option}: {}", self.message);
        self
    }
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n{hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for OptionError {}
