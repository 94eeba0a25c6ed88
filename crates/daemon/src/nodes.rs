//! The description of block nodes in QMP: QEMU's `BlockDeviceInfo`.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{self, Path};

use block::driver::{Description, Layer};
use block::node::{BackingName, ImageDetails, listed};
use block::options::{BlockdevOptions, DetectZeroes};
use block::{Child, JobFilter, NodeInfo, NodeRegistry};
use control::qmp::QmpError;
use serde_json::{Value as Json, json};

use super::bitmaps;
use super::internal_snapshots;

/// Optimal memory alignment: a page.
const PAGE: u64 = 4096;
/// Most segments of a request: `UIO_MAXIOV`.
const MAX_IOV: u64 = 1024;

/// Most images that an answer describes behind others: an image is described anew for each of those above.
const MOST_BEHIND: u32 = 4096;
/// The cost after which the rest of an answer waits for its next part. An image has a cost of 1, some 30 microseconds.
const PART: u32 = 64;
/// Items of lists with a cost of 1.
const ITEMS: usize = 32;

/// The nodes at a moment, with the file names that were found out: that of an image depends on those of all images behind.
struct View<'a> {
    nodes: &'a NodeRegistry,
    names: RefCell<HashMap<String, String>>,
    /// Of what was described.
    cost: Cell<u32>,
    /// Images that may still be described behind others.
    behind_left: Cell<u32>,
}

impl<'a> View<'a> {
    fn new(nodes: &'a NodeRegistry, behind_left: u32) -> View<'a> {
        let (names, cost) = (RefCell::default(), Cell::new(0));
        View { nodes, names, cost, behind_left: Cell::new(behind_left) }
    }

    fn charge(&self, cost: usize) {
        self.cost.update(|spent| spent.saturating_add(cost as u32));
    }
}

/// The descriptions of all nodes and of jobs' filters, by name, made in parts. A node that goes before it was described is
/// left out.
pub(super) struct Listing {
    /// Nodes to describe, the last first.
    names: Vec<String>,
    /// Without their backing images.
    flat: bool,
    behind_left: u32,
    told: Vec<Json>,
}

impl Listing {
    pub(super) fn new(nodes: &NodeRegistry, flat: bool) -> Listing {
        let filters = nodes.job_filters().map(|(_, filter)| filter.name());
        let mut names: Vec<_> = nodes.all().map(|node| node.name).chain(filters).collect();
        names.sort_unstable_by(|one, other| other.cmp(one));
        let names = names.into_iter().map(str::to_owned).collect();
        Listing { names, flat, behind_left: MOST_BEHIND + 1, told: Vec::new() }
    }

    /// Describes as many nodes as one part may. Returns whether these were the last.
    ///
    /// # Errors
    ///
    /// The answer would be too long.
    pub(super) fn describe_more(&mut self, nodes: &NodeRegistry) -> Result<bool, QmpError> {
        let view = &View::new(nodes, self.behind_left);
        while view.cost.get() < PART
            && let Some(name) = self.names.pop()
        {
            self.told.extend(one(view, &name, self.flat));
            if view.behind_left.get() == 0 {
                return Err(QmpError::generic(format!(
                    "The answer would describe more than {MOST_BEHIND} images behind others: 'flat': true leaves them out"
                )));
            }
        }
        self.behind_left = view.behind_left.get();
        Ok(self.names.is_empty())
    }

