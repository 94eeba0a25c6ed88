//! What a node of an NBD server's export is to the rest of the daemon.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use event_loop::EventLoop;

use super::options::{NBD, NbdOptions, NbdServerAddr};
use super::{Connected, NbdNode};
use crate::driver::{
    BlockDriver, ChildOption, Connecting, Description, DriverKind, HandOver, Layer, Look, Members,
    Needs, NeverInactive, OpenContext,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::{BlockdevRef, write_object, write_path};

impl BlockDriver for NbdOptions {
    fn kind(&self) -> &'static DriverKind {
        &NBD
    }

    fn write(&self) -> Members {
        let NbdOptions { server, export, reconnect_delay, open_timeout } = self;
        let server = match server {
            NbdServerAddr::Unix { path } => {
                write_object([("type", "unix".into()), ("path", write_path(path))])
            }
            NbdServerAddr::Inet { host, port, ipv4, ipv6 } => write_object([
                ("type", "inet".into()),
                ("host", host.as_str().into()),
                ("port", port.to_string().into()),
                ("ipv4", (*ipv4).into()),
                ("ipv6", (*ipv6).into()),
            ]),
        };
        vec![
            ("server", server),
            ("export", export.as_str().into()),
            ("reconnect-delay", (*reconnect_delay).into()),
            ("open-timeout", (*open_timeout).into()),
        ]
    }

    fn children(&self) -> Vec<ChildOption<'_>> {
        Vec::new()
    }

    fn set_child(&mut self, _role: &str, _child: BlockdevRef) -> bool {
        false
    }

    fn layer(&self) -> Layer {
        Layer::Storage
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    fn needs(&self) -> Needs<'_> {
        match &self.server {
            NbdServerAddr::Unix { path } => Needs { sockets: vec![path], ..Needs::NONE },
            NbdServerAddr::Inet { host, port, .. } => {
                Needs { servers: vec![(host, *port)], ..Needs::NONE }
            }
        }
    }

    fn hand_over(&self) -> HandOver {
        HandOver::Flush
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Err(NeverInactive)
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        let server = match &self.server {
            NbdServerAddr::Unix { path } => {
                write_object([("type", "unix".into()), ("path", write_path(path))])
            }
            NbdServerAddr::Inet { host, port, .. } => write_object([
                ("type", "inet".into()),
                ("host", host.as_str().into()),
                ("port", port.to_string().into()),
            ]),
        };
        let export = self.export.as_str().into();
        Description {
            filename: Some(self.uri()),
            options: vec![("server".to_owned(), server), ("export".to_owned(), export)],
            specific: None,
        }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let connection: Connected = node.connection()?;
        let connector = node.connector()?;
        let name = node.name().to_owned();
        Ok(Arc::new(NbdNode::new(name, node.options(), self, connection, connector)?))
    }

    fn connect(&self, event_loop: &EventLoop) -> Option<Connecting> {
        let (options, event_loop) = (self.clone(), event_loop.clone());
        Some(Box::pin(async move {
            let connected = super::connect(&event_loop, &options).await?;
            Ok(Box::new(connected) as Box<dyn Any + Send>)
        }))
    }
}

impl NbdOptions {
    fn uri(&self) -> String {
        let export = &self.export;
        match &self.server {
            NbdServerAddr::Unix { path } => {
                format!("nbd+unix:///{export}?socket={}", path.display())
            }
            server @ NbdServerAddr::Inet { .. } if export.is_empty() => format!("nbd://{server}"),
            server @ NbdServerAddr::Inet { .. } => format!("nbd://{server}/{export}"),
        }
    }
}
