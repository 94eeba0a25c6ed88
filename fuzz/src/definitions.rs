//! What a daemon writes down of itself for the process that takes over.

use block::NodeRegistry;
use control::{Action, Step};
use daemon::fuzzing::Definitions;

/// What a daemon that was made by these steps, none of which makes a node, gives another process as its
/// command line: exports come last.
///
/// # Errors
///
/// Why there is none.
pub(crate) fn arguments_for_another(steps: &[Step]) -> Result<Vec<String>, String> {
    let mut made = Definitions::default();
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
