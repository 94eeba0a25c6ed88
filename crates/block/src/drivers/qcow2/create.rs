//! Creating images.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::Arc;

use imago::FormatCreateBuilder;
use imago::qcow2::Qcow2;

use super::open::{Below, run_apart};
use super::storage::{NodeStorage, Role, Shared, sync};
use crate::drivers::file::{FileNode, Kind};
use crate::error::OpenError;
use crate::inherited::Inherited;
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, Driver, FileOptions, Locking};

/// A qcow2 image to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateQcow2 {
    /// Bytes of the disk, a multiple of 512.
    pub size: u64,
    /// The backing file as the header names it (relative to the image, if it is no absolute path), and
    /// its format.
    pub backing: Option<(String, String)>,
    /// Bytes of a cluster: a power of two, 512 to 2 MiB. QEMU's default is 64 KiB.
    pub cluster_size: u32,
    /// Bits of a reference count: a power of two, 1 to 64. QEMU's default is 16.
    pub refcount_bits: u32,
}

impl CreateQcow2 {
    /// One of that size, bytes, with what QEMU has by default, and nothing behind.
    pub fn new(size: u64) -> CreateQcow2 {
        CreateQcow2 { size, backing: None, cluster_size: 65536, refcount_bits: 16 }
    }
}

/// Creates an image in the file at `path`, which is made, or made empty before. Blocks until its content is
/// on stable storage. The caller syncs the folder of a new file.
///
/// # Errors
///
/// The file cannot be made, locked or written, or the options fit no image.
pub fn create_qcow2(path: &Path, create: &CreateQcow2) -> Result<(), OpenError> {
    if !create.size.is_multiple_of(512) {
        return Err(OpenError::new("Image size must be a multiple of 512"));
    }
    let made = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    made.map_err(|error| failed(path, &error))?;
    let file = FileOptions { filename: path.to_owned(), aio: None, locking: Locking::Auto };
    let common = BlockdevOptions::new(None, Driver::file(file.clone()));
    // Locked from here on, so nobody else's image is made empty.
    let node =
        FileNode::open("#create".into(), Kind::File, &common, &file, &mut Inherited::default())?;
    let emptied = OpenOptions::new().write(true).truncate(true).open(path);
    emptied.map_err(|error| failed(path, &error))?;
    let node: Arc<dyn BlockNode> = Arc::new(node);
    node.let_grow();
    let below = Below { file: node, data_file: None, backing: None };
    let create = create.clone();
    let created = run_apart(&below, move |channels| async move {
        let storage = NodeStorage::new(Role::File, "#create", Shared::new(None));
        let mut builder = Qcow2::<NodeStorage>::create_builder(storage)
            .size(create.size)
            .cluster_size(create.cluster_size as usize)
            .refcount_width(create.refcount_bits as usize);
        if let Some((filename, format)) = create.backing {
            builder = builder.backing(filename, format);
        }
        builder.create().await?;
        Ok(sync(&channels).await?)
    });
    created.map_err(|error| failed(path, &error))
}

fn failed(path: &Path, error: &io::Error) -> OpenError {
    OpenError::io(format!("Could not create '{}'", path.display()), error)
}
