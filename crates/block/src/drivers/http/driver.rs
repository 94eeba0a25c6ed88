//! What a node of an image on a web server is to the rest of the daemon.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use ::options::{Object, Value, table};

use super::client::{Access, proxy_ports};
use super::image::Image;
use super::node::HttpNode;
use super::options::{HttpOptions, check_readahead};
use super::source::Source;
use super::thread::Web;
use crate::connections::ConnectContext;
use crate::driver::{
    BlockDriver, Connecting, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive,
    NotReopened, OpenContext, Reopened,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::BlockdevOptions;

/// A host that stands for any name: a redirect or a proxy may have one.
const ANY_NAME: &str = "redirect.invalid";

/// An image that was found on its server, for a node.
pub(super) struct Opened {
    pub(super) source: Source,
    pub(super) web: Arc<Web>,
}

impl BlockDriver for HttpOptions {
    fn kind(&self) -> &'static DriverKind {
        self.scheme.kind()
    }

    fn write(&self) -> Object {
        table::write(self.scheme.fields(), &mut self.clone())
    }

    crate::children!();

    fn layer(&self) -> Layer {
        Layer::Storage
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        let secrets = [&self.password_secret, &self.proxy_password_secret, &self.cookie_secret];
        secrets.into_iter().flatten().map(|id| ("secret", id.as_str())).collect()
    }

    fn needs(&self) -> Needs<'_> {
        // A redirect leads to the usual ports.
        let redirects = [80, 443].map(|port| (ANY_NAME, port));
        let proxies = proxy_ports().into_iter().map(|port| (ANY_NAME, port));
        let own = [(self.host.as_str(), self.port)];
        Needs { servers: own.into_iter().chain(redirects).chain(proxies).collect(), ..Needs::NONE }
    }

    fn hand_over(&self) -> HandOver {
        HandOver::AtOnce
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    /// Without `cookie`, which is secret.
    fn describe(&self, _child: Option<&str>) -> Description {
        let mut options = vec![("url".to_owned(), Value::from(self.url.as_str()))];
        if !self.sslverify {
            options.push(("sslverify".to_owned(), false.into()));
        }
        let texts = [
            ("username", &self.username),
            ("password-secret", &self.password_secret),
            ("proxy-username", &self.proxy_username),
            ("proxy-password-secret", &self.proxy_password_secret),
            ("cookie-secret", &self.cookie_secret),
        ];
        let given = texts.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)));
        options.extend(given.map(|(name, value)| (name.to_owned(), value.into())));
        let filename = (options.len() == 1 && self.cookie.is_none()).then(|| self.url.clone());
        Description { filename, options, specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        check_writable(node.options())?;
        check_readahead(self.readahead).map_err(OpenError::new)?;
        let Opened { source, web } = node.connection()?;
        let image = Image::new(node.name(), source, self);
        Ok(Arc::new(HttpNode::new(Arc::new(image), web)))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before: &Self = before.as_any().downcast_ref().ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_kept(before, self)
    }

    /// The node keeps its connections: an option that changes has nothing to do with reading.
    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        check_writable(node.options())?;
        Ok(Reopened::in_place(|| {}))
    }

    fn connect(&self, context: &ConnectContext<'_>) -> Option<Connecting> {
        let web = Web::of(context.nodes);
        let access = Access::new(self, context.credentials);
        Some(Box::pin(async move {
            let (web, access) = (web?, access?);
            let source = web.run(Source::open(access)).await??;
            Ok(Box::new(Opened { source, web }) as Box<dyn Any + Send>)
        }))
    }
}

/// The message is QEMU's.
fn check_writable(common: &BlockdevOptions) -> Result<(), OpenError> {
    match common.read_only || common.auto_read_only {
        true => Ok(()),
        false => Err(OpenError::new("curl driver does not support writes")
            .with_hint("read-only=on opens it for reading")),
    }
}
