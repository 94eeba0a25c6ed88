//! Opening a node anew, with other options, while it is in use: `blockdev-reopen`.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use super::{Child, Entry, Kept, NodeRegistry, OpenContext, Opened, not_found};
use crate::driver::{ChildOption, Layer, NotReopened, Reopened};
use crate::drivers::file::FileNode;
use crate::error::OpenError;
use crate::graph::{Drained, drain};
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, BlockdevRef, Driver};
use crate::track::Tracking;

/// Opening one node, for a node that opens others.
type Opening<'a> = Pin<Box<dyn Future<Output = Result<Drained, OpenError>> + 'a>>;

impl NodeRegistry {
    /// Gives a node other options while requests continue.
    ///
    /// Nodes that are defined inside it come first. The returned value holds back requests of the node's users
    /// until dropped.
    ///
    /// # Errors
    ///
    /// There is no such node, an option cannot be changed, or the image cannot be opened that way. Then the node and
    /// those defined inside it are as they were.
    pub fn reopen<'a>(&'a mut self, name: &'a str, options: &'a BlockdevOptions) -> Opening<'a> {
        self.reopen_with(name, options, None)
    }

    /// Gives a node its previous options back after [`reopen`](Self::reopen).
    ///
    /// `reopen` still holds requests of the node's users.
    ///
    /// # Errors
    ///
    /// As of [`reopen`](Self::reopen). A node that was defined inside this one, and replaced by a named node, is
    /// closed and cannot come back. Requests continue.
    pub async fn undo_reopen(
        &mut self,
        name: &str,
        before: &BlockdevOptions,
        held: Drained,
    ) -> Result<(), OpenError> {
        self.reopen_with(name, before, Some(held)).await.map(drop)
    }

    /// `held` are the users of the node, if they are drained already.
    fn reopen_with<'a>(
        &'a mut self,
        name: &'a str,
        options: &'a BlockdevOptions,
        held: Option<Drained>,
    ) -> Opening<'a> {
        Box::pin(async move {
            let options = &*self.without_filters(options);
            let now = self.told_options(name).ok_or_else(|| not_found(name))?;
            check(name, &now.driver, &options.driver)?;
            let closes = options.driver.closes_to_reopen();
            let before = self.node(name)?;
            let (mut users, mut changed) = (held, Vec::new());
            if closes {
                self.check_files(name, options)?;
                if users.is_none() {
                    users = Some(self.drained(name).await?);
                }
                // Before the files below become read-only.
                if let Some(state) = before.clone().held_state() {
                    state.suspend_image().await.map_err(|error| {
                        OpenError::io(format!("Could not close the image of node '{name}'"), &error)
                    })?;
                }
            }
            match self.open_anew(name, options, &mut users, &mut changed).await {
                Ok(()) => {
                    drop(before);
                    self.forget_closed();
                    users.ok_or_else(|| not_found(name))
                }
                Err(error) => {
                    for (child, options) in changed.into_iter().rev() {
                        if let Err(why) = self.reopen(&child, &options).await {
                            log::error!(
                                "node '{child}': restoring its previous options failed: {why}"
                            );
                        }
                    }
                    if closes
                        && let Some(state) = before.held_state()
                        && let Err(why) = state.resume_image().await
                    {
                        log::error!("node '{name}': going on with its image: {why}");
                    }
                    Err(error)
                }
            }
        })
    }

    /// Holds requests of all users of a node.
    async fn drained(&self, name: &str) -> Result<Drained, OpenError> {
        drain(self.edges(name)).await.map_err(|busy| OpenError::new(busy.to_string()))
    }

    /// Opens a node anew, after the nodes defined inside it. `changed` gets the previous options of those.
    async fn open_anew(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
        users: &mut Option<Drained>,
        changed: &mut Vec<(String, BlockdevOptions)>,
    ) -> Result<(), OpenError> {
        let children = self.reopen_children(name, options, changed).await?;
        let mut around = NodeRegistry::around(name, options);
        around.extend(children.iter().map(|child| child.edge.node().name().to_owned()));
        let (own_name, own_options) = (name.to_owned(), options.clone());
        let reopened = self.apart(around, move |registry| {
            let (mut children, mut nested) = (children, Vec::new());
            let mut context = OpenContext {
                registry,
                name: &own_name,
                options: &own_options,
                children: &mut children,
                nested: &mut nested,
            };
            let reopened = own_options.driver.reopen(&mut context)?;
            Ok((reopened, children, nested))
        });
        let (Reopened { node, restore }, children, nested) = reopened.await??;
        let placed = self.put_in_place(name, options, node, users).await;
        let (node, tracking) = placed.inspect_err(|_| restore.into_iter().for_each(|f| f()))?;
        self.nodes.extend(nested.into_iter().map(Opened::into_nested));
        let entry = self.nodes.get_mut(name).ok_or_else(|| not_found(name))?;
        let held = match entry.node {
            Kept::Top(_) => Kept::Top(node),
            Kept::Nested(_) => Kept::Nested(Arc::downgrade(&node)),
        };
        let before = std::mem::replace(&mut entry.node, held);
        let children_before = std::mem::replace(&mut entry.children, children);
        entry.tracking = tracking;
        entry.options = BlockdevOptions { node_name: Some(name.to_owned()), ..options.clone() };
        drop((before, children_before));
        Ok(())
    }

    /// Reopens the nodes that are defined inside a node. Returns the children that the options name.
    async fn reopen_children(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
        changed: &mut Vec<(String, BlockdevOptions)>,
    ) -> Result<Vec<Child>, OpenError> {
        let before = self.nodes.get(name).ok_or_else(|| not_found(name))?.children.clone();
        let mut children = Vec::new();
        let mut anew = Vec::new();
        for ChildOption { role, node: child, .. } in options.driver.children() {
            let old = before.iter().find(|old| old.role == role);
            let edge = match (child, old) {
                (BlockdevRef::Name(wanted), Some(old))
                    if *wanted == self.below_filter(old.edge.node().name()) =>
                {
                    old.edge.clone()
                }
                (BlockdevRef::Name(wanted), _) => {
                    // For the users of the node above.
                    self.lock_images(wanted, &[])?;
                    self.get_edge(wanted)?
                }
                (BlockdevRef::Inline(_), None) => {
                    return Err(OpenError::new(format!(
                        "Cannot change the option '{role}.driver'"
                    )));
                }
                (BlockdevRef::Inline(options), Some(old)) => {
                    let below = self.below_filter(old.edge.node().name());
                    if options.node_name.as_ref().is_some_and(|name| *name != below) {
                        // As in QSD, a node that would be new further below is refused first.
                        if let Some(option) = self.new_below(&below, options) {
                            return Err(OpenError::new(format!(
                                "Cannot change the option '{option}'"
                            )));
                        }
                        return Err(OpenError::new("Cannot change the option 'node-name'"));
                    }
                    anew.push((below, (**options).clone()));
                    old.edge.clone()
                }
            };
            children.push(Child { role, edge });
        }
        let is_named = |role: &str| children.iter().any(|child: &Child| child.role == role);
        // Files that an image names are read-only if the image is; images behind it are so anyway.
        for child in before.iter().filter(|old| old.role != "backing" && !is_named(old.role)) {
            let below = child.edge.node().name().to_owned();
            if let Some(Entry { node: Kept::Nested(_), .. }) = self.nodes.get(&below)
                && let Some(own) = self.told_options(&below)
            {
                anew.push((below, BlockdevOptions { read_only: options.read_only, ..own }));
            }
        }
        for (below, options) in anew {
            let before = self.told_options(&below);
            // Draining the node above covers requests to the child.
            drop(self.reopen(&below, &options).await?);
            changed.extend(before.map(|before| (below, before)));
        }
        Ok(children)
    }

    /// Returns the option that defines a node in place where there is none, below this node or further below. As in
    /// QSD, the option is named without the nodes above it.
    fn new_below(&self, name: &str, options: &BlockdevOptions) -> Option<String> {
        let below = &self.nodes.get(name)?.children;
        options.driver.children().into_iter().find_map(|ChildOption { role, node, .. }| {
            let BlockdevRef::Inline(options) = node else { return None };
            match below.iter().find(|child| child.role == role) {
                Some(child) => self.new_below(child.edge.node().name(), options),
                None => Some(format!("{role}.driver")),
            }
        })
    }

    /// Has the users of a node use another one, or the same with other options. Returns it, and what watches it.
    pub(super) async fn put_in_place(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
        node: Option<Arc<dyn BlockNode>>,
        users: &mut Option<Drained>,
    ) -> Result<(Arc<dyn BlockNode>, Option<Arc<Tracking>>), OpenError> {
        if users.is_none() {
            *users = Some(self.drained(name).await?);
        }
        let users = users.as_ref().ok_or_else(|| not_found(name))?;
        let before = self.node(name)?;
        let tracking = self.tracking(name).cloned();
        let Some(node) = node else {
            users.tell();
            return Ok((before, tracking));
        };
        if self.grows(name) {
            node.enable_growth();
        }
        let is_stored_anew = options.driver.closes_to_reopen()
            && before.geometry().read_only != node.geometry().read_only;
        let stored = tracking.as_ref().map(|tracking| tracking.stored());
        let (node, now) = match is_stored_anew {
            // A bitmap of an image that is only read is another kind of bitmap.
            true => {
                if before.geometry().read_only {
                    // The closed node logs the bitmaps that it cannot store, which are not those of the new node.
                    self.detach_stored_bitmaps(name, &before);
                }
                self.with_stored_bitmaps(name, node)
            }
            false => {
                if let (Some(tracking), Some(store)) = (&tracking, node.bitmap_store()) {
                    tracking.keep_in(&store, before.bitmap_store().as_deref());
                }
                (self.as_tracked(name, node), tracking.clone())
            }
        };
        if let Err(error) = users.point_to(&node).await {
            if let (Some(tracking), Some(stored)) = (tracking, stored) {
                tracking.set_stored(stored);
            }
            return Err(OpenError::new(error.to_string()));
        }
        Ok((node, now))
    }

    /// Checks that the image of a node lies in the same files, through whichever filters.
    fn check_files(&self, name: &str, options: &BlockdevOptions) -> Result<(), OpenError> {
        let entry = self.nodes.get(name).ok_or_else(|| not_found(name))?;
        let lowest = |name: &str| {
            let name = self.below_filter(name);
            self.filtered(&name).pop().unwrap_or(name)
        };
        for ChildOption { role, node, .. } in options.driver.children() {
            let old = entry.children.iter().find(|old| old.role == role && role != "backing");
            if let (BlockdevRef::Name(wanted), Some(old)) = (node, old)
                && lowest(wanted) != lowest(old.edge.node().name())
            {
                return Err(OpenError::new(format!("Cannot change the option '{role}'"))
                    .with_hint(
                        "an image stays in its file: only filters above the file can change",
                    ));
            }
        }
        Ok(())
    }

    /// Makes a node read-only, because an image lies above it now.
    ///
    /// Reopens a file or device. An image format keeps its image open for writing; the next process opens
    /// the image for reading.
    ///
    /// # Errors
    ///
    /// There is no such node, or its file cannot be opened for reading.
    pub async fn make_read_only(&mut self, name: &str) -> Result<(), OpenError> {
        let missing = || not_found(name);
        let entry = self.nodes.get_mut(name).ok_or_else(missing)?;
        let options = BlockdevOptions { read_only: true, ..entry.options.clone() };
        let driver = &options.driver;
        if driver.layer() == Layer::Storage && driver.check_reopen(&**driver).is_ok() {
            // Gives up the write lock, which lets other processes read the file.
            return self.reopen(name, &options).await.map(drop);
        }
        entry.options = options;
        Ok(())
    }

    /// Whether a format lies on a node that finds room in it as it needs.
    pub(super) fn grows(&self, name: &str) -> bool {
        self.nodes.iter().any(|(above, entry)| {
            let is_below =
                |child: &Child| child.role != "backing" && child.edge.node().name() == name;
            entry.children.iter().any(is_below)
                && (entry.options.driver.layer() == Layer::Format || self.grows(above))
        })
    }

    /// Remembers an open image, so that a later open takes its lock over, and another process the
    /// image.
    pub(super) fn remember_image(&mut self, name: &str, path: &Path, node: &FileNode) {
        let lock = node.lock().map(|lock| lock.fd());
        self.images.remember(name, path, node.fd(), lock, node.flush_failed());
        self.kept.retain(|_, state| state.strong_count() > 0);
        self.locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = node.lock() {
            self.locks.insert(name.to_owned(), Arc::downgrade(lock));
            self.remembered.insert(name.to_owned());
        }
    }
}

/// Checks that what stays the same does. The messages are QEMU's.
fn check(name: &str, before: &Driver, after: &Driver) -> Result<(), OpenError> {
    let kind = after.kind().name;
    let checked = match before.kind().name == kind {
        true => after.check_reopen(&**before),
        false => Err(NotReopened::Option("driver".to_owned())),
    };
    checked.map_err(|error| match error {
        NotReopened::Option(option) => {
            OpenError::new(format!("Cannot change the option '{option}'"))
        }
        NotReopened::Reset(option) => {
            OpenError::new(format!("Option '{option}' cannot be reset to its default value"))
        }
        NotReopened::Unsupported => OpenError::new(format!(
            "Block format '{kind}' used by node '{name}' does not support reopening files"
        )),
    })
}
