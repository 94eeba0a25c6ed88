//! What files of the daemon's, which targets include, name of it.

use std::fmt;

use control::Step;

/// Why something could not be done, in words.
#[derive(Debug)]
pub(crate) struct DaemonError(String);

impl DaemonError {
    pub(crate) fn new(error: impl fmt::Display) -> Self {
        DaemonError(error.to_string())
    }

    pub(crate) fn with_hint(self, hint: &str) -> Self {
        DaemonError(format!("{self}\n{hint}"))
    }
}

impl fmt::Display for DaemonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[allow(dead_code, missing_docs, unreachable_pub)]
#[path = "../../crates/ringmill/src/daemon/upgrade/definitions.rs"]
mod definitions;

/// What a daemon that was made by these steps gives another process as its command line.
///
/// # Errors
///
/// Why there is none.
pub(crate) fn arguments_for_another(steps: &[Step]) -> Result<Vec<String>, String> {
    let mut made = definitions::Definitions::default();
    steps.iter().for_each(|step| made.add(step));
    made.arguments()
}
