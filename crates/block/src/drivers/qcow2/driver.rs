//! What a qcow2 image is to the rest of the daemon.

use std::path::Path;
use std::sync::Arc;

use ::options::Value;

use super::implicit;
use super::options::{Backing, QCOW2, Qcow2Options};
use crate::driver::{
    BlockDriver, ChildOption, Description, DriverKind, HandOver, Layer, Look, Members, Needs,
    NeverInactive, OpenContext,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::{BlockdevRef, write_ref};
use crate::permissions::ChildUse;

impl BlockDriver for Qcow2Options {
    fn kind(&self) -> &'static DriverKind {
        &QCOW2
    }

    fn write(&self) -> Members {
        let Qcow2Options { file, data_file, backing, pass_discard_request, discard_no_unref } =
            self;
        let mut own =
            vec![("file", write_ref(file)), ("discard-no-unref", (*discard_no_unref).into())];
        own.extend(data_file.iter().map(|node| ("data-file", write_ref(node))));
        own.extend(match backing {
            Backing::Implicit => None,
            Backing::None => Some(("backing", Value::Null)),
            Backing::Node(node) => Some(("backing", write_ref(node))),
        });
        own.extend(pass_discard_request.map(|on| ("pass-discard-request", on.into())));
        own
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
        Vec::new()
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
        Description {
            filename: child.map(str::to_owned),
            options: backing.into_iter().collect(),
            specific: None,
        }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        Ok(Arc::new(implicit::open(self, node)?))
    }
}
