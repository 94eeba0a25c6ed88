//! Chains of images: a node, and what lies behind it.

use std::pin::Pin;
use std::sync::Arc;

use super::{Child, Entry, Kept, NodeRegistry, OpenContext, not_found};
use crate::driver::Layer;
use crate::error::OpenError;
use crate::graph::{Behind, Edge, drain};
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, BlockdevRef};

impl NodeRegistry {
    /// Returns the child that provides the data where the node has none.
    pub fn backing(&self, name: &str) -> Option<&Child> {
        let entry = self.nodes.get(name)?;
        entry.children.iter().find(|child| child.role == "backing")
    }

    /// Returns the names of the images behind a node, the nearest first.
    pub fn chain(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        let mut at = name.to_owned();
        while let Some(child) = self.backing(&at) {
            at = self.below_filter(child.edge.node().name());
            names.push(at.clone());
        }
        names
    }

    /// Returns the edges from an image and from those behind it to the image behind each.
    pub fn backing_edges(&self, name: &str) -> Vec<Arc<Edge>> {
        let images = std::iter::once(name.to_owned()).chain(self.chain(name));
        images.filter_map(|image| Some(self.backing(&image)?.edge.clone())).collect()
    }

    /// Returns the nodes below a filter, down to the first one that is no filter.
    ///
    /// Such as below a throttle. Empty for other nodes.
    pub fn filtered(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        while let Some(entry) = self.nodes.get(names.last().map_or(name, String::as_str))
            && entry.options.driver.layer() == Layer::Filter
            && let Some(child) = entry.children.first()
        {
            let child = self.below_filter(child.edge.node().name());
            names.push(child);
        }
        names
    }

    /// Returns whether a job may replace a node, or change the chain below it.
    ///
    /// The node holds no data of another one. No job has put a filter over it, and it is no such filter.
    pub fn is_root(&self, name: &str) -> bool {
        !self.is_filter(name) && !self.is_part(name) && self.filters(name).is_empty()
    }

    /// Returns whether a node holds data of a node above it that is no filter, such as an image whose overlay or
    /// format is open. A node that replaced it would not be what the one above names in its metadata.
    fn is_part(&self, name: &str) -> bool {
        self.nodes.iter().any(|(above, entry)| {
            let is_filter = entry.options.driver.layer() == Layer::Filter;
            let mut children = entry.children.iter().enumerate();
            children.any(|(nth, child)| {
                self.below_filter(child.edge.node().name()) == name
                    && !(is_filter && nth == 0 && !self.is_part(above))
            })
        })
    }
}

/// Opening one node for writing, for a node that lies on it.
type Opening<'a> = Pin<Box<dyn Future<Output = Result<(), OpenError>> + 'a>>;

impl NodeRegistry {
    /// Reopens a node for writing if it is read-only. Requests continue meanwhile.
    ///
    /// # Errors
    ///
    /// There is no such node, or it cannot be opened for writing. The node is unchanged then, but a node
    /// below it may have changed.
    pub fn make_writable<'a>(&'a mut self, name: &'a str) -> Opening<'a> {
        Box::pin(async move {
            let was_read_only = self.node(name)?.geometry().read_only;
            let entry = self.nodes.get_mut(name).ok_or_else(|| not_found(name))?;
            if !was_read_only {
                // An image format stays open for writing behind another image.
                entry.options.read_only = false;
                return Ok(());
            }
            let mut options = self.options(name).ok_or_else(|| not_found(name))?;
            let entry = self.nodes.get(name).ok_or_else(|| not_found(name))?;
            options.node_name.clone_from(&entry.options.node_name);
            set_writable(&mut options);
            if options.driver.layer() != Layer::Format {
                return self.reopen(name, &options).await.map(drop);
            }
            let children = entry.children.clone();
            for child in children.iter().filter(|child| child.role != "backing") {
                let below = self.below_filter(child.edge.node().name());
                self.make_writable(&below).await?;
            }
            let (own_name, own_options) = (name.to_owned(), options.clone());
            let opened = self.apart(NodeRegistry::around(name, &options), move |registry| {
                let mut context = OpenContext {
                    registry,
                    name: &own_name,
                    options: &own_options,
                    children: &mut { children },
                    nested: &mut Vec::new(),
                };
                own_options.driver.open(&mut context)
            });
            let node = opened.await??;
            let mut users = None;
            let placed = self.put_in_place(name, &options, Some(node), &mut users).await;
            let (node, tracking) =
                placed.map_err(|error| OpenError::new(format!("node '{name}': {error}")))?;
            let entry = self.nodes.get_mut(name).ok_or_else(|| not_found(name))?;
            let held = match entry.node {
                Kept::Top(_) => Kept::Top(node),
                Kept::Nested(_) => Kept::Nested(Arc::downgrade(&node)),
            };
            let before = std::mem::replace(&mut entry.node, held);
            (entry.options, entry.tracking) = (options, tracking);
            drop((before, users));
            Ok(())
        })
    }

    /// Replaces the backing node of an image, or removes it.
    ///
    /// Images without users are closed.
    ///
    /// The caller has to change the backing file's name in the image's header.
    ///
    /// # Errors
    ///
    /// There is no such node, it has no backing node, or the graph is being changed there.
    pub async fn set_backing(
        &mut self,
        overlay: &str,
        base: Option<&str>,
    ) -> Result<(), OpenError> {
        let child = self.backing(overlay).ok_or_else(|| not_found(overlay))?.clone();
        let node = base.map(|base| self.node(base)).transpose()?;
        let size = child.edge.geometry().size;
        // Closed at the end: the threads of its channels may not open files.
        let before = child.edge.node();
        let new: Arc<dyn BlockNode> = match node {
            Some(node) if node.geometry().size >= size => node,
            shorter => Arc::new(Behind::new(shorter, size)),
        };
        let failed = |why: String| OpenError::new(format!("node '{overlay}': {why}"));
        let held =
            drain(vec![child.edge.clone()]).await.map_err(|busy| failed(busy.to_string()))?;
        held.point_to(&new).await.map_err(|error| failed(error.to_string()))?;
        drop(held);
        if base.is_none()
            && let Some(entry) = self.nodes.get_mut(overlay)
        {
            entry.children.retain(|child| child.role != "backing");
            entry.options.driver.remove_child("backing");
        }
        drop(before);
        self.forget_closed();
        Ok(())
    }

    /// Returns the name of the node that has a node as its backing image.
    pub fn overlay(&self, name: &str) -> Option<&str> {
        let has = |entry: &Entry| {
            let mut children = entry.children.iter();
            children.any(|child| {
                child.role == "backing" && self.below_filter(child.edge.node().name()) == name
            })
        };
        self.nodes.iter().find(|(_, entry)| has(entry)).map(|(above, _)| &**above)
    }
}

/// Has a node and those defined inside it be opened for writing, but for images behind it.
fn set_writable(options: &mut BlockdevOptions) {
    options.read_only = false;
    options.stays_read_only = false;
    let children = options.driver.children();
    let own = children.into_iter().filter(|child| child.role != "backing");
    let own: Vec<_> = own.map(|child| (child.role, child.node.clone())).collect();
    for (role, mut child) in own {
        if let BlockdevRef::Inline(below) = &mut child {
            set_writable(below);
            options.driver.set_child(role, child);
        }
    }
}
