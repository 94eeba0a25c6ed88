//! `file` and `host_device`: an image of the host.

use std::path::PathBuf;

use crate::options::{Draft, Driver, ImageDraft};

use crate::driver::{DriverKind, OptionTable};
use ::options::OptionError;
use ::options::place::Checked;
use ::options::table::{self, Field, Kind, Need, Row, only_off};

pub(in crate::drivers) static FILE: DriverKind = DriverKind {
    name: "file",
    help: "a regular file",
    example: "file,node-name=n,filename=/srv/disk.img,cache.direct=on,discard=unmap",
    options: &OptionTable {
        fields: FIELDS,
        start: Draft::new,
        build: |draft| Ok(Driver::file(build(draft, "file")?)),
    },
    create: Some(&super::create::CREATE),
    amend: None,
    library: None,
};

pub(in crate::drivers) static HOST_DEVICE: DriverKind = DriverKind {
    name: "host_device",
    help: "a block device of the host",
    example: "host_device,node-name=n,filename=/dev/vg/disk,cache.direct=on",
    options: &OptionTable {
        fields: FIELDS,
        start: Draft::new,
        build: |draft| Ok(Driver::host_device(build(draft, "host_device")?)),
    },
    create: None,
    amend: None,
    library: None,
};

/// Options of `file` and `host_device`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileOptions {
    /// `filename`.
    pub filename: PathBuf,
    /// `aio`; `None` means io_uring where the loop has it, else threads.
    pub aio: Option<Aio>,
    /// `locking`.
    pub locking: Locking,
}

/// `aio=threads|io_uring|native`: the mechanism of reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    /// A thread pool with blocking system calls.
    Threads,
    /// The loop's ring.
    IoUring,
    /// Linux AIO; with `cache.direct` only.
    Native,
}

/// `locking=auto|on|off`: whether the image is locked against other programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Locking {
    /// Lock where the file system can (open file description locks).
    #[default]
    Auto,
    /// Lock, or fail.
    On,
    /// Do not lock.
    Off,
}

impl ImageDraft for Draft<FileOptions> {
    fn aio(&mut self) -> &mut Option<Aio> {
        &mut self.options.aio
    }

    fn locking(&mut self) -> &mut Locking {
        &mut self.options.locking
    }
}

fn build(draft: Draft<FileOptions>, driver: &str) -> Result<FileOptions, OptionError> {
    match draft.filename.as_os_str().is_empty() {
        true => {
            let message = format!("The '{driver}' block driver requires a file name");
            Err(OptionError::new(message))
        }
        false => Ok(draft.options),
    }
}

pub(super) static FIELDS: &[Field<Draft<FileOptions>>] = &[
    Row::required("filename", "path of the image").at(&Checked {
        meta: "",
        check: |path: &PathBuf| match path.as_os_str().as_encoded_bytes().contains(&0) {
            true => Err(OptionError::new("Parameter 'filename' contains a NUL byte")),
            false => Ok(()),
        },
        at: |node: &mut Draft<FileOptions>| &mut node.filename,
    }),
    Field::unoffered("pr-manager", |_, id, name, at| {
        let id = table::text(id, name, at)?;
        Err(OptionError::new(format!("No persistent reservation manager with id '{id}'"))
            .hint("Persistent reservations are not supported by ringmill yet."))
    }),
    Draft::<FileOptions>::LOCKING,
    Draft::<FileOptions>::AIO,
    Field {
        name: "aio-max-batch",
        // A tuning hint: the loop submits what is queued once per iteration, so nothing waits for
        // a batch to fill, and no data depends on where one is cut.
        kind: Kind::Int { range: 0..=i64::MAX, set: |_, _| Ok(()) },
        need: Need::Default("0"),
        help: "most requests handed to the kernel at once; without effect, as each iteration of \
               the loop hands over what it has",
    },
    Field {
        name: "drop-cache",
        // The option only concerns migration, which ringmill does not do.
        kind: Kind::Bool(|_, _| Ok(())),
        need: Need::Default("on"),
        help: "drop the page cache after migration; without effect, as nothing migrates",
    },
    Field::unoffered("x-check-cache-dropped", only_off),
];
