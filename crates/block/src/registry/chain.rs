//! Chains of images: a node, and what lies behind it.

use super::{Child, NodeRegistry};

impl NodeRegistry {
    /// The child whose contents show where a node has nothing of its own.
    pub fn backing(&self, name: &str) -> Option<&Child> {
        let entry = self.nodes.get(name)?;
        entry.children.iter().find(|child| child.role == "backing")
    }

    /// The names of the images behind a node, the nearest first.
    pub fn chain(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        let mut at = name.to_owned();
        while let Some(child) = self.backing(&at) {
            at = self.below_filter(child.edge.node().name());
            names.push(at.clone());
        }
        names
    }

    /// Whether a node lies below another one.
    pub fn is_child(&self, name: &str) -> bool {
        let mut children = self.nodes.values().flat_map(|entry| &entry.children);
        children.any(|child| self.below_filter(child.edge.node().name()) == name)
    }
}
