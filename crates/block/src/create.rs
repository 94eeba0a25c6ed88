//! How drivers create images: `blockdev-create`.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use ::options::OptionError;
use ::options::table::{Context, Reads};
use ::options::value::Value;
use event_loop::{AlignedBuf, EventLoop, IoBufs};
use nix::errno::Errno;

use crate::error::OpenError;
use crate::node::{BlockNode, Channel, ResizeError};
use crate::options::{BlockdevRef, Inherited, read_ref};
use crate::registry::NodeRegistry;
use crate::request::Op;
use crate::submit::submit;

/// How a driver creates images.
pub struct CreateKind {
    /// What is created, in a few words.
    pub help: &'static str,
    /// The options: an [`options::table::Table`].
    pub options: &'static dyn Reads<Box<dyn NewImage>>,
}

/// An image to be created: a driver's options for it.
pub trait NewImage: fmt::Debug + Send {
    /// Returns the nodes that the image is created in.
    ///
    /// They are written and resized. Those defined in place are open when [`create`](Self::create) is called, by the
    /// name in their options.
    fn nodes(&mut self) -> Vec<&mut BlockdevRef>;

    /// Creates the image. Await the future on the loop of the context.
    ///
    /// Where this takes long or blocks, it happens on another thread.
    fn create(self: Box<Self>, context: &CreateContext<'_>) -> Creating;
}

/// Reads a node that an image is created in.
pub(crate) fn read_node(value: Value, at: &Context) -> Result<BlockdevRef, OptionError> {
    read_ref(value, Inherited::default(), at)
}

/// `preallocation`: what a new image's space gets beforehand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// Places in the image, if it is in a format that has them.
    Metadata,
    /// It is reserved.
    Falloc,
    /// It is written with zeroes.
    Full,
}

impl Preallocation {
    /// What could not be done, in QEMU's words.
    pub(crate) fn failure(self) -> &'static str {
        match self {
            Preallocation::Falloc => "Could not preallocate new data",
            Preallocation::Off | Preallocation::Metadata | Preallocation::Full => {
                "Could not write zeros for preallocation"
            }
        }
    }
}

/// Bytes that a preallocation writes at once.
pub(crate) const CHUNK: usize = 1 << 20;

/// Allocates the bytes of a range, which read as zeroes then.
pub(crate) async fn preallocate(
    channel: &Rc<dyn Channel>,
    range: Range<u64>,
    how: Preallocation,
) -> Result<(), Errno> {
    match how {
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc => zero(channel, range, false).await,
        Preallocation::Full => {
            let mut at = range.start;
            while at < range.end {
                let len = (range.end - at).min(CHUNK as u64);
                let bufs = AlignedBuf::io_bufs(len as usize, 4096).ok_or(Errno::ENOMEM)?;
                submit(channel, Op::Write { fua: false }, at, len, bufs).await.0?;
                at += len;
            }
            Ok(())
        }
    }
}

/// Has the bytes of a range read as zeroes.
pub(crate) async fn zero(
    channel: &Rc<dyn Channel>,
    range: Range<u64>,
    may_unmap: bool,
) -> Result<(), Errno> {
    let op = Op::WriteZeroes { may_unmap, no_fallback: false, fua: false };
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(CHUNK as u64);
        submit(channel, op, at, len, IoBufs::new()).await.0?;
        at += len;
    }
    Ok(())
}

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
    /// The name of a node's image, as headers of other images have it. Fails if no header can have it.
    pub filename: &'a dyn Fn(&str) -> Result<String, OpenError>,
}

/// The creation of an image.
pub type Creating = Pin<Box<dyn Future<Output = Result<(), OpenError>>>>;

