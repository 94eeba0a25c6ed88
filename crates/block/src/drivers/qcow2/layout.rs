//! The contents of a new image.

use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crypto::Secret;

use super::engine::set_count;
use super::header::{
    BACKING_FORMAT, ENTRY, EXTENDED_L2, LUKS_EXTENSION, MAGIC, MAX_CLUSTER_BITS, MAX_L1, MAX_NAME,
    MIN_EXTENDED, V3_LEN,
};
use super::open::{Below, run_apart};
use super::steps::write;
use super::storage::sync;
use crate::drivers::file::{FileNode, Kind};
use crate::error::OpenError;
use crate::inherited::Inherited;
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, Driver, FileOptions, Locking};
use crate::own_mounts::OwnMounts;

/// Most bytes per write.
const AT_ONCE: usize = 1 << 20;

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

    /// Bytes of the new image in its file. `luks_len`: those of the LUKS header; 0 if it is not encrypted.
    ///
    /// # Errors
    ///
    /// The options contradict each other. In QEMU's words, where it has them.
    pub(super) fn file_size(&self, luks_len: u64) -> Result<u64, OpenError> {
        let [.., (last, bytes)] = checked(self, luks_len)?;
        Ok(last + bytes.len() as u64 + luks_len.next_multiple_of(self.cluster_size.into()))
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
    let parts = checked(create, 0)?;
    mounts.check(path)?;
    let made = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    made.map_err(|error| failed(path, &error))?;
    let file = FileOptions { filename: path.to_owned(), aio: None, locking: Locking::Auto };
    let common = BlockdevOptions::new(None, Driver::file(file.clone()));
    // Locked from here on, so that no image in use is emptied.
    let (name, inherited) = ("#create".into(), &mut Inherited::default());
    let node = FileNode::open(name, Kind::File, &common, &file, mounts, inherited)?;
    let emptied = OpenOptions::new().write(true).truncate(true).open(path);
    emptied.map_err(|error| failed(path, &error))?;
    put(Arc::new(node), parts.into()).map_err(|error| failed(path, &error))
}

/// Creates an image in a node of at least [`CreateQcow2::file_size`] bytes, over the node's contents. `luks`: the
/// header of an encrypted image. Blocks until the image is on stable storage. The caller makes sure that no
/// other user of the node writes meanwhile.
///
/// # Errors
///
/// The node cannot be written, or the options contradict each other. In QEMU's words, where it has them.
pub(super) fn create_qcow2_in(
    node: Arc<dyn BlockNode>,
    create: &CreateQcow2,
    luks: Option<Secret>,
) -> Result<(), OpenError> {
    let luks_len = luks.as_ref().map_or(0, |luks| luks.len() as u64);
    let mut parts = checked(create, luks_len)?.to_vec();
    let [.., (last, bytes)] = &parts[..] else { return Ok(()) };
    let luks_at = last + bytes.len() as u64;
    parts.extend(luks.map(|mut luks| (luks_at, std::mem::take(&mut *luks))));
    if node.geometry().read_only {
        return Err(OpenError::new(format!("Block node '{}' is read-only", node.name())));
    }
    let name = node.name().to_owned();
    put(node, parts)
        .map_err(|error| OpenError::io(format!("Could not write qcow2 header to '{name}'"), &error))
}

fn checked(create: &CreateQcow2, luks_len: u64) -> Result<Parts, OpenError> {
    let is_power_within = |number: u32, most| number.is_power_of_two() && number <= most;
    let error = match () {
        () if !create.size.is_multiple_of(512) => "Image size must be a multiple of 512 bytes",
        () if create.cluster_size < 512 || !is_power_within(create.cluster_size, 2 << 20) => {
            "Cluster size must be a power of two between 512 and 2048k"
        }
        () if create.extended_l2 && u64::from(create.cluster_size) < MIN_EXTENDED => {
            "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes"
        }
        () if !is_power_within(create.refcount_bits, 64) => {
            "Refcount width must be a power of two and may not exceed 64 bits"
        }
        () => match parts(create, luks_len) {
            Some(parts) => return Ok(parts),
            None if create.backing.as_ref().is_some_and(|(name, _)| name.len() > MAX_NAME) => {
                "The name of the backing file is too long"
            }
            None => "Could not resize image: Failed to grow the L1 table: File too large",
        },
    };
    Err(OpenError::new(error))
}

/// Writes the parts of an image.
fn put(node: Arc<dyn BlockNode>, parts: Vec<(u64, Vec<u8>)>) -> io::Result<()> {
    node.enable_growth();
    let below = Below { file: node, data_file: None, backing: None, encrypted: None };
    run_apart(&below, move |channels| async move {
        for (offset, bytes) in parts {
            for (bytes, at) in bytes.chunks(AT_ONCE).zip((offset..).step_by(AT_ONCE)) {
                write(&channels, at, bytes)?.await.0?;
            }
        }
        Ok(sync(&channels).await?)
    })
}

/// The parts of a new image with their offsets in the file.
type Parts = [(u64, Vec<u8>); 4];

