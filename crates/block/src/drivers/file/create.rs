//! Creates regular files.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ::options::table::{Choice, Row, Table, put};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::ftruncate;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::calls::set_extent_size;
use super::locks::CreationLock;
use crate::create::{CHUNK, CreateContext, CreateKind, Creating, NewImage, Preallocation};
use crate::error::OpenError;
use crate::options::BlockdevRef;

pub(super) static CREATE: CreateKind = CreateKind { help: "a regular file", options: &OPTIONS };

/// A file to be created.
#[derive(Debug, Default)]
struct NewFile {
    filename: PathBuf,
    size: u64,
    preallocation: Preallocation,
    nocow: bool,
    /// `extent-size-hint`. `None`: the default.
    extent_size: Option<u64>,
}

/// QEMU's default of `extent-size-hint`, bytes: fewer extents of a file that is written at random.
const EXTENT_SIZE: u32 = 1 << 20;

impl NewImage for NewFile {
    fn nodes(&mut self) -> Vec<&mut BlockdevRef> {
        Vec::new()
    }

    fn create(self: Box<Self>, context: &CreateContext<'_>) -> Creating {
        let mounts = context.nodes.services().own_mounts().clone();
        (context.on_thread)(Box::new(move || {
            mounts.check(&self.filename)?;
            create(&self)
        }))
    }
}

static OPTIONS: Table<NewFile, Box<dyn NewImage>> = Table {
    fields: &[
        Row::required("filename", "where it is made; a file that is there is emptied")
            .path(|file, path| put(&mut file.filename, path)),
        Row::required("size", "size of the disk").bytes(|file, size| put(&mut file.size, size)),
        Row::default("preallocation", "off", "how its space is allocated beforehand").choice(&[
            Choice::new("off", "sparse", |file| put(&mut file.preallocation, Preallocation::Off)),
            // QEMU's word of all drivers, which fails.
            Choice::unoffered("metadata", |file| {
                put(&mut file.preallocation, Preallocation::Metadata)
            }),
            Choice::new("falloc", "its space is reserved", |file| {
                put(&mut file.preallocation, Preallocation::Falloc)
            }),
            Choice::new("full", "its space is written with zeroes", |file| {
                put(&mut file.preallocation, Preallocation::Full)
            }),
        ]),
        Row::default("nocow", "off", "on btrfs, overwrite data in place")
            .bool(|file, on| put(&mut file.nocow, on)),
        Row::default(
            "extent-size-hint",
            "1048576",
            "on XFS, bytes that are allocated at a time; 0: as the file system does without a hint",
        )
        .bytes(|file, size| put(&mut file.extent_size, Some(size))),
    ],
    build: |file| Ok(Box::new(file)),
};

fn create(new: &NewFile) -> Result<(), OpenError> {
    let NewFile { filename: path, size, preallocation, nocow, extent_size } = new;
    let (path, size): (&Path, _) = (path, *size);
    let shown = path.display();
    let extent_size = extent_size.map(u32::try_from).transpose();
    let extent_size = extent_size.map_err(|_| OpenError::new("Extent size hint is too large"))?;
    let mut options = OpenOptions::new();
    // The content is kept until the file is known to be unused.
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o644).open(path);
    let file =
        file.map_err(|error| OpenError::io(format!("Could not create '{shown}'"), &error))?;
    let _lock = CreationLock::take(&file, path)?;
    let failed = |what: &str, errno: Errno| OpenError::os(what, errno);
    let resize = |size: u64| {
        let len = i64::try_from(size).map_err(|_| Errno::EINVAL);
        let done = len.and_then(|len| ftruncate(&file, len));
        done.map_err(|errno| failed("Could not resize file", errno))
    };
    resize(0)?;
    give_attributes(&file, path, *nocow, extent_size);
    let allocated = match preallocation {
        Preallocation::Off => resize(size),
        Preallocation::Metadata => Err(OpenError::new("Unsupported preallocation mode: metadata")),
        Preallocation::Falloc => match i64::try_from(size) {
            Err(_) => Err(failed(preallocation.failure(), Errno::EFBIG)),
            Ok(0) => Ok(()),
            Ok(len) => fallocate(file.as_fd(), FallocateFlags::empty(), 0, len)
                .map_err(|errno| failed(preallocation.failure(), errno)),
        },
        Preallocation::Full => resize(size).and_then(|()| {
            fill(&file, size).map_err(|error| OpenError::io(preallocation.failure(), &error))?;
            (&file)
                .flush()
                .and_then(|()| file.sync_data())
                .map_err(|error| OpenError::io("Could not flush file to disk", &error))
        }),
    };
    if allocated.is_err() {
        // It takes no space for nothing. What failed first is the error.
        let _ = resize(0);
    }
    allocated
}

/// Writes zeroes.
fn fill(file: &File, size: u64) -> io::Result<()> {
    let zeroes = vec![0; CHUNK];
    let mut at = 0;
    while at < size {
        let len = (size - at).min(CHUNK as u64) as usize;
        file.write_all_at(zeroes.get(..len).unwrap_or(&zeroes), at)?;
        at += len as u64;
    }
    Ok(())
}

/// Sets attributes of an empty file, for file systems that have them. As in QEMU, an image without them is created, too.
fn give_attributes(file: &File, path: &Path, nocow: bool, extent_size: Option<u32>) {
    if nocow && let Ok(flags) = ioctl_getflags(file) {
        let _ = ioctl_setflags(file, flags | IFlags::NOCOW);
    }
    let size = extent_size.unwrap_or(EXTENT_SIZE);
    if size > 0
        && let Err(errno) = set_extent_size(file, size)
        && extent_size.is_some()
    {
        let (path, why) = (path.display(), errno.desc());
        log::warn!("setting the extent size hint of '{path}' failed: {why}");
    }
}
