//! QMP's errors: a class for programs, a description for people.

use std::fmt;

use crate::error::OptionError;

/// `class` of an error; QEMU's `QapiErrorClass`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// All other errors.
    GenericError,
    /// The command does not exist, or is not available now.
    CommandNotFound,
    /// No object has that path.
    DeviceNotFound,
    /// No block job has that name.
    DeviceNotActive,
}

impl ErrorClass {
    pub(super) fn name(self) -> &'static str {
        match self {
            ErrorClass::GenericError => "GenericError",
            ErrorClass::CommandNotFound => "CommandNotFound",
            ErrorClass::DeviceNotFound => "DeviceNotFound",
            ErrorClass::DeviceNotActive => "DeviceNotActive",
        }
    }
}

/// The error of a command, for its client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QmpError {
    /// The kind of failure, for programs.
    pub class: ErrorClass,
    /// What failed, in QEMU's words if QEMU has the case.
    pub desc: String,
}

impl QmpError {
    /// Returns a [`GenericError`](ErrorClass::GenericError).
    pub fn generic(desc: impl Into<String>) -> Self {
        QmpError { class: ErrorClass::GenericError, desc: desc.into() }
    }

    /// Returns a [`CommandNotFound`](ErrorClass::CommandNotFound).
    pub fn command_not_found(desc: impl Into<String>) -> Self {
        QmpError { class: ErrorClass::CommandNotFound, desc: desc.into() }
    }

    /// Returns the tree of objects has nothing at `path`.
    pub fn device_not_found(path: &str) -> Self {
        let desc = format!("Device '{path}' not found");
        QmpError { class: ErrorClass::DeviceNotFound, desc }
    }
}

impl QmpError {
    /// Returns the error that no block job has that name.
    pub fn block_job_not_found(id: &str) -> Self {
        let desc = format!("Block job '{id}' not found");
        QmpError { class: ErrorClass::DeviceNotActive, desc }
    }
}

impl From<OptionError> for QmpError {
    /// Without the hint, as QSD does it: programs compare descriptions.
    fn from(error: OptionError) -> Self {
        QmpError::generic(error.message)
    }
}

impl fmt::Display for QmpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.desc)
    }
}

impl std::error::Error for QmpError {}
