//! Creating images.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::engine::set_count;
use super::header::{BACKING_FORMAT, ENTRY, MAGIC, MAX_CLUSTER_BITS, MAX_L1, MAX_NAME, V3_LEN};
use super::open::{Below, run_apart};
use super::steps::write;
use super::storage::sync;
use crate::drivers::file::{FileNode, Kind};
use crate::error::OpenError;
use crate::inherited::Inherited;
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, Driver, FileOptions, Locking};

/// Most bytes per write.
const AT_ONCE: usize = 1 << 20;

/// A qcow2 image to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateQcow2 {
    /// Size of the disk in bytes, a multiple of 512.
    pub size: u64,
    /// The backing file as named in the header (relative to the image, unless the path is absolute), and
    /// its format.
    pub backing: Option<(String, String)>,
    /// Size of a cluster in bytes: a power of two, 512 to 2 MiB. QEMU's default is 64 KiB.
    pub cluster_size: u32,
    /// Bits of a reference count: a power of two, 1 to 64. QEMU's default is 16.
    pub refcount_bits: u32,
}

impl CreateQcow2 {
    /// An image of that size in bytes with QEMU's defaults, without a backing file.
    pub fn new(size: u64) -> CreateQcow2 {
        CreateQcow2 { size, backing: None, cluster_size: 65536, refcount_bits: 16 }
    }
}

/// Creates an image in the file at `path`, which is created or emptied first. Blocks until its content is
/// on stable storage. The caller syncs the folder of a new file.
///
/// # Errors
///
/// The file cannot be created, locked or written, or the options contradict each other.
pub fn create_qcow2(path: &Path, create: &CreateQcow2) -> Result<(), OpenError> {
    if !create.size.is_multiple_of(512) {
        return Err(OpenError::new("Image size must be a multiple of 512"));
    }
    let made = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    made.map_err(|error| failed(path, &error))?;
    let file = FileOptions { filename: path.to_owned(), aio: None, locking: Locking::Auto };
    let common = BlockdevOptions::new(None, Driver::file(file.clone()));
    // Locked from here on, so that no image in use is emptied.
    let node =
        FileNode::open("#create".into(), Kind::File, &common, &file, &mut Inherited::default())?;
    let emptied = OpenOptions::new().write(true).truncate(true).open(path);
    emptied.map_err(|error| failed(path, &error))?;
    let node: Arc<dyn BlockNode> = Arc::new(node);
    node.enable_growth();
    let below = Below { file: node, data_file: None, backing: None };
    let create = create.clone();
    let parts = parts(&create).ok_or_else(|| OpenError::new("The options fit no qcow2 image"))?;
    let created = run_apart(&below, move |channels| async move {
        for (offset, bytes) in parts {
            for (bytes, at) in bytes.chunks(AT_ONCE).zip((offset..).step_by(AT_ONCE)) {
                write(&channels, at, bytes)?.await.0?;
            }
        }
        Ok(sync(&channels).await?)
    });
    created.map_err(|error| failed(path, &error))
}

/// The parts of a new image with their offsets in the file: header, refcount table, refcount blocks and L1 table, in
/// this order and without gaps. `None`: the options contradict each other.
pub(super) fn parts(create: &CreateQcow2) -> Option<[(u64, Vec<u8>); 4]> {
    let cluster = u64::from(create.cluster_size);
    let (bits, order) = (cluster.trailing_zeros(), create.refcount_bits.trailing_zeros());
    let is_possible = create.cluster_size.is_power_of_two()
        && (9..=MAX_CLUSTER_BITS).contains(&bits)
        && create.refcount_bits.is_power_of_two()
        && order <= 6;
    let l1_entries = create.size.div_ceil(cluster.checked_mul(cluster / ENTRY)?);
    if !is_possible || l1_entries * ENTRY > MAX_L1 {
        return None;
    }
    let l1_clusters = (l1_entries * ENTRY).div_ceil(cluster).max(1);
    let reach = (cluster * 8) >> order;
    let (mut table, mut blocks) = (1, 1);
    let used = loop {
        let used = 1 + table + blocks + l1_clusters;
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
    let header = header(create, bits, order, (l1_entries as u32, l1_at), (table as u32, cluster))?;
    let mut entries: Vec<u8> =
        (0..blocks).flat_map(|nth| (block_at + nth * cluster).to_be_bytes()).collect();
    entries.resize((table * cluster) as usize, 0);
    let mut counts = vec![0; (blocks * cluster) as usize];
    (0..used).for_each(|cluster| set_count(&mut counts, cluster as usize, order, 1));
    let l1 = vec![0; (l1_clusters * cluster) as usize];
    Some([(0, header), (cluster, entries), (block_at, counts), (l1_at, l1)])
}

/// The header's cluster. `l1`, `refcounts`: entries or clusters, and first byte.
fn header(
    create: &CreateQcow2,
    cluster_bits: u32,
    refcount_order: u32,
    l1: (u32, u64),
    refcounts: (u32, u64),
) -> Option<Vec<u8>> {
    let mut extensions = Vec::new();
    let name = create.backing.as_ref().map_or(&[][..], |(name, format)| {
        extensions.extend_from_slice(&BACKING_FORMAT.to_be_bytes());
        extensions.extend_from_slice(&(format.len() as u32).to_be_bytes());
        extensions.extend_from_slice(format.as_bytes());
        extensions.resize(extensions.len().next_multiple_of(8), 0);
        name.as_bytes()
    });
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
    // Not encrypted.
    header.extend_from_slice(&0u32.to_be_bytes());
    header.extend_from_slice(&l1.0.to_be_bytes());
    header.extend_from_slice(&l1.1.to_be_bytes());
    header.extend_from_slice(&refcounts.1.to_be_bytes());
    header.extend_from_slice(&refcounts.0.to_be_bytes());
    // No snapshots, and no features of any kind.
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
