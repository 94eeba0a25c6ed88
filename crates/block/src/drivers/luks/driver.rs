//! What a luks node is to the rest of the daemon.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use ::options::{Object, Value};
use crypto::cipher::SECTOR;

use super::node::LuksNode;
use super::options::{FIELDS, LUKS, LuksOptions};
use crate::connections::ConnectContext;
use crate::driver::{
    BlockDriver, ChildOption, Connecting, Description, DriverKind, HandOver, Layer, Look, Needs,
    NeverInactive, NotReopened, OpenContext, is_defined_anew,
};
use crate::drivers::encryption::{Unlocked, password, read_slots, specific, unlock};
use crate::error::OpenError;
use crate::node::{BlockNode, ImageDetails, ImageHeader};
use crate::options::{BlockdevRef, write_options};
use crate::permissions::ChildUse;

impl BlockDriver for LuksOptions {
    fn kind(&self) -> &'static DriverKind {
        &LUKS
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    fn children(&self) -> Vec<ChildOption<'_>> {
        let file = ChildOption { role: "file", used_as: ChildUse::Encrypted, node: &self.file };
        let header = self.header.as_ref();
        let header =
            header.map(|node| ChildOption { role: "header", used_as: ChildUse::Encrypted, node });
        [file].into_iter().chain(header).collect()
    }

    fn set_child(&mut self, role: &str, child: BlockdevRef) -> bool {
        match role {
            "file" => self.file = child,
            "header" if self.header.is_some() => self.header = Some(child),
            _ => return false,
        }
        true
    }

    fn layer(&self) -> Layer {
        Layer::Window
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        self.key_secret.iter().map(|id| ("secret", id.as_str())).collect()
    }

    fn needs(&self) -> Needs<'_> {
        Needs::NONE
    }

    fn hand_over(&self) -> HandOver {
        HandOver::AtOnce
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        let key = self.key_secret.as_deref().map(|id| ("key-secret".to_owned(), Value::from(id)));
        Description { filename: None, options: key.into_iter().collect(), specific: None }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let unlocked: Unlocked = node.connection()?;
        let (name, child) = (node.name().to_owned(), node.child("file")?);
        Ok(Arc::new(LuksNode::new(name, node.options(), unlocked, child)?))
    }

    /// Derives the key. The iteration count in the disk's header decides how long this takes:
    /// usually seconds.
    fn connect(&self, context: &ConnectContext<'_>) -> Option<Connecting> {
        let header = context.nodes.to_read(self.header.as_ref().unwrap_or(&self.file));
        let secret = password(context.credentials, self.key_secret.as_deref(), "key-secret");
        let is_detached = self.header.is_some();
        Some(Box::pin(async move {
            let unlocked = unlock(header?, |_| Ok(0), secret?).await?;
            // Writes to the disk would destroy the header.
            if unlocked.payload == 0 && !is_detached {
                let error = OpenError::new("LUKS payload is overlapping with the header");
                return Err(error.with_hint(
                    "A detached header belongs to a disk in another file: give the header by the option \
                     header, and the disk by file.",
                ));
            }
            Ok(Box::new(unlocked) as Box<dyn Any + Send>)
        }))
    }

    fn read_header(&self, file: &Arc<dyn BlockNode>) -> Option<Result<ImageHeader, OpenError>> {
        // A detached header is in another node.
        self.header.is_none().then(|| {
            let slots = read_slots(file.clone(), 0)?;
            let header = slots.header();
            let room = file.geometry().size.saturating_sub(header.payload());
            let data = Value::Object(specific(&header));
            let details = ImageDetails {
                cluster_size: None,
                encrypted: true,
                backing: None,
                specific: vec![("type".to_owned(), "luks".into()), ("data".to_owned(), data)],
            };
            let size = room - room % SECTOR as u64;
            Ok(ImageHeader { size, is_dirty: false, details, snapshots: Vec::new() })
        })
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before = before.as_any().downcast_ref::<Self>().ok_or(NotReopened::Unsupported)?;
        NotReopened::unless_kept(before, self)?;
        NotReopened::unless_same(&[
            ("file.driver", is_defined_anew(&before.file, &self.file)),
            ("header", before.header != self.header),
        ])
    }
}
