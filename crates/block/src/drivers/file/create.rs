//! Creates regular files.

use ::options::place::OneOf;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ::options::table::{Row, Table, put};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use super::locks::CreationLock;
use crate::create::{CHUNK, CreateContext, CreateKind, Creating, NewImage, Preallocation};
use crate::error::OpenError;

pub(super) static CREATE: CreateKind = CreateKind { help: "a regular file", options: &OPTIONS };

/// A file to be created.
#[derive(Debug, Default)]
struct NewFile {
    filename: PathBuf,
    size: u64,
    preallocation: Preallocation,
}

impl NewImage for NewFile {
    fn nodes(&self) -> Vec<&str> {
        Vec::new()
    }

    fn create(self: Box<Self>, context: &CreateContext<'_>) -> Creating {
        let NewFile { filename, size, preallocation } = *self;
        let mounts = context.nodes.services().own_mounts().clone();
        (context.on_thread)(Box::new(move || {
            mounts.check(&filename)?;
            create(&filename, size, preallocation)
        }))
    }
}

static OPTIONS: Table<NewFile, Box<dyn NewImage>> = Table {
    fields: &[
        Row::required("filename", "where it is made; a file that is there is emptied")
            .path(|file, path| put(&mut file.filename, path)),
        Row::required("size", "size of the disk").bytes(|file, size| put(&mut file.size, size)),
        Row::default("preallocation", "off", "how its space is allocated beforehand").at(&OneOf {
            at: |file: &mut NewFile| &mut file.preallocation,
            words: &[
                ("off", Preallocation::Off, "sparse"),
                ("falloc", Preallocation::Falloc, "its space is reserved"),
                ("full", Preallocation::Full, "its space is written with zeroes"),
            ],
        }),
    ],
    build: |file| Ok(Box::new(file)),
};

fn create(path: &Path, size: u64, preallocation: Preallocation) -> Result<(), OpenError> {
    let shown = path.display();
    let mut options = OpenOptions::new();
    // The content is kept until the file is known to be unused.
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o644).open(path);
    let file =
        file.map_err(|error| OpenError::io(format!("Could not create '{shown}'"), &error))?;
    let _lock = CreationLock::take(&file, path)?;
    let resize = |size| {
        file.set_len(size)
            .map_err(|error| OpenError::io(format!("Could not resize '{shown}'"), &error))
    };
    resize(0)?;
    let failed =
        |what: &str, errno: Errno| OpenError::os(format!("Could not {what} '{shown}'"), errno);
    match preallocation {
        Preallocation::Off => resize(size),
        Preallocation::Falloc => {
            let len =
                i64::try_from(size).map_err(|_| failed("preallocate data for", Errno::EFBIG))?;
            match len {
                0 => Ok(()),
                len => fallocate(file.as_fd(), FallocateFlags::empty(), 0, len)
                    .map_err(|errno| failed("preallocate data for", errno)),
            }
        }
        Preallocation::Full => {
            resize(size)?;
            let zeroes = vec![0; CHUNK];
            let mut at = 0;
            while at < size {
                let len = (size - at).min(CHUNK as u64) as usize;
                let part = zeroes.get(..len).unwrap_or(&zeroes);
                file.write_all_at(part, at).map_err(|error| {
                    OpenError::io("Could not write zeros for preallocation", &error)
                })?;
                at += len as u64;
            }
            (&file)
                .flush()
                .and_then(|()| file.sync_data())
                .map_err(|error| OpenError::io("Could not flush file to disk", &error))
        }
    }
}
