//! What files of the daemon's, which targets include, name of it.

use std::fmt;

use block::NodeRegistry;
use control::{Action, Step};

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

/// What a daemon that was made by these steps, none of which makes a node, gives another process as its
/// command line: exports come last.
///
/// # Errors
///
/// Why there is none.
pub(crate) fn arguments_for_another(steps: &[Step]) -> Result<Vec<String>, String> {
    let mut made = definitions::Definitions::default();
    steps.iter().for_each(|step| made.add(step));
    let offered = |id: &str| {
        let mut exports = steps.iter().filter_map(|step| match &step.action {
            Action::Export(export) if export.id == id => Some(export),
            _ => None,
        });
        exports.next().map(|export| export.nodes().cloned().collect())
    };
    made.arguments(&NodeRegistry::new(), offered)
}
