//! How drivers create images: `blockdev-create`.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use ::options::table::Reads;
use event_loop::EventLoop;

use crate::error::OpenError;
use crate::node::BlockNode;
use crate::registry::NodeRegistry;

/// How a driver creates images.
pub struct CreateKind {
    /// What is created, in a few words.
    pub help: &'static str,
    /// The options: an [`options::table::Table`].
    pub options: &'static dyn Reads<Box<dyn NewImage>>,
}

/// An image to be created: a driver's options for it.
pub trait NewImage: fmt::Debug + Send {
    /// Returns the names of the nodes that the image is created in.
    ///
    /// They are written and resized.
    fn nodes(&self) -> Vec<&str>;

    /// Creates the image. Await the future on the loop of the context.
    ///
    /// Where this takes long or blocks, it happens on another thread.
    fn create(self: Box<Self>, context: &CreateContext<'_>) -> Creating;
}

/// `preallocation`: what a new image's space gets beforehand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// It is reserved.
    Falloc,
    /// It is written with zeroes.
    Full,
}

/// Bytes that a preallocation writes at once.
pub(crate) const CHUNK: usize = 1 << 20;

/// The part of a creation that blocks.
pub type Blocking = Box<dyn FnOnce() -> Result<(), OpenError> + Send>;

/// Has that done on a thread of its own.
pub type OnThread = Rc<dyn Fn(Blocking) -> Creating>;

/// What an image is created with.
#[derive(Clone, Copy)]
pub struct CreateContext<'a> {
    /// The loop that runs meanwhile.
    pub event_loop: &'a EventLoop,
    /// The nodes, credentials and services.
    pub nodes: &'a NodeRegistry,
    /// The threads for what blocks.
    pub on_thread: &'a OnThread,
}

/// The creation of an image.
pub type Creating = Pin<Box<dyn Future<Output = Result<(), OpenError>>>>;

impl CreateContext<'_> {
    /// Returns a node with at least that many bytes.
    pub(crate) fn grow(
        &self,
        node: &str,
        size: u64,
    ) -> impl Future<Output = Result<Arc<dyn BlockNode>, OpenError>> + use<> {
        let begin = || {
            let found = self.nodes.node(node)?;
            let is_small = found.geometry().size < size;
            let resized = is_small.then(|| self.nodes.resize(node, size, self.event_loop));
            Ok((found, resized.transpose()?))
        };
        let begun: Result<_, OpenError> = begin();
        async move {
            let (found, resized) = begun?;
            if let Some(resized) = resized {
                resized.await.map_err(|error| OpenError::new(error.to_string()))?;
            }
            Ok(found)
        }
    }
}
