//! What a node of a file or block device is to the rest of the daemon.

use std::path::Path;
use std::sync::Arc;

use ::options::{Object, Value};

use super::options::{FIELDS, FILE, FileOptions, HOST_DEVICE};
use super::{FileNode, Kind};
use crate::driver::{
    BlockDriver, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive, NotReopened,
    OpenContext, Reopened,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::{Driver, Locking, write_options};
use crate::own_mounts::OwnMounts;

impl Driver {
    /// Returns the driver `file`: a regular file.
    pub fn file(options: FileOptions) -> Driver {
        Driver::from(Image { kind: Kind::File, options })
    }

    /// Returns the driver `host_device`: a block device.
    pub fn host_device(options: FileOptions) -> Driver {
        Driver::from(Image { kind: Kind::HostDevice, options })
    }

    /// Returns the driver for a name that comes without a driver, as in an image's header: `host_device` for a block
    /// device, else `file`.
    ///
    /// A link counts as what it leads to. What cannot be examined, such as a file on one of `mounts`, is left to `file`,
    /// whose error has the reason. May block.
    pub fn of_kind(options: FileOptions, mounts: &OwnMounts) -> Driver {
        match Kind::of(&options.filename, mounts) {
            Kind::File => Driver::file(options),
            Kind::HostDevice => Driver::host_device(options),
        }
    }

    /// Returns the options of `file` or `host_device`.
    pub fn as_file_mut(&mut self) -> Option<&mut FileOptions> {
        self.downcast_mut().map(|image: &mut Image| &mut image.options)
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Image {
    kind: Kind,
    options: FileOptions,
}

impl BlockDriver for Image {
    fn kind(&self) -> &'static DriverKind {
        match self.kind {
            Kind::File => &FILE,
            Kind::HostDevice => &HOST_DEVICE,
        }
    }

    fn write(&self) -> Object {
        write_options(FIELDS, &self.options)
    }

    crate::children!();

    fn layer(&self) -> Layer {
        Layer::Storage
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    fn needs(&self) -> Needs<'_> {
        Needs { files: vec![&self.options.filename], ..Needs::NONE }
    }

    fn hand_over(&self) -> HandOver {
        HandOver::AtOnce
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        self.options.locking = Locking::Off;
        Ok(())
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        let filename = self.options.filename.display().to_string();
        let data = Value::Object(Vec::new());
        Description {
            options: vec![("filename".to_owned(), filename.as_str().into())],
            filename: Some(filename),
            specific: Some(vec![("type".to_owned(), "file".into()), ("data".to_owned(), data)]),
        }
    }

    fn local_file(&self) -> Option<&Path> {
        Some(&self.options.filename)
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let (name, common) = (node.name().to_owned(), node.options());
        let mounts = node.own_mounts();
        let inherited = node.inherited();
        let file = FileNode::open(name, self.kind, common, &self.options, &mounts, inherited)?;
        node.remember_image(&self.options.filename, &file);
        Ok(Arc::new(file))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let before: &Self = before.as_any().downcast_ref().ok_or(NotReopened::Unsupported)?;
        let (before, after) = (&before.options, &self.options);
        NotReopened::unless_same(&[
            ("filename", before.filename != after.filename),
            ("aio", before.aio != after.aio),
            ("locking", before.locking != after.locking),
        ])
    }

    fn reopen(&self, node: &mut OpenContext<'_>) -> Result<Reopened, OpenError> {
        let (lock, flush_failed) = (node.image_lock(), node.flush_failed());
        let restore = lock.clone().map(|lock| {
            let claims = lock.claims();
            // Less than what it has now, or what it had a moment ago.
            Box::new(move || drop(lock.change(claims))) as Box<dyn FnOnce() + Send>
        });
        let (name, common) = (node.name().to_owned(), node.options());
        let mounts = node.own_mounts();
        let file =
            FileNode::reopen(name, self.kind, common, &self.options, &mounts, lock, flush_failed)?;
        node.remember_image(&self.options.filename, &file);
        Ok(Reopened { restore, ..Reopened::anew(Arc::new(file)) })
    }
}
