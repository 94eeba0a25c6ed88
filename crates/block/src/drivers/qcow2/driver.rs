//! What a qcow2 image is to the rest of the daemon.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use ::options::{Object, Value};

use super::options::{Backing, FIELDS, QCOW2, Qcow2Options};
use super::{described, encrypt, implicit};
use crate::connections::ConnectContext;
use crate::driver::{
    BlockDriver, ChildOption, Connecting, Description, DriverKind, HandOver, Layer, Look, Needs,
    NeverInactive, NotReopened, OpenContext, Reopened, is_defined_anew,
};
use crate::drivers::encryption::{password, unlock};
use crate::error::OpenError;
use crate::node::{BlockNode, ImageHeader};
use crate::options::{BlockdevRef, write_options};
use crate::permissions::ChildUse;

impl Qcow2Options {
    /// The secret object with the password of an encrypted image.
    pub(super) fn key_secret(&self) -> Option<&str> {
        self.encrypt.as_ref()?.key_secret.as_deref()
    }
}

impl BlockDriver for Qcow2Options {
    fn kind(&self) -> &'static DriverKind {
        &QCOW2
    }

    fn write(&self) -> Object {
        write_options(FIELDS, self)
    }

    fn children(&self) -> Vec<ChildOption<'_>> {
        let child = |role, used_as, node| ChildOption { role, used_as, node };
        let data_file = self.data_file.iter().map(|node| child("data-file", ChildUse::Data, node));
        let backing = match &self.backing {
            Backing::Node(node) => Some(child("backing", ChildUse::Backing, node)),
            Backing::Implicit | Backing::None => None,
        };
        let file = child("file", ChildUse::Metadata, &self.file);
        [file].into_iter().chain(data_file).chain(backing).collect()
    }

    fn set_child(&mut self, role: &str, child: BlockdevRef) -> bool {
        match role {
            "file" => self.file = child,
            "data-file" => self.data_file = Some(child),
            "backing" => self.backing = Backing::Node(child),
            _ => return false,
        }
        true
    }

    fn remove_child(&mut self, role: &str) -> bool {
        if role == "backing" && self.backing != Backing::Implicit {
            self.backing = Backing::None;
        }
        role == "backing"
    }

    fn layer(&self) -> Layer {
        Layer::Format
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        self.key_secret().map(|id| ("secret", id)).into_iter().collect()
    }

    fn needs(&self) -> Needs<'_> {
        Needs { journal: true, ..Needs::NONE }
    }

    fn hand_over(&self) -> HandOver {
        HandOver::Journal
    }

    fn look(&mut self, look: Look) -> Result<(), NeverInactive> {
        match look {
            Look::Geometry => self.backing = Backing::None,
            Look::Contents => {}
        }
        Ok(())
    }

    fn describe(&self, child: Option<&str>) -> Description {
        let backing = match self.backing {
            Backing::None => Some(("backing".to_owned(), Value::Null)),
            Backing::Implicit | Backing::Node(_) => None,
        };
        let key = self.key_secret().map(|id| ("encrypt.key-secret".to_owned(), Value::from(id)));
        Description {
            filename: child.filter(|_| key.is_none()).map(str::to_owned),
            options: backing.into_iter().chain(key).collect(),
            specific: None,
        }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        Ok(Arc::new(implicit::open(self, node)?))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before: &Self = before.as_any().downcast_ref().ok_or(NotReopened::Unsupported)?;
        let is_backing_anew = match (&before.backing, &self.backing) {
            // A node that the image names is defined inside the image's.
            (Backing::Node(before), Backing::Node(after)) => is_defined_anew(before, after),
            (Backing::None, Backing::Node(BlockdevRef::Inline(_))) => true,
            (Backing::Implicit | Backing::None | Backing::Node(_), _) => false,
        };
        let reset = |option: &str| Err(NotReopened::Reset(option.to_owned()));
        let is_data_file_anew = match (&before.data_file, &self.data_file) {
            (Some(BlockdevRef::Inline(_)), None) => return reset("driver"),
            (Some(BlockdevRef::Name(_)), None) => return reset("data-file"),
            (Some(BlockdevRef::Inline(_)), Some(BlockdevRef::Inline(_))) => false,
            (before, after) => before != after,
        };
        if before.encrypt.is_some() && self.encrypt.is_none() {
            return reset("encrypt.format");
        }
        NotReopened::unless_same(&[
            ("file.driver", is_defined_anew(&before.file, &self.file)),
            ("backing.driver", is_backing_anew),
            ("data-file", is_data_file_anew),
        ])
    }

    fn read_header(&self, file: &Arc<dyn BlockNode>) -> Option<Result<ImageHeader, OpenError>> {
        Some(described::read_header(file))
    }

    fn closes_to_reopen(&self) -> bool {
        true
    }

    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        Ok(Reopened::anew(Arc::new(implicit::reopen(self, node)?)))
    }

    /// Derives the key of an encrypted image, which takes seconds.
    fn connect(&self, context: &ConnectContext<'_>) -> Option<Connecting> {
        let encrypt = self.encrypt.as_ref()?;
        let image = context.nodes.to_read(&self.file);
        let id = encrypt.key_secret.as_deref();
        let secret = password(context.credentials, id, "encrypt.key-secret");
        Some(Box::pin(async move {
            let unlocked = unlock(image?, encrypt::locate, secret?).await?;
            Ok(Box::new(unlocked) as Box<dyn Any + Send>)
        }))
    }
}
