//! Creates images, as a [`Plan`] has them.

use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crypto::Secret;
use nix::errno::Errno;

use super::context::Channels;
use super::header::{MAX_NAME, MIN_EXTENDED};
use super::open::{Below, run_apart};
use super::plan::{Features, Plan};
use super::steps::write;
use super::storage::sync;
use crate::create::{Preallocation, preallocate, zero};
use crate::drivers::file::{FileNode, Kind};
use crate::error::OpenError;
use crate::inherited::Inherited;
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, Driver, FileOptions, Locking};
use crate::own_mounts::OwnMounts;

/// Most bytes per write of metadata, but for larger clusters.
const AT_ONCE: u64 = 1 << 20;

/// A qcow2 image to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateQcow2 {
    /// Size of the disk in bytes, a multiple of 512.
    pub size: u64,
    /// The backing file as named in the header (relative to the image, unless the path is absolute), and
    /// its format, if it is to be named.
    pub backing: Option<(String, Option<String>)>,
    /// Size of a cluster in bytes: a power of two, 512 to 2 MiB. QEMU's default is 64 KiB.
    pub cluster_size: u32,
    /// Bits of a reference count: a power of two, 1 to 64. QEMU's default is 16.
    pub refcount_bits: u32,
    /// Entries of L2 tables are extended: each of a cluster's 32 subclusters is mapped by itself. Clusters have 16 KiB at
    /// least.
    pub extended_l2: bool,
}

impl CreateQcow2 {
    /// Returns an image of `size` bytes with QEMU's defaults, without a backing file.
    pub fn new(size: u64) -> CreateQcow2 {
        CreateQcow2 {
            size,
            backing: None,
            cluster_size: 65536,
            refcount_bits: 16,
            extended_l2: false,
        }
    }
}

/// Creates an image in the file at `path`, which is created or emptied first.
///
/// Blocks until its content is on stable storage. The caller syncs the folder of a new file.
///
/// # Errors
///
/// The file cannot be created, locked or written, or the options contradict each other.
pub fn create_qcow2(path: &Path, create: &CreateQcow2) -> Result<(), OpenError> {
    create_qcow2_beside(path, create, &OwnMounts::default())
}

/// Creates an image as [`create_qcow2`] does, in a process with FUSE exports.
///
/// # Errors
///
/// As of [`create_qcow2`], or the file is on one of `mounts`.
pub fn create_qcow2_beside(
    path: &Path,
    create: &CreateQcow2,
    mounts: &OwnMounts,
) -> Result<(), OpenError> {
    let plan = plan(create, &Features::default(), 0)?;
    mounts.check(path)?;
    let kind = Kind::of(path, mounts);
    if kind == Kind::File {
        let made = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        made.map_err(|error| failed(path, &error))?;
    }
    let file = FileOptions { filename: path.to_owned(), aio: None, locking: Locking::Auto };
    let common = BlockdevOptions::new(None, Driver::of_kind(file.clone(), mounts));
    // Locked from here on, so that no image in use is emptied.
    let (name, inherited) = ("#create".into(), &mut Inherited::default());
    let node = FileNode::open(name, kind, &common, &file, mounts, inherited)?;
    match kind {
        Kind::File => {
            let emptied = OpenOptions::new().write(true).truncate(true).open(path);
            emptied.map_err(|error| failed(path, &error))?;
        }
        Kind::HostDevice if node.geometry().size < plan.len() => {
            return Err(failed(path, &io::Error::from_raw_os_error(Errno::ENOSPC as i32)));
        }
        // Only metadata is read of a device's old contents, and all of that is written.
        Kind::HostDevice => {}
    }
    let below = Below { file: Arc::new(node), data_file: None, backing: None, encrypted: None };
    put(&below, &plan, None).map_err(|error| failed(path, &error))
}

/// How the bytes for the guest's data are prepared before an image is created.
#[derive(Debug, Clone, Default)]
pub(super) struct Space {
    /// The bytes that are allocated, in the file with the data, and how.
    pub(super) allocated: (Range<u64>, Preallocation),
    /// The bytes that read as zeroes.
    pub(super) zeroed: Range<u64>,
}

/// Creates an image in nodes of at least [`Plan::len`] bytes, over their contents. `luks`: the header of an encrypted
/// image. Blocks until the image is on stable storage. The caller makes sure that no other user of the nodes writes
/// meanwhile.
///
/// # Errors
///
/// A node cannot be written. In QEMU's words, where it has them.
pub(super) fn create_qcow2_in(
    file: Arc<dyn BlockNode>,
    data_file: Option<Arc<dyn BlockNode>>,
    plan: &Plan,
    luks: Option<Secret>,
    space: Space,
) -> Result<(), OpenError> {
    let name = file.name().to_owned();
    let below = Below { file, data_file, backing: None, encrypted: None };
    // In QEMU's words: there, the file is made longer for the disk.
    let of = match below.data_file {
        Some(_) => "Could not resize image",
        None => "Could not resize image: Failed to resize underlying file",
    };
    let what = format!("{of}: {}", space.allocated.1.failure());
    allocate(&below, space).map_err(|error| OpenError::io(what, &error))?;
    put(&below, plan, luks)
        .map_err(|error| OpenError::io(format!("Could not write qcow2 image to '{name}'"), &error))
}

