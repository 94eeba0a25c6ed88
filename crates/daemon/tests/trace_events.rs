//! The events of all crates of the daemon, beside docs/TRACING.md.

use std::collections::BTreeSet;

// Links the crates that define events.
use daemon as _;

#[test]
fn the_documented_events_are_the_code_s() {
    let page = include_str!("../../../docs/TRACING.md");
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let documented = rows.map(|line| {
        let mut cells = line.split(" | ").map(|cell| cell.trim_matches(['|', ' ', '`']));
        (cells.next().unwrap_or_default().to_owned(), cells.next().unwrap_or_default().to_owned())
    });
    let documented: BTreeSet<(String, String)> = documented.collect();
    let defined = trace::events().into_iter().map(|event| {
        assert!(!event.help.is_empty(), "{}", event.name);
        let args: Vec<_> = event.args.iter().map(|arg| arg.name).collect();
        (event.name.to_owned(), args.join(", "))
    });
    let defined: Vec<_> = defined.collect();
    let set: BTreeSet<_> = defined.iter().cloned().collect();
    assert_eq!(set.len(), defined.len(), "each name is defined once: {defined:?}");
    assert_eq!(documented, set, "docs/TRACING.md is on the left");
}