impl CreateContext<'_> {
    /// Returns a node that is to be written.
    ///
    /// # Errors
    ///
    /// There is no such node, or it is for reading.
    pub(crate) fn node(&self, name: &str) -> Result<Arc<dyn BlockNode>, OpenError> {
        let found = self.nodes.node(name)?;
        match found.geometry().read_only {
            true => Err(OpenError::new("Block node is read-only")),
            false => Ok(found),
        }
    }

    /// Returns a node with at least that many bytes.
    pub(crate) fn grow(
        &self,
        node: &str,
        size: u64,
    ) -> impl Future<Output = Result<Fitted, OpenError>> + use<> {
        self.resize(node, move |old| old.max(size))
    }

    /// Returns a node with the number of bytes that `size` makes of their number.
    pub(crate) fn resize<F: FnOnce(u64) -> u64>(
        &self,
        node: &str,
        size: F,
    ) -> impl Future<Output = Result<Fitted, OpenError>> + use<F> {
        let resized = self.resize_in_its_words(node, size);
        async move {
            let (fitted, resized) = resized?;
            resized.await.map_err(|error| {
                let why = error.to_string();
                let prefix = "Could not resize image";
                OpenError::new(match why.starts_with(prefix) {
                    true => why,
                    false => format!("{prefix}: {why}"),
                })
            })?;
            Ok(fitted)
        }
    }

    /// Returns a node with exactly that many bytes, if it can have so few. Errors are the node's.
    pub(crate) fn fit(
        &self,
        node: &str,
        size: u64,
    ) -> impl Future<Output = Result<Fitted, OpenError>> + use<> {
        let resized = self.resize_in_its_words(node, move |_| size);
        async move {
            let (fitted, resized) = resized?;
            resized.await.map_err(|error| OpenError::new(error.to_string()))?;
            Ok(fitted)
        }
    }

    /// Begins to give a node the number of bytes that `size` makes of their number.
    fn resize_in_its_words<F: FnOnce(u64) -> u64>(
        &self,
        node: &str,
        size: F,
    ) -> Result<(Fitted, impl Future<Output = Result<(), ResizeError>> + use<F>), OpenError> {
        let found = self.node(node)?;
        let old = found.geometry().size;
        let size = size(old);
        let resize = |size| self.nodes.resize(node, size, self.event_loop);
        let resized = (size != old).then(|| resize(size)).transpose()?;
        let cut: Option<Cut> = match size > old {
            true => Some(Box::pin(resize(old)?)),
            false => None,
        };
        let fitted = Fitted { node: found, cut };
        Ok((fitted, async move {
            match resized {
                Some(resized) => resized.await,
                None => Ok(()),
            }
        }))
    }
}

type Cut = Pin<Box<dyn Future<Output = Result<(), ResizeError>>>>;

/// A node that has the size for a new image.
pub(crate) struct Fitted {
    /// The node.
    pub(crate) node: Arc<dyn BlockNode>,
    /// Cuts it back to its old size. `None`: it has not grown.
    cut: Option<Cut>,
}

impl Fitted {
    async fn cut_back(self) {
        let Some(cut) = self.cut else { return };
        if let Err(error) = cut.await {
            log::warn!("node '{}' stays as long as it has become: {error}", self.node.name());
        }
    }
}

/// Awaits the sizes of an image's nodes, one after the other. If the second one cannot have its size, the first one gets its
/// old size back.
pub(crate) async fn both(
    first: Option<impl Future<Output = Result<Fitted, OpenError>>>,
    second: Option<impl Future<Output = Result<Fitted, OpenError>>>,
) -> Result<(Option<Fitted>, Option<Fitted>), OpenError> {
    let first = match first {
        Some(first) => Some(first.await?),
        None => None,
    };
    let Some(second) = second else { return Ok((first, None)) };
    match second.await {
        Ok(second) => Ok((first, Some(second))),
        Err(error) => settle(Err(error), [first, None]).await.map(|()| (None, None)),
    }
}

/// Returns the result of a creation. If it failed, nodes that grew are cut back, so that they take no space for nothing.
pub(crate) async fn settle(
    made: Result<(), OpenError>,
    nodes: [Option<Fitted>; 2],
) -> Result<(), OpenError> {
    if made.is_err() {
        for fitted in nodes.into_iter().flatten() {
            fitted.cut_back().await;
        }
    }
    made
}
