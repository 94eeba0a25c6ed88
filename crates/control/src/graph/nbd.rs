//! The NBD server and its exports.

use super::{Export, Graph, known};
use crate::error::OptionError;
use crate::export::{self, Address, ExportOptions};
use crate::nbd_server::NbdServerOptions;

impl Graph {
    /// Returns the graph without the NBD server. Its exports go with it.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn without_nbd_server(&self) -> Result<Graph, OptionError> {
        let mut graph = self.clone();
        match graph.nbd_server.take() {
            Some(_) => Ok(graph),
            None => Err(OptionError::new("NBD server not running")),
        }
    }

    /// Returns the export that `nbd-server-add` asks for.
    ///
    /// It cannot be written to where its node cannot.
    ///
    /// # Errors
    ///
    /// There is no such node, or no export can have that name.
    pub fn nbd_export(
        &self,
        device: &str,
        name: &str,
        description: &str,
        bitmap: Option<&str>,
        writable: bool,
    ) -> Result<ExportOptions, OptionError> {
        if self.nbd_server.is_none() {
            return Err(OptionError::new("NBD server not running"));
        }
        let node = self.find(device, device)?;
        let can_write = !node.read_only && !self.lies_on_read_only(device);
        export::nbd_export(device, name, description, bitmap, writable && can_write)
    }

    /// Returns whether that export is one of the NBD server's; `None`: there is none.
    pub fn is_nbd_export(&self, id: &str) -> Option<bool> {
        self.exports.get(id).map(|export| matches!(export.address, Address::Nbd(_)))
    }

    /// Returns the exports of the NBD server.
    pub fn nbd_exports(&self) -> impl Iterator<Item = &String> {
        let of_server = |export: &&Export| matches!(export.address, Address::Nbd(_));
        self.exports.iter().filter(move |(_, export)| of_server(export)).map(|(id, _)| id)
    }

    pub(super) fn nbd_server(&mut self, server: &NbdServerOptions) -> Result<(), OptionError> {
        if self.nbd_server.is_some() {
            return Err(OptionError::new("NBD server already running"));
        }
        let mut objects = Vec::new();
        let of = |kind: &str| {
            let all = self.objects.iter().filter(|(_, own)| own.starts_with(kind));
            known("Objects of that kind", all.map(|(id, _)| id))
        };
        if let Some(id) = &server.tls_creds {
            match self.objects.get(id) {
                None => {
                    return Err(OptionError::new(format!("No TLS credentials with id '{id}'"))
                        .hint(of("tls-creds")));
                }
                Some(kind) if !kind.starts_with("tls-creds") => {
                    let message = format!("Object with id '{id}' is not TLS credentials");
                    return Err(OptionError::new(message).hint(of("tls-creds")));
                }
                Some(_) => objects.push(id.clone()),
            }
        }
        if let Some(id) = &server.tls_authz {
            if server.tls_creds.is_none() {
                return Err(OptionError::new("Parameter 'tls-authz' needs 'tls-creds'"));
            }
            match self.objects.get(id) {
                Some(kind) if kind.starts_with("authz") => objects.push(id.clone()),
                Some(_) => {
                    let message = format!("Object with id '{id}' is not an authorization object");
                    return Err(OptionError::new(message).hint(of("authz")));
                }
                None => {
                    return Err(OptionError::new(format!(
                        "No authorization object with id '{id}'"
                    ))
                    .hint(of("authz")));
                }
            }
        }
        self.nbd_server = Some(objects);
        Ok(())
    }
}