/// The parts of a new image with their offsets in the file: header, refcount table, refcount blocks and L1 table, in
/// this order and without gaps. `None`: the options contradict each other.
pub(super) fn parts(create: &CreateQcow2, luks_len: u64) -> Option<Parts> {
    let cluster = u64::from(create.cluster_size);
    let (bits, order) = (cluster.trailing_zeros(), create.refcount_bits.trailing_zeros());
    let is_possible = create.cluster_size.is_power_of_two()
        && (9..=MAX_CLUSTER_BITS).contains(&bits)
        && create.refcount_bits.is_power_of_two()
        && order <= 6;
    let l2_entry = if create.extended_l2 { 2 * ENTRY } else { ENTRY };
    let l1_entries = create.size.div_ceil(cluster.checked_mul(cluster / l2_entry)?);
    if !is_possible || l1_entries * ENTRY > MAX_L1 {
        return None;
    }
    let l1_clusters = (l1_entries * ENTRY).div_ceil(cluster).max(1);
    let luks_clusters = luks_len.div_ceil(cluster);
    let reach = (cluster * 8) >> order;
    let (mut table, mut blocks) = (1, 1);
    let used = loop {
        let used = 1 + table + blocks + l1_clusters + luks_clusters;
        if blocks * reach < used {
            blocks += 1;
        } else if table * cluster < blocks * ENTRY {
            table += 1;
        } else {
            break used;
        }
    };
    let block_at = (1 + table) * cluster;
    let l1_at = block_at + blocks * cluster;
    let luks_at = l1_at + l1_clusters * cluster;
    let l1 = (l1_entries as u32, l1_at);
    let header =
        header(create, bits, order, l1, (table as u32, cluster), luks_at..luks_at + luks_len)?;
    let mut entries: Vec<u8> =
        (0..blocks).flat_map(|nth| (block_at + nth * cluster).to_be_bytes()).collect();
    entries.resize((table * cluster) as usize, 0);
    let mut counts = vec![0; (blocks * cluster) as usize];
    (0..used).for_each(|cluster| set_count(&mut counts, cluster as usize, order, 1));
    let l1 = vec![0; (l1_clusters * cluster) as usize];
    Some([(0, header), (cluster, entries), (block_at, counts), (l1_at, l1)])
}

/// The header's cluster. `l1`, `refcounts`: entries or clusters, and first byte. `luks`: the bytes of
/// the LUKS header, if there is one.
fn header(
    create: &CreateQcow2,
    cluster_bits: u32,
    refcount_order: u32,
    l1: (u32, u64),
    refcounts: (u32, u64),
    luks: Range<u64>,
) -> Option<Vec<u8>> {
    let mut extensions = Vec::new();
    let name = create.backing.as_ref().map_or(&[][..], |(name, format)| {
        if let Some(format) = format {
            extensions.extend_from_slice(&BACKING_FORMAT.to_be_bytes());
            extensions.extend_from_slice(&(format.len() as u32).to_be_bytes());
            extensions.extend_from_slice(format.as_bytes());
            extensions.resize(extensions.len().next_multiple_of(8), 0);
        }
        name.as_bytes()
    });
    if !luks.is_empty() {
        extensions.extend_from_slice(&LUKS_EXTENSION.to_be_bytes());
        extensions.extend_from_slice(&16u32.to_be_bytes());
        extensions.extend_from_slice(&luks.start.to_be_bytes());
        extensions.extend_from_slice(&(luks.end - luks.start).to_be_bytes());
    }
    // End of the header extensions.
    extensions.resize(extensions.len() + 8, 0);
    let name_at = match name {
        [] => 0,
        _ => V3_LEN + extensions.len(),
    };
    let mut header = MAGIC.to_vec();
    header.extend_from_slice(&3u32.to_be_bytes());
    header.extend_from_slice(&(name_at as u64).to_be_bytes());
    header.extend_from_slice(&(name.len() as u32).to_be_bytes());
    header.extend_from_slice(&cluster_bits.to_be_bytes());
    header.extend_from_slice(&create.size.to_be_bytes());
    // The encryption: none, or LUKS.
    let method = if luks.is_empty() { 0u32 } else { 2 };
    header.extend_from_slice(&method.to_be_bytes());
    header.extend_from_slice(&l1.0.to_be_bytes());
    header.extend_from_slice(&l1.1.to_be_bytes());
    header.extend_from_slice(&refcounts.1.to_be_bytes());
    header.extend_from_slice(&refcounts.0.to_be_bytes());
    // No snapshots, and no other features.
    header.resize(72, 0);
    let incompatible = if create.extended_l2 { EXTENDED_L2 } else { 0 };
    header.extend_from_slice(&incompatible.to_be_bytes());
    header.resize(96, 0);
    header.extend_from_slice(&refcount_order.to_be_bytes());
    header.extend_from_slice(&(V3_LEN as u32).to_be_bytes());
    header.extend(extensions);
    header.extend_from_slice(name);
    let cluster = 1 << cluster_bits;
    (header.len() <= cluster && name.len() <= MAX_NAME).then(|| {
        header.resize(cluster, 0);
        header
    })
}

fn failed(path: &Path, error: &io::Error) -> OpenError {
    OpenError::io(format!("Could not create '{}'", path.display()), error)
}
