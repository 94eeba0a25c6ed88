//! What nodes are now, as options that make them again. Those are not always the ones that they were made
//! with: a node may have been reopened, made inactive, or come to lie on others.

use std::borrow::Cow;
use std::collections::BTreeSet;

use super::activity::own_children;
use super::{Child, Entry, Kept, NodeRegistry};
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, BlockdevRef};

/// What was described so far.
#[derive(Default)]
struct Described {
    nodes: Vec<BlockdevOptions>,
    /// The names of all in them, nested ones included.
    names: BTreeSet<String>,
}

impl NodeRegistry {
    /// Returns options that make the nodes of these names, as they are now.
    ///
    /// The nodes were opened by name.
    ///
    /// The order is that of `names`, but each node comes after those that it refers to. Filters of
    /// jobs are left out.
    ///
    /// A name that was generated is left out, to be generated again.
    pub fn describe<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<BlockdevOptions> {
        let mut described = Described::default();
        names.for_each(|name| drop(self.describe_ref(name, &mut described)));
        described.nodes
    }

    /// Returns options that describe a node and the nodes inside it, as they are now.
    ///
    /// A node that a job has put below this one since is among them, in place of the previous one.
    pub fn options(&self, name: &str) -> Option<BlockdevOptions> {
        let entry = self.nodes.get(name)?;
        let mut now = self.describe_entry(name, entry, &mut Described::default());
        for told in entry.options.driver.children() {
            // By its name, as the options have it, if another node defines it.
            if let BlockdevRef::Name(below) = told.node
                && self.child_now(entry, told.role).is_some_and(|child| child == *below)
                && self.nodes.iter().any(|(other, entry)| other != name && defines(entry, below))
            {
                now.driver.set_child(told.role, told.node.clone());
            }
        }
        Some(now)
    }

    /// Returns the options that a node was last opened with. The nodes below that they tell are those of now.
    pub fn told_options(&self, name: &str) -> Option<BlockdevOptions> {
        let now = self.options(name)?;
        let mut driver = self.nodes.get(name)?.options.driver.clone();
        let roles: Vec<_> = driver.children().into_iter().map(|told| told.role).collect();
        for child in now.driver.children().into_iter().filter(|child| roles.contains(&child.role)) {
            driver.set_child(child.role, child.node.clone());
        }
        Some(BlockdevOptions { driver, ..now })
    }

    /// The name of a node's child, below the filters of jobs.
    fn child_now(&self, entry: &Entry, role: &str) -> Option<String> {
        let child = entry.children.iter().find(|child| child.role == role)?;
        Some(self.below_filter(child.edge.node().name()))
    }

    /// The way to refer to a node, which is described by then. `None`: there is none of that name.
    fn describe_ref(&self, name: &str, described: &mut Described) -> Option<BlockdevRef> {
        let entry = self.nodes.get(name)?;
        let by_name = BlockdevRef::Name(name.to_owned());
        let is_first = is_given(name) && described.names.insert(name.to_owned());
        match entry.node {
            Kept::Top(_) => {
                if is_first {
                    let options = self.describe_entry(name, entry, described);
                    described.nodes.push(options);
                }
                Some(by_name)
            }
            Kept::Nested(_) if is_given(name) && !is_first => Some(by_name),
            Kept::Nested(_) => {
                let options = self.describe_entry(name, entry, described);
                Some(BlockdevRef::Inline(Box::new(options)))
            }
        }
    }

    fn describe_entry(
        &self,
        name: &str,
        entry: &Entry,
        described: &mut Described,
    ) -> BlockdevOptions {
        let mut driver = entry.options.driver.clone();
        // Of an inactive node those defined inside it are closed: they stay as its options have them.
        for Child { role, edge } in &entry.children {
            let below = self.below_filter(edge.node().name());
            let is_told = entry.options.driver.children().iter().any(|told| told.role == *role);
            // The data file of an image that an overlay made read-only stays open and locked for writing.
            let still_writes = entry.options.read_only && !edge.geometry().read_only;
            if !is_told && !still_writes && self.is_as_named(&below) {
                continue;
            }
            if let Some(below) = self.describe_ref(&below, described) {
                driver.set_child(role, below);
            }
        }
        let node_name = is_given(name).then(|| name.to_owned());
        BlockdevOptions { node_name, active: entry.active, driver, ..entry.options.clone() }
    }

    /// Returns the node below that filter of a job. `name` itself, if no filter has that name.
    pub fn below_filter(&self, name: &str) -> String {
        // No filter has the name of an open node.
        if self.nodes.get(name).and_then(Entry::node).is_some() {
            return name.to_owned();
        }
        let found = self.job_filters().find(|(_, filter)| filter.name() == name);
        found.map_or(name, |(below, _)| below).to_owned()
    }

    /// Returns the options with the nodes below jobs' filters in place of the filters, which do not outlive their jobs.
    ///
    /// A user of either goes through the filters.
    pub(super) fn without_filters<'a>(
        &self,
        options: &'a BlockdevOptions,
    ) -> Cow<'a, BlockdevOptions> {
        let mut changed = Cow::Borrowed(options);
        for (role, child) in own_children(&options.driver) {
            let child = match child {
                BlockdevRef::Name(name) if self.is_filter(&name) => {
                    BlockdevRef::Name(self.below_filter(&name))
                }
                BlockdevRef::Inline(below) => match self.without_filters(&below) {
                    Cow::Owned(below) => BlockdevRef::Inline(Box::new(below)),
                    Cow::Borrowed(_) => continue,
                },
                BlockdevRef::Name(_) => continue,
            };
            changed.to_mut().driver.set_child(role, child);
        }
        changed
    }

    /// Whether a node is still the one that the header of the image above it names: it was neither reopened
    /// nor replaced.
    fn is_as_named(&self, name: &str) -> bool {
        self.nodes.get(name).is_some_and(|entry| {
            matches!(entry.node, Kept::Nested(_))
                // Reopening notes the name.
                && entry.options.node_name.is_none()
                && entry.children.iter().all(|child| self.is_as_named(&self.below_filter(child.edge.node().name())))
        })
    }
}

/// Whether the options of a node define another one, by name, that lies below it.
fn defines(entry: &Entry, below: &str) -> bool {
    let is_below = entry.children.iter().any(|child| child.edge.node().name() == below);
    let is_told = |told: &BlockdevRef| match told {
        BlockdevRef::Inline(options) => options.node_name.as_deref() == Some(below),
        BlockdevRef::Name(_) => false,
    };
    is_below && entry.options.driver.children().iter().any(|told| is_told(told.node))
}

/// Whether a name may have come from options.
fn is_given(name: &str) -> bool {
    super::check_name(name).is_ok()
}
