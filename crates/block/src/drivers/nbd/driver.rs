//! What a node of an NBD server's export is to the rest of the daemon.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use ::options::{FdName, Object};
use tls::Connector;

use super::connect::Target;
use super::options::{FIELDS, NBD, NbdOptions, NbdServerAddr, write_server};
use super::{Changeable, NbdNode, Opened};
use crate::connections::ConnectContext;
use crate::driver::{
    BlockDriver, Connecting, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive,
    NotReopened, OpenContext, Reopened,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::write_options;

impl BlockDriver for NbdOptions {
    fn kind(&self) -> &'static DriverKind {
        &NBD
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    crate::children!();

    fn layer(&self) -> Layer {
        Layer::Storage
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        self.tls_creds.as_deref().map(|id| ("tls-creds-x509", id)).into_iter().collect()
    }

    fn needs(&self) -> Needs<'_> {
        match &self.server {
            NbdServerAddr::Unix { path } => Needs { sockets: vec![path], ..Needs::NONE },
            NbdServerAddr::Abstract { .. } => Needs { abstract_sockets: true, ..Needs::NONE },
            NbdServerAddr::Vsock { .. } => Needs { vsock: true, ..Needs::NONE },
            NbdServerAddr::Inet { host, port, .. } => {
                Needs { servers: vec![(host, *port)], ..Needs::NONE }
            }
            NbdServerAddr::Fd { .. } => Needs::NONE,
        }
    }

    fn hand_over(&self) -> HandOver {
        match self.inherited() {
            Some(_) => HandOver::Never,
            None => HandOver::Flush,
        }
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        let server = write_server(&self.server);
        let export = self.export.as_str().into();
        let mut options = vec![("server".to_owned(), server), ("export".to_owned(), export)];
        let tls = [("tls-creds", &self.tls_creds), ("tls-hostname", &self.tls_hostname)];
        options.extend(
            tls.into_iter()
                .filter_map(|(name, value)| Some((name.to_owned(), value.as_deref()?.into()))),
        );
        Description { filename: self.uri(), options, specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let opened: Opened = node.connection()?;
        let connector = node.connector()?;
        let name = node.name().to_owned();
        let opened = NbdNode::new(name, node.options(), opened, connector)?;
        node.keep(opened.changeable());
        Ok(Arc::new(opened))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before: &Self = before.as_any().downcast_ref().ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_kept(before, self)
    }

    /// The node keeps its connections.
    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        let open = node.kept::<Changeable>();
        let open = open.ok_or_else(|| OpenError::new("The node is not open"))?;
        Ok(Reopened::in_place(open.change(node.options())?))
    }

    fn connect(&self, context: &ConnectContext<'_>) -> Option<Connecting> {
        let (options, event_loop) = (self.clone(), context.event_loop.clone());
        let tls = self.connector(context);
        let inherited = self.inherited().map(context.inherited).transpose();
        Some(Box::pin(async move {
            let target = Target { options, tls: tls?, inherited: inherited? };
            let opened = super::connect(&event_loop, target).await?;
            Ok(Box::new(opened) as Box<dyn Any + Send>)
        }))
    }
}

impl NbdOptions {
    /// TLS with the server, if the options say so. By default the server's certificate has the name of
    /// `server.host`.
    fn connector(&self, context: &ConnectContext<'_>) -> Result<Option<Connector>, OpenError> {
        let Some(id) = &self.tls_creds else { return Ok(None) };
        let host = match &self.server {
            NbdServerAddr::Unix { .. }
            | NbdServerAddr::Abstract { .. }
            | NbdServerAddr::Vsock { .. }
            | NbdServerAddr::Fd { .. } => None,
            NbdServerAddr::Inet { host, .. } => Some(host.as_str()),
        };
        let name = self.tls_hostname.as_deref().or(host);
        let connector = Connector::new(context.credentials.get(id)?, name);
        connector.map(Some).map_err(|error| OpenError::new(error.to_string()))
    }

    /// Returns the inherited socket that `server` names.
    pub(super) fn inherited(&self) -> Option<&FdName> {
        match &self.server {
            NbdServerAddr::Fd { fd } => Some(fd),
            NbdServerAddr::Unix { .. }
            | NbdServerAddr::Abstract { .. }
            | NbdServerAddr::Vsock { .. }
            | NbdServerAddr::Inet { .. } => None,
        }
    }

    /// Returns the export's URI. `None`: a URI has no place for credentials, and names unix sockets with a path and
    /// TCP servers only.
    fn uri(&self) -> Option<String> {
        let NbdOptions { server, export, tls_creds: None, .. } = self else { return None };
        match server {
            NbdServerAddr::Unix { path } => {
                Some(format!("nbd+unix:///{export}?socket={}", path.display()))
            }
            NbdServerAddr::Inet { .. } if export.is_empty() => Some(format!("nbd://{server}")),
            NbdServerAddr::Inet { .. } => Some(format!("nbd://{server}/{export}")),
            NbdServerAddr::Abstract { .. }
            | NbdServerAddr::Vsock { .. }
            | NbdServerAddr::Fd { .. } => None,
        }
    }
}
