//! The description of block nodes in QMP: QEMU's `BlockDeviceInfo`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{self, Path};

use block::driver::{Description, Layer};
use block::node::{BackingName, ImageDetails};
use block::options::{BlockdevOptions, DetectZeroes};
use block::{Child, JobFilter, NodeInfo, NodeRegistry};
use serde_json::{Value as Json, json};

use super::bitmaps;
use super::internal_snapshots;

/// Optimal memory alignment: a page.
const PAGE: u64 = 4096;
/// Most segments of a request: `UIO_MAXIOV`.
const MAX_IOV: u64 = 1024;

/// The nodes at a moment, with the file names that were found out: that of an image depends on those of all images behind.
struct View<'a> {
    nodes: &'a NodeRegistry,
    names: RefCell<HashMap<String, String>>,
}

impl<'a> View<'a> {
    fn new(nodes: &'a NodeRegistry) -> View<'a> {
        View { nodes, names: RefCell::default() }
    }
}

/// The descriptions of all nodes and of jobs' filters, by name. `flat`: without their backing images.
pub(super) fn all(nodes: &NodeRegistry, flat: bool) -> Json {
    let view = &View::new(nodes);
    let own = nodes.all().map(|node| (node.name, info(view, &node, flat)));
    let filters = nodes.job_filters().filter_map(|(source, filter)| {
        let source = nodes.info(source)?;
        Some((filter.name(), filter_info(view, &source, filter, flat)))
    });
    let mut all: Vec<_> = own.chain(filters).collect();
    all.sort_by_key(|(name, _)| *name);
    all.into_iter().map(|(_, told)| told).collect()
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
        members.retain(|name, _| name != "dirty-bitmaps" && name != "backing_file");
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
    nodes.info(name).map_or_else(String::new, |node| filename(&View::new(nodes), &node))
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
    let view = &View::new(nodes);
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
    if let Some(bitmaps) = bitmaps::info(view.nodes, node.name) {
        told["dirty-bitmaps"] = bitmaps;
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
        image["snapshots"] = snapshots.iter().map(internal_snapshots::info).collect();
    }
    let specific = details.map(|details| details.specific);
    if let Some(specific) = specific.or_else(|| describe(view.nodes, node).specific) {
        image["format-specific"] = control::Value::Object(specific).into();
    }
    if let Some(behind) = behind(view.nodes, node)
        && !flat
    {
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
    let path = filename.strip_prefix("file:").unwrap_or(&filename);
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
