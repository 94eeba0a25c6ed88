//! Opening a node anew, with other options, while it is in use: `blockdev-reopen`.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use super::{Child, Kept, NodeRegistry, OpenContext, not_found};
use crate::driver::{ChildOption, Layer, NotReopened, Reopened};
use crate::drivers::file::FileNode;
use crate::error::OpenError;
use crate::graph::{Drained, drain};
use crate::options::{BlockdevOptions, BlockdevRef, Driver};

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
    /// There is no such node, an option cannot be changed, or the image cannot be opened that way. Then
    /// the node is as it was; one below it that came first may have changed.
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
            let missing = || not_found(name);
            let entry = self.nodes.get(name).ok_or_else(missing)?;
            check(name, &entry.options.driver, &options.driver)?;
            let before = entry.children.clone();
            let mut children = Vec::new();
            for ChildOption { role, node: child, .. } in options.driver.children() {
                let old = before.iter().find(|old| old.role == role).ok_or_else(missing)?;
                let below = old.edge.node().name().to_owned();
                let edge = match child {
                    BlockdevRef::Name(wanted) if *wanted == below => old.edge.clone(),
                    BlockdevRef::Name(wanted) => self.get_edge(wanted)?,
                    BlockdevRef::Inline(options) => {
                        // Draining the node above covers requests to the child.
                        drop(self.reopen(&below, options).await?);
                        old.edge.clone()
                    }
                };
                children.push(Child { role, edge });
            }
            let mut nested = Vec::new();
            let mut context = OpenContext {
                registry: self,
                name,
                options,
                children: &mut children,
                nested: &mut nested,
            };
            let Reopened { node, restore } = options.driver.reopen(&mut context)?;
            if self.grows(name) {
                node.enable_growth();
            }
            let node = self.as_tracked(name, node);
            let users = match held {
                Some(held) => held,
                None => drain(self.edges(name))
                    .await
                    .map_err(|busy| OpenError::new(busy.to_string()))?,
            };
            if let Err(error) = users.point_to(&node).await {
                if let Some(restore) = restore {
                    restore();
                }
                return Err(OpenError::new(error.to_string()));
            }
            self.nodes.extend(nested.into_iter().map(|nested| {
                let held = Kept::Nested(Arc::downgrade(&nested.node));
                nested.entry(held)
            }));
            let entry = self.nodes.get_mut(name).ok_or_else(missing)?;
            let held = match entry.node {
                Kept::Top(_) => Kept::Top(node),
                Kept::Nested(_) => Kept::Nested(Arc::downgrade(&node)),
            };
            let before = std::mem::replace(&mut entry.node, held);
            entry.children = children;
            entry.options = BlockdevOptions { node_name: Some(name.to_owned()), ..options.clone() };
            drop(before);
            self.forget_closed();
            Ok(users)
        })
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
        }
    }
}

/// Checks that what stays the same does. The messages are QEMU's.
fn check(name: &str, before: &Driver, after: &Driver) -> Result<(), OpenError> {
    let kind = after.kind().name;
    let checked = match before.kind().name == kind {
        true => after.check_reopen(&**before),
        false => Err(NotReopened::Option("driver")),
    };
    checked.map_err(|error| match error {
        NotReopened::Option(option) => {
            OpenError::new(format!("Cannot change the option '{option}'"))
        }
        NotReopened::Unsupported => OpenError::new(format!(
            "Block format '{kind}' used by node '{name}' does not support reopening files"
        )),
    })
}