/// Plans a new image.
///
/// # Errors
///
/// The options contradict each other. In QEMU's words, where it has them.
pub(super) fn plan(
    create: &CreateQcow2,
    features: &Features,
    luks_len: u64,
) -> Result<Plan, OpenError> {
    let is_power_within = |number: u32, most| number.is_power_of_two() && number <= most;
    let Features { is_v2, lazy_refcounts, zstd, data_file, is_raw, is_mapped, has_only_format } =
        features;
    // In QEMU's order.
    let error = match () {
        () if !create.size.is_multiple_of(512) => "Image size must be a multiple of 512 bytes",
        () if *is_v2 && create.extended_l2 => {
            "Extended L2 entries are only supported with compatibility level 1.1 and above (use \
             version=v3 or greater)"
        }
        () if create.cluster_size < 512 || !is_power_within(create.cluster_size, 2 << 20) => {
            "Cluster size must be a power of two between 512 and 2048k"
        }
        () if create.extended_l2 && u64::from(create.cluster_size) < MIN_EXTENDED => {
            "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes"
        }
        () if *is_mapped && create.backing.is_some() && !create.extended_l2 => {
            "Backing file and preallocation can only be used at the same time if extended_l2 is on"
        }
        () if *has_only_format => "Backing format cannot be used without backing file",
        () if *is_v2 && *lazy_refcounts => {
            "Lazy refcounts only supported with compatibility level 1.1 and above (use version=v3 \
             or greater)"
        }
        () if !is_power_within(create.refcount_bits, 64) => {
            "Refcount width must be a power of two and may not exceed 64 bits"
        }
        () if *is_v2 && create.refcount_bits != 16 => {
            "Different refcount widths than 16 bits require compatibility level 1.1 or above (use \
             version=v3 or greater)"
        }
        () if *is_raw && data_file.is_none() => "data-file-raw requires data-file",
        () if *is_raw && create.backing.is_some() => {
            "Backing file and data-file-raw cannot be used at the same time"
        }
        () if *is_v2 && data_file.is_some() => {
            "External data files are only supported with compatibility level 1.1 and above (use \
             version=v3 or greater)"
        }
        () if *is_v2 && *zstd => {
            "Non-zlib compression type is only supported with compatibility level 1.1 and above \
             (use version=v3 or greater)"
        }
        () => match Plan::new(create, features, luks_len) {
            Some(plan) => return Ok(plan),
            None if create.backing.as_ref().is_some_and(|(name, _)| name.len() > MAX_NAME) => {
                "The name of the backing file is too long"
            }
            None => "Could not resize image: Failed to grow the L1 table: File too large",
        },
    };
    Err(OpenError::new(error))
}

/// Allocates the space for the guest's data.
fn allocate(below: &Below, space: Space) -> io::Result<()> {
    let Space { allocated: (allocated, how), zeroed } = space;
    if zeroed.is_empty() && (how == Preallocation::Off || allocated.is_empty()) {
        return Ok(());
    }
    below.file.enable_growth();
    run_apart(below, move |channels| async move {
        // Not by way of the cipher: the bytes of the file count.
        let data = channels.data_file.as_ref().unwrap_or(&channels.file);
        if !zeroed.is_empty() {
            zero(data, zeroed, true).await?;
        }
        Ok(preallocate(data, allocated, how).await?)
    })
}

/// Writes an image.
fn put(below: &Below, plan: &Plan, luks: Option<Secret>) -> io::Result<()> {
    let plan = plan.clone();
    below.file.enable_growth();
    run_apart(below, move |channels| async move {
        let cluster = plan.cluster();
        let at_once = (AT_ONCE / cluster).max(1);
        let parts = |clusters: Range<u64>| {
            let starts = clusters.clone().step_by(at_once as usize);
            starts.map(move |start| start..clusters.end.min(start + at_once))
        };
        let after = parts(plan.luks().end..plan.metadata());
        // The header last: a creation that is cut off leaves no image.
        let first = 0..at_once.min(plan.luks().start);
        let rest: Vec<_> = after.chain(parts(first.end..plan.luks().start)).collect();
        let is_long = luks.is_some() || !rest.is_empty();
        for clusters in rest {
            put_clusters(&channels, &plan, clusters).await?;
        }
        if let Some(luks) = luks {
            let at = plan.luks().start * cluster;
            let places = (at..).step_by(AT_ONCE as usize);
            for (bytes, at) in luks.chunks(AT_ONCE as usize).zip(places) {
                write(&channels, at, bytes)?.await.0?;
            }
        }
        if is_long {
            sync(&channels).await?;
        }
        put_clusters(&channels, &plan, first).await?;
        Ok(sync(&channels).await?)
    })
}

/// Writes clusters of metadata.
async fn put_clusters(channels: &Channels, plan: &Plan, clusters: Range<u64>) -> Result<(), Errno> {
    let cluster = plan.cluster();
    let mut bytes = vec![0; ((clusters.end - clusters.start) * cluster) as usize];
    for (cluster, memory) in clusters.clone().zip(bytes.chunks_exact_mut(cluster as usize)) {
        plan.fill(cluster, memory);
    }
    write(channels, clusters.start * cluster, &bytes)?.await.0
}

fn failed(path: &Path, error: &io::Error) -> OpenError {
    OpenError::io(format!("Could not create '{}'", path.display()), error)
}