    pub(super) fn into_answer(self) -> Json {
        self.told.into()
    }
}

/// The description of a node or a job's filter, if it is still there.
fn one(view: &View<'_>, name: &str, flat: bool) -> Option<Json> {
    if let Some(node) = view.nodes.info(name) {
        return Some(info(view, &node, flat));
    }
    let (source, filter) = view.nodes.job_filters().find(|(_, filter)| filter.name() == name)?;
    Some(filter_info(view, &view.nodes.info(source)?, filter, flat))
}

/// The description of a job's filter. `source` is the node that it is above, maybe with other filters between.
fn filter_info(view: &View<'_>, source: &NodeInfo<'_>, filter: &JobFilter, flat: bool) -> Json {
    let mut told = info(view, source, flat);
    let mut image = json!({
        "filename": told["file"],
        "format": filter.driver,
        "virtual-size": filter.node.geometry().size,
        "actual-size": told["image"]["actual-size"],
        "limits": told["image"]["limits"],
    });
    for name in ["cluster-size", "dirty-flag"] {
        if let Some(value) = told["image"].get(name) {
            image[name] = value.clone();
        }
    }
    if !flat {
        image["backing-image"] = told["image"].take();
    }
    let below = view.nodes.below_filter_of(source.name, filter.name());
    let below = below.map_or_else(|_| source.name.to_owned(), |node| node.name().to_owned());
    let mut children = vec![json!({"node-name": below, "child": filter.role})];
    if let Some(target) = &filter.target {
        children.push(json!({"node-name": target, "child": "target"}));
    }
    if let Some(members) = told.as_object_mut() {
        let of_source = ["dirty-bitmaps", "x-dirty-bitmaps-left-out", "backing_file"];
        members.retain(|name, _| !of_source.contains(&name.as_str()));
    }
    let depth = if flat { 0 } else { 1 + depth(view.nodes, source) };
    for (name, value) in [
        ("node-name", filter.name().into()),
        ("drv", filter.driver.into()),
        ("children", children.into()),
        ("image", image),
        ("detect_zeroes", "off".into()),
        ("cache", json!({"writeback": true, "direct": false, "no-flush": false})),
        ("backing_file_depth", depth.into()),
        ("write_threshold", 0.into()),
    ] {
        told[name] = value;
    }
    told
}

/// The file name of a node, as in [`filename`].
fn filename_of(nodes: &NodeRegistry, name: &str) -> String {
    nodes.info(name).map_or_else(String::new, |node| filename(&View::new(nodes, 0), &node))
}

/// The file name of a node for the header of another image.
///
/// # Errors
///
/// The path is not UTF-8, so the name would lead elsewhere.
pub(super) fn name_for_header(nodes: &NodeRegistry, name: &str) -> Result<String, String> {
    match nodes.image_path(name).filter(|path| path.to_str().is_none()) {
        Some(path) => Err(format!(
            "The file name '{}' of node '{name}' is not UTF-8: the header of another image cannot name it",
            path.display()
        )),
        None => Ok(filename_of(nodes, name)),
    }
}

/// Whether `wanted` is the file name of a node's image, in commands or in the header of the image above.
pub(super) fn is_filename(nodes: &NodeRegistry, name: &str, wanted: &str) -> bool {
    let view = &View::new(nodes, 0);
    let Some(node) = nodes.info(name) else { return false };
    let above = nodes.overlay(name).and_then(|above| nodes.info(above));
    let above = above.filter(|above| !is_backed_otherwise(view, above));
    let named = above.and_then(|above| Some(above.node.details()?.backing?.filename));
    // The path counts even if the node has another backing image than its header names.
    let path = describe(nodes, &node).filename;
    filename(view, &node) == wanted || [named, path].contains(&Some(wanted.to_owned()))
}

fn info(view: &View<'_>, node: &NodeInfo<'_>, flat: bool) -> Json {
    let BlockdevOptions { driver, cache, detect_zeroes, .. } = node.options;
    let children: Json = node.children.iter().map(child).collect();
    let detect_zeroes = match detect_zeroes {
        DetectZeroes::Off => "off",
        DetectZeroes::On => "on",
        DetectZeroes::Unmap => "unmap",
    };
    let mut told = json!({
        "node-name": node.name,
        "drv": driver.kind().name,
        "file": filename(view, node),
        "ro": node.options.read_only || node.node.geometry().read_only,
        "encrypted": node.node.details().is_some_and(|details| details.encrypted),
        "active": node.active,
        "detect_zeroes": detect_zeroes,
        "cache": {"writeback": true, "direct": cache.direct, "no-flush": cache.no_flush},
        "children": children,
        "image": image(view, node, flat),
        "backing_file_depth": if flat { 0 } else { depth(view.nodes, node) },
        "write_threshold": view.nodes.tracking(node.name).map_or(0, |tracking| tracking.threshold.get()),
        // Limits of a QEMU device, always unlimited here: limits of a throttle node belong to its group.
        "bps": 0, "bps_rd": 0, "bps_wr": 0,
        "iops": 0, "iops_rd": 0, "iops_wr": 0,
    });
    if let Some((bitmaps, left_out)) = bitmaps::info(view.nodes, node.name) {
        view.charge(bitmaps.len().div_ceil(ITEMS));
        told["dirty-bitmaps"] = bitmaps.into();
        if left_out > 0 {
            told["x-dirty-bitmaps-left-out"] = left_out.into();
        }
    }
    if let Some(backing) = backing(view.nodes, node) {
        told["backing_file"] = filename(view, &backing).into();
    }
    told
}

fn child(child: &Child) -> Json {
    json!({"node-name": child.edge.node().name(), "child": child.role})
}

/// QEMU's `ImageInfo`.
fn image(view: &View<'_>, node: &NodeInfo<'_>, flat: bool) -> Json {
    view.charge(1);
    let driver = &node.options.driver;
    let geometry = node.node.geometry();
    let mut image = json!({
        "filename": filename(view, node),
        "format": driver.kind().name,
        "virtual-size": node.node.length(),
        "actual-size": actual_size(view.nodes, node),
        "limits": {
            "request-alignment": geometry.request_alignment,
            "min-mem-alignment": node.node.memory_alignment(),
            "opt-mem-alignment": PAGE.max(node.node.memory_alignment().into()),
            "max-iov": MAX_IOV,
        },
    });
    if image_at(view.nodes, node).options.driver.local_file().is_some() {
        image["dirty-flag"] = false.into();
    }
    let details = node.node.details();
    if let Some(ImageDetails { cluster_size, encrypted, backing, .. }) = &details {
        if let Some(cluster_size) = *cluster_size {
            image["cluster-size"] = cluster_size.into();
            image["limits"]["discard-alignment"] = cluster_size.into();
            image["limits"]["write-zeroes-alignment"] = cluster_size.into();
        }
        if *encrypted {
            image["encrypted"] = true.into();
        }
        if let Some(BackingName { filename, format }) = backing {
            image["backing-filename"] = filename.as_str().into();
            if let Some(format) = format {
                image["backing-filename-format"] = format.as_str().into();
            }
        }
        if let Some(full) = named_backing(view.nodes, node) {
            image["full-backing-filename"] = full.into();
        }
    }
    let snapshots = node.node.snapshots().unwrap_or_default();
    if !snapshots.is_empty() {
        let listed = listed(snapshots.iter().map(|snapshot| &*snapshot.name));
        view.charge(listed.div_ceil(ITEMS));
        let told = snapshots.iter().take(listed);
        image["snapshots"] = told.map(internal_snapshots::info).collect();
        if listed < snapshots.len() {
            image["x-snapshots-left-out"] = (snapshots.len() - listed).into();
        }
    }
    let specific = details.map(|details| details.specific);
    if let Some(specific) = specific.or_else(|| describe(view.nodes, node).specific) {
        image["format-specific"] = control::Value::Object(specific).into();
    }
    if let Some(behind) = behind(view.nodes, node)
        && !flat
        && let Some(left) = view.behind_left.get().checked_sub(1)
    {
        view.behind_left.set(left);
        image["backing-image"] = self::image(view, &behind, flat);
    }
    image
}

/// The backing image of a node.
fn backing<'a>(nodes: &'a NodeRegistry, node: &NodeInfo<'_>) -> Option<NodeInfo<'a>> {
    let child = node.children.iter().find(|child| child.role == "backing")?;
    info_below(nodes, child)
}

/// The node of a child, below the filters of jobs.
fn info_below<'a>(nodes: &'a NodeRegistry, child: &Child) -> Option<NodeInfo<'a>> {
    nodes.info(&nodes.below_filter(child.edge.node().name()))
}

