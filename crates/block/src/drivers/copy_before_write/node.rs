//! A copy-before-write node.

use std::future::ready;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;

use super::options::{CLUSTER, CopyBeforeWriteOptions};
use super::saved::{CopyState, Saved};
use super::view::View;
use crate::driver::OpenContext;
use crate::drivers::common::Common;
use crate::error::OpenError;
use crate::inherited::OpenImage;
use crate::job::{Before, Bitmap, CbwChannel, Snapshot, What, keep_size};
use crate::node::{BlockNode, Channel, Geometry, HeldState, Released, Resized, cluster_size};

const NS_PER_S: u64 = 1_000_000_000;

/// A disk, and what it was when the node was opened.
pub(super) struct CopyBeforeWriteNode {
    name: String,
    common: Common,
    source: Arc<dyn BlockNode>,
    target: Arc<dyn BlockNode>,
    snapshot: Arc<Snapshot>,
    /// The parts that are kept.
    kept: Arc<Bitmap>,
    saved: Saved,
}

impl CopyBeforeWriteNode {
    pub(super) fn open(
        options: &CopyBeforeWriteOptions,
        node: &mut OpenContext<'_>,
    ) -> Result<Self, OpenError> {
        let name = node.name().to_owned();
        let (source, target) = (node.child("file")?, node.child("target")?);
        let common = Common::new(node.options(), &*source);
        let size = source.geometry().size;
        check_target(&*target, size)?;
        let cluster = cluster(options, &target)?;
        let inherited = node.inherited();
        let (saved, state) = match inherited.take_named(&Saved::name(&name)) {
            Some(file) => Saved::inherit(&name, file, size)?,
            None if inherited.is_shared() => {
                return Err(OpenError::new(format!("node '{name}': what was copied is unknown")));
            }
            None => {
                let marks = options.bitmap.as_ref();
                let marks = marks.map(|of| node.dirty_bitmap(&of.node, &of.name)).transpose()?;
                let bits = || {
                    let bits = Bitmap::new(size, cluster, marks.is_none());
                    marks.iter().for_each(|marks| bits.merge(marks.bits()));
                    bits
                };
                (Saved::new(&name)?, CopyState { left: bits(), kept: bits(), broken: false })
            }
        };
        let timeout = Some(u64::from(options.cbw_timeout) * NS_PER_S).filter(|ns| *ns > 0);
        let snapshot = Snapshot::new(state.left, options.on_cbw_error, What::All(1));
        let snapshot = Arc::new(snapshot.with_timeout(timeout));
        if state.broken {
            snapshot.set_broken();
        }
        let kept = Arc::new(state.kept);
        Ok(CopyBeforeWriteNode { name, common, source, target, snapshot, kept, saved })
    }
}

fn check_target(target: &dyn BlockNode, size: u64) -> Result<(), OpenError> {
    let geometry = target.geometry();
    if geometry.read_only {
        return Err(OpenError::new("Block node is read-only").with_hint(format!(
            "target '{}' gets what is about to be overwritten",
            target.name()
        )));
    }
    if geometry.size < size {
        return Err(OpenError::new(format!(
            "target '{}' is too small: it has {} bytes, and the disk {size}",
            target.name(),
            geometry.size
        )));
    }
    Ok(())
}

/// Returns how many bytes are copied at once.
fn cluster(
    options: &CopyBeforeWriteOptions,
    target: &Arc<dyn BlockNode>,
) -> Result<u64, OpenError> {
    let least = options.min_cluster_size;
    if least > 0 && !least.is_power_of_two() {
        return Err(OpenError::new("min-cluster-size needs to be a power of 2"));
    }
    if i64::try_from(least).is_err() {
        return Err(OpenError::new(format!("min-cluster-size too large: {least} > {}", i64::MAX)));
    }
    Ok(CLUSTER.max(cluster_size(target).unwrap_or(0)).max(least))
}

impl BlockNode for CopyBeforeWriteNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.common.geometry(self.source.geometry())
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.source.clone())
    }

    fn resize(self: Arc<Self>, size: u64, _event_loop: &EventLoop) -> Resized {
        keep_size(self.geometry(), size)
    }

    fn snapshot(&self) -> Option<Arc<dyn BlockNode>> {
        Some(Arc::new(View {
            name: self.name.clone(),
            source: self.source.clone(),
            target: self.target.clone(),
            snapshot: self.snapshot.clone(),
            kept: self.kept.clone(),
        }))
    }

    fn held_state(self: Arc<Self>) -> Option<Arc<dyn HeldState>> {
        Some(self)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let below = self.source.geometry();
        let source = self.source.clone().open_channel(event_loop)?;
        let target = self.target.clone().open_channel(event_loop)?;
        let snapshot = self.snapshot.clone();
        let copying = CbwChannel::new(event_loop, source, target, snapshot, Before::Changes);
        Ok(self.common.channel(below, copying))
    }
}

impl HeldState for CopyBeforeWriteNode {
    fn journal(&self) -> Option<OpenImage<Arc<OwnedFd>>> {
        Some(self.saved.image())
    }

    fn release_for_handover(self: Arc<Self>) -> Released {
        Box::pin(ready(self.saved.write(&self.snapshot, &self.kept)))
    }
}
