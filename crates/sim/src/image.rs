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
use crate::oracle::{self, Found};

/// The format of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Raw,
    /// With this cluster size, bytes.
    Qcow2(u32),
}

impl Format {
    /// Returns what an image with these bytes has. `behind`: the contents of its backing image. Fails if the image is
    /// damaged.
    fn found(self, bytes: Vec<u8>, behind: &[u8]) -> Result<Found, String> {
        match self {
            Format::Raw => Ok(Found {
                contents: bytes,
                bitmaps: Vec::new(),
                compressed: 0,
                snapshots: Vec::new(),
            }),
            Format::Qcow2(_) => oracle::Image::read_all(&bytes, behind, None),
        }
    }

    /// Returns the contents of the disk in an image with these bytes and without a backing image.
    pub(crate) fn contents(self, bytes: Vec<u8>) -> Result<Vec<u8>, String> {
        Ok(self.found(bytes, &[])?.contents)
    }
}

/// An image.
#[derive(Clone)]
pub(crate) struct Image {
    file: Rc<Kept>,
    pub(crate) format: Format,
}

impl Image {
    /// Makes an image that reads as zeroes.
    pub(crate) fn new(fds: &Rc<Fds>, format: Format, sectors: u32) -> Self {
        let file = memfd_create(c"sim-disk", MFdFlags::MFD_CLOEXEC).expect("a memfd");
        let size = u64::from(sectors) * SECTOR as u64;
        let image = Image { file: Kept::new(fds, file), format };
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
        Image { file: Kept::new(fds, file.into()), format }
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

    /// The name of the backing image, if the header has one: its first byte and its length are in bytes 8 and 16.
    pub(crate) fn backing_name(&self) -> Option<String> {
        if self.format == Format::Raw {
            return None;
        }
        let bytes = self.bytes();
        let at = usize::try_from(u64::from_be_bytes(*bytes.get(8..)?.first_chunk()?)).ok()?;
        let len = u32::from_be_bytes(*bytes.get(16..)?.first_chunk()?) as usize;
        let name = bytes.get(at..at + len).unwrap_or_default();
        (at != 0).then(|| String::from_utf8_lossy(name).into_owned())
    }

    /// Returns what the file has. `behind`: the contents of the backing image. Fails if the image is damaged.
    pub(crate) fn found(&self, behind: &[u8]) -> Result<Found, String> {
        self.format.found(self.bytes(), behind)
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path()).expect("the image")
    }

    /// Cuts the power: the file then has what its storage kept.
    pub(crate) fn cut(&self, storage: &Storage, seed: u64) {
        let left = storage.cut(self.fd(), seed).expect("an image on the storage");
        storage.restore(self.fd(), left).expect("memory");
    }
}