/// The path of the backing file in the header of the node's image.
fn named_backing(nodes: &NodeRegistry, node: &NodeInfo<'_>) -> Option<String> {
    let BackingName { filename, .. } = node.node.details()?.backing?;
    let path = ["file:", "host_device:"].iter().find_map(|of| filename.strip_prefix(of));
    let path = path.unwrap_or(&filename);
    let is_protocol = path.split_once(':').is_some_and(|(before, _)| !before.contains('/'));
    let image = nodes.image_path(node.name);
    let folder = image.as_deref().and_then(Path::parent).filter(|_| !is_protocol);
    Some(folder.map_or_else(|| filename.clone(), |folder| folder.join(path).display().to_string()))
}

/// Whether a node has another backing image than its header names.
fn is_backed_otherwise(view: &View<'_>, node: &NodeInfo<'_>) -> bool {
    let absolute = |name: String| path::absolute(&name).unwrap_or_else(|_| name.into());
    let named = named_backing(view.nodes, node).map(absolute);
    let there = backing(view.nodes, node).map(|backing| filename(view, &backing)).map(absolute);
    node.node.details().is_some() && named != there
}

/// The first of the nodes below.
fn below<'a>(nodes: &'a NodeRegistry, node: &NodeInfo<'_>) -> Option<NodeInfo<'a>> {
    info_below(nodes, node.children.first()?)
}

