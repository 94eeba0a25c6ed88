//! Opening a node anew, with other options, while it is in use: `blockdev-reopen`.

use std::pin::Pin;
use std::sync::Arc;

use super::activity::is_format;
use super::{Child, Held, NodeRegistry, OpenContext};
use crate::driver::{Layer, NotReopened, Reopened};
use crate::drivers::file::{FileNode, Kind};
use crate::error::OpenError;
use crate::graph::{Drained, drain};
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, BlockdevRef, Driver, FileOptions};

/// Called if the node that was open keeps its place.
type Restore = Box<dyn FnOnce()>;

/// Opening one node, for a node that opens others.
type Opening<'a> = Pin<Box<dyn Future<Output = Result<Drained, OpenError>> + 'a>>;

impl NodeRegistry {
    /// Gives a node other options while requests continue. Nodes that are defined inside it come
    /// first. The returned value holds back requests of the node's users until dropped.
    ///
    /// # Errors
    ///
    /// There is no such node, an option cannot be changed, or the image cannot be opened that way. Then
    /// the node is as it was; one below it that came first may have changed.
    pub fn reopen<'a>(&'a mut self, name: &'a str, options: &'a BlockdevOptions) -> Opening<'a> {
        self.reopen_with(name, options, None)
    }

    /// Gives a node its previous options back, while [`reopen`](Self::reopen) still holds requests of its users.
    ///
    /// # Errors
    ///
    /// As of [`reopen`](Self::reopen). A node that was defined inside this one, and replaced by a named node, is
    /// closed and cannot come back. Requests go on.
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
            let missing = || OpenError::new(format!("Failed to find node with node-name='{name}'"));
            let entry = self.nodes.get(name).ok_or_else(missing)?;
            check(name, &entry.options.driver, &options.driver)?;
            let before = entry.children.clone();
            let mut children = Vec::new();
            for (role, child) in options.driver.children() {
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
            let (node, restore) = self.open_anew(name, options, &children)?;
            if self.grows(name) {
                node.let_grow();
            }
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
            let entry = self.nodes.get_mut(name).ok_or_else(missing)?;
            let held = match entry.node {
                Held::Top(_) => Held::Top(node),
                Held::Nested(_) => Held::Nested(Arc::downgrade(&node)),
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
        let missing = || OpenError::new(format!("Failed to find node with node-name='{name}'"));
        let entry = self.nodes.get_mut(name).ok_or_else(missing)?;
        let options = BlockdevOptions { read_only: true, ..entry.options.clone() };
        match options.driver {
            // Gives up the write lock, which lets other processes read the file.
            Driver::File(_) | Driver::HostDevice(_) => self.reopen(name, &options).await.map(drop),
            Driver::Any(ref driver)
                if driver.layer() == Layer::Storage && driver.check_reopen(&**driver).is_ok() =>
            {
                self.reopen(name, &options).await.map(drop)
            }
            Driver::Qcow2(_) | Driver::Any(_) => {
                entry.options = options;
                Ok(())
            }
        }
    }

    /// A node that is not in use yet, and its image's lock with what that claimed before.
    fn open_anew(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
        children: &[Child],
    ) -> Result<(Arc<dyn BlockNode>, Option<Restore>), OpenError> {
        let mut open_file = |kind, file: &FileOptions| {
            let held = self.locks.get(name).and_then(std::sync::Weak::upgrade);
            let restore = held.clone().map(|lock| {
                let claims = lock.claims();
                // Less than what it has now, or what it had a moment ago.
                Box::new(move || drop(lock.change(claims))) as Restore
            });
            let flush_failed = self.images.flush_failed(name);
            let node = FileNode::reopen(name.to_owned(), kind, options, file, held, flush_failed)?;
            self.remember_image(name, file, &node);
            Ok::<_, OpenError>((Arc::new(node) as Arc<dyn BlockNode>, restore))
        };
        match &options.driver {
            Driver::File(file) => open_file(Kind::File, file),
            Driver::HostDevice(file) => open_file(Kind::HostDevice, file),
            Driver::Any(driver) => {
                let (name, children) = (name.to_owned(), &mut children.to_vec());
                let mut node = OpenContext { registry: self, name, options, children };
                let Reopened { node, restore } = driver.reopen(&mut node)?;
                Ok((node, restore))
            }
            _ => Err(unsupported(name, &options.driver)),
        }
    }

    /// Whether a format lies on a node that finds room in it as it needs.
    pub(super) fn grows(&self, name: &str) -> bool {
        self.nodes.iter().any(|(above, entry)| {
            let is_below =
                |child: &Child| child.role != "backing" && child.edge.node().name() == name;
            entry.children.iter().any(is_below)
                && (is_format(&entry.options.driver) || self.grows(above))
        })
    }

    /// So that whoever opens the image anew takes its lock over, and another process the image.
    pub(super) fn remember_image(&mut self, name: &str, options: &FileOptions, node: &FileNode) {
        let lock = node.lock().map(|lock| lock.fd());
        self.images.remember(name, &options.filename, node.fd(), lock, node.flush_failed());
        self.locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = node.lock() {
            self.locks.insert(name.to_owned(), Arc::downgrade(lock));
        }
    }
}

fn unsupported(name: &str, driver: &Driver) -> OpenError {
    let format = match driver {
        Driver::Qcow2(_) => "qcow2",
        Driver::Any(driver) => driver.kind().name,
        Driver::File(_) => "file",
        Driver::HostDevice(_) => "host_device",
    };
    OpenError::new(format!(
        "Block format '{format}' used by node '{name}' does not support reopening files"
    ))
}

/// Checks that what stays the same does. The messages are QEMU's.
fn check(name: &str, before: &Driver, after: &Driver) -> Result<(), OpenError> {
    let changed = match (before, after) {
        (Driver::File(before), Driver::File(after))
        | (Driver::HostDevice(before), Driver::HostDevice(after)) => [
            ("filename", before.filename != after.filename),
            ("aio", before.aio != after.aio),
            ("locking", before.locking != after.locking),
        ],
        (Driver::Any(old), Driver::Any(new)) if old.kind().name == new.kind().name => {
            return new.check_reopen(&**old).map_err(|error| match error {
                NotReopened::Option(option) => {
                    OpenError::new(format!("Cannot change the option '{option}'"))
                }
                NotReopened::Unsupported => unsupported(name, before),
            });
        }
        (Driver::Any(_), Driver::Any(_)) => [("driver", true), ("", false), ("", false)],
        (before, after) if std::mem::discriminant(before) == std::mem::discriminant(after) => {
            return Err(unsupported(name, before));
        }
        _ => [("driver", true), ("", false), ("", false)],
    };
    match changed.iter().find(|(_, changed)| *changed) {
        Some((option, _)) => Err(OpenError::new(format!("Cannot change the option '{option}'"))),
        None => Ok(()),
    }
}
