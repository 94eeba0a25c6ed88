//! A guest's disk as a file: raw, or in a qcow2 image.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use block::{CreateQcow2, create_qcow2};
use event_loop::ring::sim::Storage;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::fds::{Fds, Kept};
use crate::model::SECTOR;
use crate::oracle;

/// The format of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Raw,
    /// With this cluster size, bytes.
    Qcow2(u32),
}

impl Format {
    /// Returns the contents of the disk in an image with these bytes. Fails if the image is damaged.
    pub(crate) fn contents(self, bytes: Vec<u8>) -> Result<Vec<u8>, String> {
        match self {
            Format::Raw => Ok(bytes),
            Format::Qcow2(_) => oracle::Image::read(&bytes, &[]),
        }
    }
}

/// An image.
#[derive(Clone)]
pub(crate) struct Image {
    file: Rc<Kept>,
    pub(crate) format: Format,
    /// The image behind it, if its header names one.
    below: Option<Box<Image>>,
}

impl Image {
    /// Makes an image that reads as zeroes.
    pub(crate) fn new(fds: &Rc<Fds>, format: Format, sectors: u32) -> Self {
        let file = memfd_create(c"sim-disk", MFdFlags::MFD_CLOEXEC).expect("a memfd");
        let size = u64::from(sectors) * SECTOR as u64;
        let image = Image { file: Kept::new(fds, file), format, below: None };
        match format {
            Format::Raw => nix::unistd::ftruncate(image.fd(), size.cast_signed()).expect("memory"),
            Format::Qcow2(cluster_size) => {
                let create = CreateQcow2 { cluster_size, ..CreateQcow2::new(size) };
                create_qcow2(&image.path(), &create).expect("an image");
            }
        }
        image
    }

    /// The image in a file that exists.
    pub(crate) fn of_file(fds: &Rc<Fds>, path: &Path, format: Format) -> Self {
        let file = File::open(path).expect("the image");
        Image { file: Kept::new(fds, file.into()), format, below: None }
    }

    /// With an image behind it.
    pub(crate) fn over(self, below: Image) -> Self {
        Image { below: Some(Box::new(below)), ..self }
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.file
    }

    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.fd().as_raw_fd()))
    }

    /// Whether answered writes may be only in the daemon's memory until a flush.
    pub(crate) fn keeps_back(&self) -> bool {
        self.format != Format::Raw
    }

    /// Returns the contents of the disk, read from the file alone. Fails if the image is damaged.
    pub(crate) fn contents(&self) -> Result<Vec<u8>, String> {
        let bytes = std::fs::read(self.path()).expect("the image");
        // qcow2's specification: the place of the name of the backing image, or 0.
        let has_backing = bytes.get(8..16).is_some_and(|place| place.iter().any(|byte| *byte != 0));
        match &self.below {
            Some(below) if has_backing => oracle::Image::read(&bytes, &below.contents()?),
            _ => self.format.contents(bytes),
        }
    }

    /// Marks the file's contents as stable.
    pub(crate) fn is_stable(&self, storage: &Storage) {
        let bytes = std::fs::read(self.path()).expect("the image");
        storage.restore(self.fd(), bytes).expect("an image on the storage");
    }

    /// Cuts the power: the file then has what its storage kept.
    pub(crate) fn cut(&self, storage: &Storage, seed: u64) {
        let left = storage.cut(self.fd(), seed).expect("an image on the storage");
        storage.restore(self.fd(), left).expect("memory");
    }
}