/// The node that provides the data that this node lacks: the backing image, or the child of a filter.
fn behind<'a>(nodes: &'a NodeRegistry, node: &NodeInfo<'_>) -> Option<NodeInfo<'a>> {
    match node.options.driver.layer() {
        Layer::Filter => below(nodes, node),
        Layer::Storage | Layer::Window | Layer::Format => backing(nodes, node),
    }
}

/// The number of images in the chain behind a node.
fn depth(nodes: &NodeRegistry, node: &NodeInfo<'_>) -> u32 {
    behind(nodes, node).map_or(0, |behind| 1 + depth(nodes, &behind))
}

/// The node at the bottom, which stores the bytes.
fn image_at<'a>(nodes: &'a NodeRegistry, node: &NodeInfo<'a>) -> NodeInfo<'a> {
    let mut node = node.clone();
    while let Some(below) = below(nodes, &node) {
        node = below;
    }
    node
}

/// The file name of the image in QEMU's terms: its path if that identifies the image, otherwise options in JSON.
fn filename(view: &View<'_>, node: &NodeInfo<'_>) -> String {
    if let Some(known) = view.names.borrow().get(node.name) {
        return known.clone();
    }
    let filename = describe(view.nodes, node).filename.filter(|_| !is_backed_otherwise(view, node));
    let filename = filename.unwrap_or_else(|| format!("json:{}", as_options(view, node)));
    view.names.borrow_mut().insert(node.name.to_owned(), filename.clone());
    filename
}

/// The driver's description of the node.
fn describe(nodes: &NodeRegistry, node: &NodeInfo<'_>) -> Description {
    let child = below(nodes, node).and_then(|child| describe(nodes, &child).filename);
    node.options.driver.describe(child.as_deref())
}

/// The options that open the same image.
fn as_options(view: &View<'_>, node: &NodeInfo<'_>) -> Json {
    let driver = &node.options.driver;
    let mut options = json!({"driver": driver.kind().name});
    for child in node.children {
        // The header already names the backing image.
        let named = child.role != "backing" || is_backed_otherwise(view, node);
        if named && let Some(below) = info_below(view.nodes, child) {
            options[child.role] = as_options(view, &below);
        }
    }
    for (name, value) in describe(view.nodes, node).options {
        options[name] = value.into();
    }
    options
}

/// Bytes of the image in its file system.
fn actual_size(nodes: &NodeRegistry, node: &NodeInfo<'_>) -> u64 {
    let image = image_at(nodes, node);
    // An open image counts also after its name was removed. An inactive node has no file open.
    let at_path = || {
        let path = image.options.driver.local_file()?;
        Some(fs::metadata(path).ok()?.blocks() * 512)
    };
    let open = image.node.allocated().filter(|_| image.active);
    open.or_else(at_path).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use block::options::{Driver, NullOptions};

    use super::*;

    /// Adds a node of nothing, or a filter above a node.
    fn open(nodes: &mut NodeRegistry, name: &str, driver: Driver) {
        nodes.open(&BlockdevOptions::new(Some(name), driver)).unwrap();
    }

    fn null() -> Driver {
        Driver::null_co(NullOptions { size: 1 << 20, latency_ns: 0, read_zeroes: true })
    }

    #[test]
    fn a_long_answer_is_made_in_parts() {
        let mut nodes = NodeRegistry::new();
        (0..PART * 5).for_each(|n| open(&mut nodes, &format!("n{n:03}"), null()));
        let mut listing = Listing::new(&nodes, true);
        assert!(!listing.describe_more(&nodes).unwrap());
        // One that is not described yet.
        nodes.remove("n319").unwrap();
        let mut parts = 1;
        while !listing.describe_more(&nodes).unwrap() {
            parts += 1;
        }
        assert_eq!(parts, 4);
        let Json::Array(told) = listing.into_answer() else { panic!("no list") };
        let names: Vec<_> = told.iter().map(|node| node["node-name"].as_str().unwrap()).collect();
        assert_eq!((names.len(), names[0], names[318]), (319, "n000", "n318"));
    }

    #[test]
    fn lists_have_bounded_names() {
        assert_eq!(listed(std::iter::repeat_n("b", 2000)), 1024);
        let long = "x".repeat(1000);
        assert_eq!(listed(std::iter::repeat_n(&*long, 1024)), 131);
    }
}
