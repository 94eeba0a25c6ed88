//! How long the file of a new image will be.

use block::node::ImageDetails;
use block::status::ExtentState;
use options::scalar;

use crate::copy::extents;
use crate::create::{NewImage, Plan};
use crate::error::Error;
use crate::images::{Image, Images};

/// Bytes of an entry of a table.
const ENTRY: u64 = 8;
/// Bytes of an entry of an L2 table with subclusters.
const LONG_ENTRY: u64 = 16;

/// The length of an image's file, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// With the contents that were looked at.
    pub required: u64,
    /// Once all of the disk is written.
    pub fully_allocated: u64,
    /// With the bitmaps of the source besides. `None`: there is no room for bitmaps, or the source has none to copy.
    pub bitmaps: Option<u64>,
}

impl Images {
    /// Tells how long the file of a new image will be, with the contents of `source` or without contents.
    ///
    /// # Errors
    ///
    /// An option is wrong, the source cannot be read, or the length of the format is not known.
    pub fn measure(&mut self, new: &NewImage, source: Option<&Image>) -> Result<Measured, Error> {
        let size = source.map(Image::size).or(new.size);
        let new = NewImage { size, ..new.clone() };
        let plan = self.plan_unnamed(&new)?;
        match new.format.as_str() {
            "raw" => {
                let size = plan.size().next_multiple_of(512);
                Ok(Measured { required: size, fully_allocated: size, bitmaps: None })
            }
            "qcow2" => self.measure_qcow2(&plan, source),
            format => Err(Error::new(format!(
                "Format driver '{format}' does not support size measurement"
            ))),
        }
    }

    fn measure_qcow2(&self, plan: &Plan, source: Option<&Image>) -> Result<Measured, Error> {
        let layout = Layout::of(plan)?;
        let size = plan.size().next_multiple_of(layout.cluster);
        let fully_allocated =
            layout.len(size).ok_or_else(|| Error::new("The image size is too large"))?;
        let is_preallocated = plan.option("preallocation").is_some_and(|how| how != "off");
        let data = match source {
            _ if is_preallocated => size,
            None => 0,
            Some(source) => self.allocated(source, layout.cluster, plan.option("backing_file"))?,
        };
        let bitmaps = source.and_then(|source| self.bitmaps(source, layout.cluster));
        Ok(Measured { required: fully_allocated - size + data, fully_allocated, bitmaps })
    }

    /// Bytes of the source's dirty bitmaps. `None`: its format has no room for any.
    fn bitmaps(&self, source: &Image, cluster: u64) -> Option<u64> {
        let node = self.nodes.node(&source.node_name).ok()?;
        node.bitmap_store()?;
        bitmaps_len(&node.details()?, source.size(), cluster)
    }

    /// Bytes of the clusters that have data of the source.
    fn allocated(&self, source: &Image, cluster: u64, backing: Option<&str>) -> Result<u64, Error> {
        let (channel, size, only_top) =
            (self.channel(&source.node)?, source.size(), backing.is_some());
        let counted = async move {
            let (mut at, mut data, mut counted) = (0, 0, 0);
            while at < size {
                for extent in extents(&channel, at..size).await? {
                    let end = at + extent.len;
                    let is_stored =
                        extent.state == ExtentState::Data && !(only_top && extent.depth != 1);
                    if is_stored {
                        let from = (at - at % cluster).max(counted);
                        let to = end.next_multiple_of(cluster);
                        data += to.saturating_sub(from);
                        counted = counted.max(to);
                    }
                    at = end;
                }
            }
            Ok(data)
        };
        let failed = |errno| Error::os("error while reading block status", errno);
        self.block_on(counted)?.map_err(failed)
    }
}

