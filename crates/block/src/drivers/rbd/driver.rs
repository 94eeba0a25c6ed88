//! What a node of an image in a Ceph cluster is to the rest of the daemon.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use ::options::{Object, Value};
use nix::errno::Errno;

use super::connections::{Connections, Opened, Secrets};
use super::node::RbdNode;
use super::options::{AuthMode, RBD, RbdOptions};
use crate::connections::ConnectContext;
use crate::driver::{
    BlockDriver, ChildOption, Connecting, Description, DriverKind, HandOver, Layer, Look, Members,
    Needs, NeverInactive, OpenContext,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::{BlockdevRef, write_object, write_path};

impl BlockDriver for RbdOptions {
    fn kind(&self) -> &'static DriverKind {
        &RBD
    }

    fn write(&self) -> Members {
        self.members(true)
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
        let key = self.key_secret.as_deref();
        let passphrase = self.encrypt.as_ref().map(|encrypt| encrypt.key_secret.as_str());
        key.into_iter().chain(passphrase).map(|id| ("secret", id)).collect()
    }

    fn needs(&self) -> Needs<'_> {
        Needs { files: self.conf.as_deref().into_iter().collect(), ..Needs::NONE }
    }

    fn hand_over(&self) -> HandOver {
        HandOver::Flush
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Err(NeverInactive)
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        let options = self.members(false).into_iter();
        let options: Object = options.map(|(name, value)| (name.to_owned(), value)).collect();
        Description { filename: None, options, specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let opened: Opened = node.connection()?;
        let common = node.options();
        let is_fixed = opened.image.is_read_only();
        if is_fixed && !common.read_only && !common.auto_read_only {
            let error = match &self.snapshot {
                Some(_) => OpenError::new("rbd snapshots are read-only"),
                None => OpenError::os("Could not open image", Errno::EACCES),
            };
            return Err(error.with_hint("read-only=on opens it for reading"));
        }
        Ok(Arc::new(RbdNode::new(node.name(), common, opened)))
    }

    fn connect(&self, context: &ConnectContext<'_>) -> Option<Connecting> {
        let (options, event_loop) = (self.clone(), context.event_loop.clone());
        let connections = Connections::of(context.nodes.services());
        let secrets = Secrets::of(self, context.credentials);
        Some(Box::pin(async move {
            let opened = connections?.open(&event_loop, &options, secrets?).await?;
            Ok(Box::new(opened) as Box<dyn Any + Send>)
        }))
    }
}

impl RbdOptions {
    fn members(&self, with_defaults: bool) -> Members {
        let RbdOptions {
            pool,
            namespace,
            image,
            conf,
            snapshot,
            user,
            key_secret,
            encrypt,
            auth_client_required,
            server,
        } = self;
        let mut members = vec![("pool", pool.as_str().into())];
        if with_defaults || !namespace.is_empty() {
            members.push(("namespace", namespace.as_str().into()));
        }
        members.push(("image", image.as_str().into()));
        members.extend(conf.as_deref().map(|path| ("conf", write_path(path))));
        members.extend(snapshot.as_deref().map(|name| ("snapshot", name.into())));
        members.extend(user.as_deref().map(|name| ("user", name.into())));
        members.extend(key_secret.as_deref().map(|id| ("key-secret", id.into())));
        members.extend(encrypt.as_ref().map(|encrypt| ("encrypt", encrypt.write())));
        if !auth_client_required.is_empty() {
            let modes = auth_client_required.iter().map(|mode: &AuthMode| mode.word().into());
            members.push(("auth-client-required", Value::List(modes.collect())));
        }
        if !server.is_empty() {
            let servers = server.iter().map(|(host, port)| {
                write_object([("host", host.as_str().into()), ("port", port.as_str().into())])
            });
            members.push(("server", Value::List(servers.collect())));
        }
        members
    }
}
