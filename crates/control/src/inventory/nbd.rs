//! The NBD server and its exports.

use super::{Export, Inventory, NbdServer, known};
use crate::error::OptionError;
use crate::export::{self, Address, ExportOptions};
use crate::nbd_server::NbdServerOptions;

impl Export {
    fn is_of_nbd_server(&self) -> bool {
        matches!(self.options.kind.address(), Address::Nbd(_))
    }
}

impl Inventory {
    /// Returns the inventory without the NBD server. Its exports go with it.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn without_nbd_server(&self) -> Result<Inventory, OptionError> {
        let mut inventory = self.clone();
        match inventory.nbd_server.take() {
            Some(_) => Ok(inventory),
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
        self.exports.get(id).map(Export::is_of_nbd_server)
    }

    /// Whether an export shows dirty bitmaps. A restart after a kill may not find them.
    pub fn shows_bitmaps(&self, id: &str) -> bool {
        self.export(id).is_some_and(|(options, _)| options.kind.shows_bitmaps())
    }

    /// Returns the exports of the NBD server.
    pub fn nbd_exports(&self) -> impl Iterator<Item = &String> {
        self.exports.iter().filter(|(_, export)| export.is_of_nbd_server()).map(|(id, _)| id)
    }

    pub(super) fn nbd_server(
        &mut self,
        server: &NbdServerOptions,
        option: String,
    ) -> Result<(), OptionError> {
        if self.nbd_server.is_some() {
            return Err(OptionError::new("NBD server already running"));
        }
        let mut objects = Vec::new();
        let of = |kind: &str| {
            let all = self.objects.iter().filter(|(_, own)| own.kind.starts_with(kind));
            known("Objects of that kind", all.map(|(id, _)| id))
        };
        if let Some(id) = &server.tls_creds {
            match self.kind_of_object(id) {
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
            match self.kind_of_object(id) {
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
        let serial = self.serial();
        self.nbd_server = Some(NbdServer { serial, option, objects });
        Ok(())
    }
}