/// Bytes of dirty bitmaps of a disk of `size` bytes, by their description, in a qcow2 image with that cluster.
fn bitmaps_len(details: &ImageDetails, size: u64, cluster: u64) -> Option<u64> {
    let data = details.specific.iter().find(|(name, _)| name == "data")?;
    let options::Value::Object(data) = &data.1 else { return None };
    let found = data.iter().find(|(name, _)| name == "bitmaps");
    let Some((_, options::Value::List(bitmaps))) = found else { return Some(0) };
    let (mut bytes, mut directory) = (0, 0);
    for bitmap in bitmaps {
        let options::Value::Object(members) = bitmap else { continue };
        let (mut granularity, mut name_len) = (65536, 0);
        for (name, value) in members {
            match (name.as_str(), value) {
                ("granularity", options::Value::Integer(n)) => {
                    granularity = n.unsigned_abs().max(1)
                }
                ("name", options::Value::Text(text)) => name_len = text.len() as u64,
                _ => {}
            }
        }
        let bits = size.div_ceil(granularity);
        let clusters = bits.div_ceil(8).div_ceil(cluster);
        bytes += (clusters + (clusters * ENTRY).div_ceil(cluster)) * cluster;
        directory += (24 + name_len).next_multiple_of(8);
    }
    Some(bytes + directory.next_multiple_of(cluster))
}

/// What the length of a qcow2 file depends on.
struct Layout {
    cluster: u64,
    refcount_bits: u64,
    l2_entry: u64,
}

impl Layout {
    fn of(plan: &Plan) -> Result<Layout, Error> {
        let number = |name: &str, default| match plan.option(name) {
            None => Some(default),
            Some(text) => scalar::size(text),
        };
        let cluster = number("cluster_size", 65536).filter(|cluster| cluster.is_power_of_two());
        let cluster = cluster.filter(|cluster| (512..=2 << 20).contains(cluster));
        let cluster = cluster.ok_or_else(|| {
            Error::new("Cluster size must be a power of two between 512 and 2048k")
        })?;
        let refcount_bits = number("refcount_bits", 16).filter(|bits| bits.is_power_of_two());
        let refcount_bits = refcount_bits.filter(|bits| *bits <= 64).ok_or_else(|| {
            Error::new("Refcount width must be a power of two and may not exceed 64 bits")
        })?;
        let is_extended = plan.option("extended_l2") == Some("on");
        let l2_entry = if is_extended { LONG_ENTRY } else { ENTRY };
        Ok(Layout { cluster, refcount_bits, l2_entry })
    }

    /// Bytes of a file with a disk of `size` bytes, whole clusters, all of which have a place. `None`: too many.
    fn len(&self, size: u64) -> Option<u64> {
        let cluster = self.cluster;
        let whole = |entries: u64, len: u64| entries.checked_next_multiple_of(cluster / len);
        let l2_entries = whole(size / cluster, self.l2_entry)?;
        let l2 = l2_entries.checked_mul(self.l2_entry)?;
        let l1 = whole(l2 / cluster, ENTRY)? * ENTRY;
        let without_counts = cluster.checked_add(l2)?.checked_add(l1)?.checked_add(size)?;
        without_counts.checked_add(self.counts(without_counts / cluster))
    }

    /// Bytes of the reference counts of so many clusters, and of their own clusters.
    fn counts(&self, clusters: u64) -> u64 {
        let per_block = self.cluster * 8 / self.refcount_bits;
        let (mut blocks, mut table) = (0, 0);
        loop {
            let needed = (clusters + blocks + table).div_ceil(per_block);
            let needed_table = (needed * ENTRY).div_ceil(self.cluster);
            if (needed, needed_table) == (blocks, table) {
                return (blocks + table) * self.cluster;
            }
            (blocks, table) = (needed, needed_table);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_count_themselves() {
        let layout = Layout { cluster: 65536, refcount_bits: 16, l2_entry: 8 };
        // qemu-img measure --size 1G -O qcow2
        assert_eq!(layout.len(1 << 30), Some(1_074_135_040));
        assert_eq!(layout.len(0), Some(196_608));
    }
}
