//! What a node of an image on a web server is to the rest of the daemon.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use ::options::{Object, Value};

use super::client::{Access, proxy_ports};
use super::image::Image;
use super::node::WebNode;
use super::options::{WebOptions, check_readahead};
use super::source::Source;
use super::thread::Web;
use crate::connections::{ConnectContext, Credentials};
use crate::driver::{
    BlockDriver, Connecting, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive,
    NotReopened, OpenContext, Reopened,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::BlockdevOptions;

/// A host that stands for any name: a redirect or a proxy may have one.
const ANY_NAME: &str = "redirect.invalid";

/// Options of a driver of images on web servers: the answers in which these drivers differ.
pub(crate) trait WebImage: Clone + PartialEq + fmt::Debug + Send + Sync + 'static {
    /// What opening for writing says. For `http`, in QEMU's words.
    const NO_WRITES: &str;
    /// Ports of the servers that a redirect may lead to.
    const REDIRECTS: &[u16];

    /// See [`BlockDriver::kind`].
    fn line(&self) -> &'static DriverKind;
    /// See [`BlockDriver::write`].
    fn written(&self) -> Object;
    /// Returns the options of all these drivers.
    fn shared(&self) -> &WebOptions;
    /// Returns host and port of the server.
    fn server(&self) -> (&str, u16);
    /// Returns the `id`s of secrets that only this driver has.
    fn secrets(&self) -> Vec<&str>;
    /// Returns the image's name, and the options that only this driver has, for queries: without what is secret.
    fn named(&self) -> (Option<String>, Vec<(&'static str, Value)>);
    /// Prepares a client. May read files.
    fn access(&self, credentials: &Credentials) -> Result<Access, OpenError>;
}

/// An image that was found on its server, for a node.
struct Opened {
    source: Source,
    web: Arc<Web>,
}

impl<T: WebImage> BlockDriver for T {
    fn kind(&self) -> &'static DriverKind {
        self.line()
    }

    fn write(&self) -> Object {
        self.written()
    }

    crate::children!();

    fn layer(&self) -> Layer {
        Layer::Storage
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        let proxy = self.shared().proxy_password_secret.as_deref();
        self.secrets().into_iter().chain(proxy).map(|id| ("secret", id)).collect()
    }

    fn needs(&self) -> Needs<'_> {
        let elsewhere = T::REDIRECTS.iter().copied().chain(proxy_ports());
        let elsewhere = elsewhere.map(|port| (ANY_NAME, port));
        Needs { servers: [self.server()].into_iter().chain(elsewhere).collect(), ..Needs::NONE }
    }

    fn hand_over(&self) -> HandOver {
        HandOver::AtOnce
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        let WebOptions { proxy_username, proxy_password_secret, sslverify, .. } = self.shared();
        let (name, mut options) = self.named();
        let own = options.len();
        if !sslverify {
            options.push(("sslverify", false.into()));
        }
        let texts =
            [("proxy-username", proxy_username), ("proxy-password-secret", proxy_password_secret)];
        let given = texts.into_iter().filter_map(|(name, text)| Some((name, text.as_deref()?)));
        options.extend(given.map(|(name, text)| (name, text.into())));
        let filename = name.filter(|_| options.len() == own);
        let options = options.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Description { filename, options, specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        check_writable::<T>(node.options())?;
        check_readahead(self.shared().readahead).map_err(OpenError::new)?;
        let Opened { source, web } = node.connection()?;
        let image = Image::new(node.name(), source, self.shared());
        Ok(Arc::new(WebNode::new(Arc::new(image), web)))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before: &Self = before.as_any().downcast_ref().ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_kept(before, self)
    }

    /// The node keeps its connections: an option that changes has nothing to do with reading.
    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        check_writable::<T>(node.options())?;
        Ok(Reopened::in_place(|| {}))
    }

    fn connect(&self, context: &ConnectContext<'_>) -> Option<Connecting> {
        let web = Web::of(context.nodes);
        let access = self.access(context.credentials);
        Some(Box::pin(async move {
            let (web, access) = (web?, access?);
            let source = web.run(Source::open(access)).await??;
            Ok(Box::new(Opened { source, web }) as Box<dyn Any + Send>)
        }))
    }
}

fn check_writable<T: WebImage>(common: &BlockdevOptions) -> Result<(), OpenError> {
    match common.read_only || common.auto_read_only {
        true => Ok(()),
        false => Err(OpenError::new(T::NO_WRITES).with_hint("read-only=on opens it for reading")),
    }
}
