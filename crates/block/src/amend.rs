//! How drivers amend images that are open: `x-blockdev-amend`.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use ::options::table::Reads;

use crate::create::OnThread;
use crate::error::OpenError;
use crate::registry::{NodeInfo, NodeRegistry};

/// How a driver amends images.
pub struct AmendKind {
    /// What may be amended, in a few words.
    pub help: &'static str,
    /// The options: an [`options::table::Table`].
    pub options: &'static dyn Reads<Box<dyn Amendment>>,
}

/// A change of an open image: a driver's options for it.
pub trait Amendment: fmt::Debug + Send {
    /// Changes the image. Await the future on the control loop.
    ///
    /// Where this takes long or blocks, it happens on another thread. A kill at any time leaves the image as it was, or
    /// as it is to be, or, where the change has several parts, with some of them.
    fn amend(self: Box<Self>, context: &AmendContext<'_>) -> Amending;
}

/// What an image is amended with.
#[derive(Clone, Copy)]
pub struct AmendContext<'a> {
    /// The image's node. It is active, it can be written to, and it is of the driver.
    pub node: &'a NodeInfo<'a>,
    /// `force`: changes that may lose data are made too.
    pub force: bool,
    /// The nodes, credentials and services.
    pub nodes: &'a NodeRegistry,
    /// The threads for what blocks.
    pub on_thread: &'a OnThread,
}

/// The change of an image.
pub type Amending = Pin<Box<dyn Future<Output = Result<(), OpenError>>>>;
