//! `block_resize`.

use std::future::Future;

use event_loop::{EventLoop, oneshot};
use nix::errno::Errno;

use super::NodeRegistry;
use crate::driver::Layer;
use crate::error::OpenError;
use crate::graph::drain;
use crate::node::ResizeError;

impl NodeRegistry {
    /// Resizes a node's image, as `block_resize` does.
    ///
    /// A node that shrinks is drained meanwhile, because a write in flight would extend the image again.
    /// Await the future on `event_loop`. If it is dropped, a resize that has begun
    /// [continues](Self::resized).
    ///
    /// # Errors
    ///
    /// There is no such node, or its size is fixed.
    pub fn resize(
        &self,
        name: &str,
        size: u64,
        event_loop: &EventLoop,
    ) -> Result<impl Future<Output = Result<(), ResizeError>> + use<>, OpenError> {
        let node = self.node(name)?;
        let users = self.edges(self.whose_size(name));
        let event_loop = event_loop.clone();
        let resizing = self.resizing.clone();
        Ok(async move {
            let drained = match size < node.geometry().size {
                true => Some(drain(users).await.map_err(|_| ResizeError::Busy)?),
                false => None,
            };
            let turn = resizing.lock_owned().await;
            let (done, resized) = oneshot::channel();
            let resize = node.resize(size, &event_loop);
            event_loop.spawn(async move {
                let outcome = resize.await;
                drop((drained, turn));
                done.send(outcome);
            });
            let what = "Could not resize image";
            resized.await.unwrap_or(Err(ResizeError::Os { what, errno: Errno::ECANCELED }))
        })
    }

    /// Waits until no node is being given another size.
    ///
    /// Before the nodes go: what is cut off then leaves writes to the image under way.
    pub fn resized(&self) -> impl Future<Output = ()> + use<> {
        let resizing = self.resizing.clone();
        async move { drop(resizing.lock().await) }
    }

    /// Returns the name of the node that determines this node's size: itself, or one below it.
    fn whose_size<'a>(&'a self, name: &'a str) -> &'a str {
        let mut name = name;
        while let Some(entry) = self.nodes.get(name)
            && matches!(entry.options.driver.layer(), Layer::Window | Layer::Filter)
            && let Some(child) = entry.children.first()
            && let Some((below, _)) = self.nodes.get_key_value(child.edge.node().name())
        {
            name = below;
        }
        name
    }
}
