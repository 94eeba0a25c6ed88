//! The contents of images on servers: the new process opens these images anew, and has to find the same.

use std::collections::BTreeMap;

use block::NodeRegistry;
use serde_json::{Value as Json, json};

use super::super::DaemonError;
use super::document::text;

/// The contents of all nodes that have one, by their names.
pub(super) fn describe(nodes: &NodeRegistry) -> Json {
    let of = |name: &str| nodes.node(name).ok()?.content();
    nodes.names().filter_map(|name| Some((name.to_owned(), json!(of(name)?)))).collect()
}

/// The contents of a document, by nodes.
pub(super) fn read(json: &Json) -> Result<BTreeMap<String, String>, String> {
    let Some(all) = json.as_object() else {
        // An older program.
        return Ok(BTreeMap::new());
    };
    all.iter().map(|(name, content)| Ok((name.clone(), text(content)?.to_owned()))).collect()
}

/// Checks that the nodes have the contents that the other process has.
pub(super) fn check(
    nodes: &NodeRegistry,
    before: &BTreeMap<String, String>,
) -> Result<(), DaemonError> {
    for (name, before) in before {
        let now = nodes.node(name).ok().and_then(|node| node.content());
        if let Some(now) = now.filter(|now| now != before) {
            return Err(DaemonError::new(format!(
                "node '{name}': the image on the server has changed: it was opened with {before}, and is now {now}"
            )));
        }
    }
    Ok(())
}
