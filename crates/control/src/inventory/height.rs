//! How many nodes lie on one another.

use std::collections::{BTreeMap, BTreeSet};

use block::MAX_CHAIN;

use super::Inventory;
use crate::error::OptionError;

/// Most nodes that may lie on one another by the options. Opening, closing and requests take stack for each. Below the lowest
/// there may be a chain of images that only headers name.
pub(super) const MAX_HEIGHT: usize = 2 * MAX_CHAIN;

impl Inventory {
    /// Checks, once a node has its children and its users, that not too many nodes lie on one another.
    pub(super) fn check_height(&self, name: &str) -> Result<(), OptionError> {
        let mut above: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut below: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (upper, node) in &self.nodes {
            for lower in &node.children {
                above.entry(&lower.name).or_default().push(upper);
                below.entry(upper).or_default().push(&lower.name);
            }
        }
        // The node is on both paths.
        if longest(name, &above) + longest(name, &below) > MAX_HEIGHT + 1 {
            let why = format!("Too many nodes would lie on one another with node '{name}'");
            return Err(OptionError::new(why).hint(format!("At most {MAX_HEIGHT} may.")));
        }
        Ok(())
    }
}

/// The number of nodes on the longest path that begins at a node. No more than matter are counted.
fn longest<'a>(name: &'a str, next: &BTreeMap<&'a str, Vec<&'a str>>) -> usize {
    let mut level = BTreeSet::from([name]);
    (0..=MAX_HEIGHT)
        .take_while(|_| {
            let is_level = !level.is_empty();
            level = level.iter().filter_map(|name| next.get(name)).flatten().copied().collect();
            is_level
        })
        .count()
}
