//! What is known of an image, by its header.

use std::path::Path;
use std::sync::Arc;

use block::driver::Layer;
use block::node::{BackingName, BlockNode, ImageHeader, InternalSnapshot};
use block::options::{BlockdevOptions, BlockdevRef};
use options::{Object, Value};

use crate::error::Error;
use crate::images::{Access, Images};
use crate::json::in_line;
use crate::source::{Source, path_of};

/// Most images of a chain that are described.
const MAX_CHAIN: usize = block::MAX_CHAIN + 1;
/// Sizes of disks are rounded up to this, bytes.
const SECTOR: u64 = 512;

/// A description of an image: QAPI's `BlockNodeInfo`.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageInfo {
    /// A path, or options in JSON.
    pub filename: String,
    /// The name of its format, or of the driver of its bytes.
    pub format: String,
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// Bytes that it takes in its file system. `None`: unknown.
    pub actual_size: Option<u64>,
    /// Bytes of a cluster.
    pub cluster_size: Option<u64>,
    /// Whether the image is encrypted.
    pub is_encrypted: bool,
    /// Whether the image was not closed.
    pub is_dirty: bool,
    /// The backing file that the image names.
    pub backing: Option<BackingName>,
    /// That name, seen from the working directory. `None`: it has no place.
    pub full_backing: Option<String>,
    /// Internal snapshots.
    pub snapshots: Vec<InternalSnapshot>,
    /// What only the format knows.
    pub specific: Option<Object>,
    /// The nodes below, each with its role.
    pub children: Vec<(&'static str, ImageInfo)>,
}

impl Images {
    /// Describes an image by its header.
    ///
    /// Opens neither what the header names nor an encrypted disk: no password is needed.
    ///
    /// # Errors
    ///
    /// The image cannot be opened, or is damaged.
    pub fn info(&mut self, source: &Source, access: &Access) -> Result<ImageInfo, Error> {
        let failed = |error: Error| error.of(format!("Could not open '{}'", source.name));
        let access = Access { write: false, ..*access };
        let (options, _) = self.resolve(source, &access).map_err(failed)?;
        self.describe(options).map_err(failed)
    }

    /// Describes an image and those behind it, as their headers name them.
    ///
    /// # Errors
    ///
    /// As of [`info`](Self::info); and images behind each other in a circle, or too many of them.
    pub fn chain_info(
        &mut self,
        source: &Source,
        access: &Access,
    ) -> Result<Vec<ImageInfo>, Error> {
        let mut chain = vec![self.info(source, access)?];
        while let Some(ImageInfo { full_backing: Some(name), backing, .. }) = chain.last() {
            if chain.iter().any(|known| known.filename == *name) {
                let loops = format!("Backing file '{name}' creates an infinite loop.");
                return Err(Error::new(loops));
            }
            if chain.len() >= MAX_CHAIN {
                let most = MAX_CHAIN - 1;
                return Err(Error::new(format!(
                    "'{name}': more than {most} images behind an image"
                )));
            }
            let format = backing.as_ref().and_then(|backing| backing.format.clone());
            // A header names a path, whatever it looks like.
            let next = Source { name: as_file(name), format, is_options: false };
            let found = self.info(&next, access);
            chain.push(found.map_err(|error| match name.as_str() == next.name {
                true => error,
                false => Error::new(error.message().replacen(&next.name, name, 1)),
            })?);
            if let Some(last) = chain.last_mut() {
                last.filename = as_path(&last.filename).to_owned();
            }
        }
        Ok(chain)
    }

    fn describe(&mut self, mut options: BlockdevOptions) -> Result<ImageInfo, Error> {
        let file = options.driver.children().into_iter().find(|child| child.role == "file");
        let file = match file.map(|child| child.node) {
            Some(BlockdevRef::Inline(file)) => Some(BlockdevOptions::clone(file)),
            Some(BlockdevRef::Name(_)) | None => None,
        };
        let has_header = options.driver.layer() != Layer::Storage && file.is_some();
        if let (Some(file), true) = (file, has_header) {
            let below = self.open_node(&file)?;
            let header = options.driver.read_header(&below);
            let described = header.as_ref().map(|_| describe_open(&below, &file, self));
            self.close_node(below)?;
            if let (Some(header), Some(described)) = (header, described) {
                return Ok(of_header(&options, header?, described));
            }
        }
        options.node_name = None;
        let node = self.open_node(&options)?;
        let described = describe_open(&node, &options, self);
        self.close_node(node)?;
        Ok(described)
    }

    fn close_node(&mut self, node: Arc<dyn BlockNode>) -> Result<(), Error> {
        let name = node.known_name();
        drop(node);
        Ok(self.nodes.remove(&name)?)
    }

    fn open_node(&mut self, options: &BlockdevOptions) -> Result<Arc<dyn BlockNode>, Error> {
        let mut options = options.clone();
        let node_name = self.next_name(&options);
        options.node_name = Some(node_name.clone());
        self.patiently(|images| {
            images.nodes.open(&options).inspect_err(|_| drop(images.nodes.remove(&node_name)))
        })
        .map_err(Error::from)
    }
}

/// The description of an image by its header, in the file that is described by `below`.
fn of_header(options: &BlockdevOptions, header: ImageHeader, below: ImageInfo) -> ImageInfo {
    let ImageHeader { size, is_dirty, details, snapshots } = header;
    let filename = filename(options);
    let full_backing = details.backing.as_ref().and_then(|named| full_name(&below.filename, named));
    ImageInfo {
        format: options.driver.kind().name.to_owned(),
        virtual_size: size.next_multiple_of(SECTOR),
        actual_size: below.actual_size,
        cluster_size: details.cluster_size,
        is_encrypted: details.encrypted,
        is_dirty,
        backing: details.backing,
        full_backing,
        snapshots,
        specific: Some(details.specific),
        children: vec![("file", below)],
        filename,
    }
}

/// The description of an open node.
fn describe_open(
    node: &Arc<dyn BlockNode>,
    options: &BlockdevOptions,
    images: &Images,
) -> ImageInfo {
    let inner = node_inside(images, node.name());
    let children = match options.driver.layer() {
        Layer::Storage => Vec::new(),
        Layer::Window | Layer::Filter | Layer::Format => {
            let children = options.driver.children().into_iter();
            let inline = children.filter_map(|child| match child.node {
                BlockdevRef::Inline(options) => Some((child.role, &**options)),
                BlockdevRef::Name(_) => None,
            });
            inline
                .filter_map(|(role, options)| {
                    let below = inner.iter().find(|(known, _)| *known == role);
                    Some((role, describe_open(&below?.1, options, images)))
                })
                .collect()
        }
    };
    let driver = options.driver.kind().name;
    let below = options.driver.describe(None);
    let details = node.details();
    let specific = details.as_ref().map(|details| details.specific.clone());
    ImageInfo {
        filename: filename(options),
        format: driver.to_owned(),
        virtual_size: node.length().next_multiple_of(SECTOR),
        actual_size: node.allocated(),
        cluster_size: details.as_ref().and_then(|details| details.cluster_size),
        is_encrypted: details.as_ref().is_some_and(|details| details.encrypted),
        is_dirty: false,
        backing: None,
        full_backing: None,
        snapshots: node.snapshots().unwrap_or_default(),
        specific: specific.or(below.specific),
        children,
    }
}

/// The nodes below an open node, with their roles.
fn node_inside(images: &Images, name: &str) -> Vec<(&'static str, Arc<dyn BlockNode>)> {
    let Some(info) = images.nodes.info(name) else { return Vec::new() };
    let below = info.children.iter();
    below.map(|child| (child.role, child.edge.clone() as Arc<dyn BlockNode>)).collect()
}

/// The name of an image in QEMU's terms: its path if that identifies it, otherwise options in JSON.
pub(crate) fn filename(options: &BlockdevOptions) -> String {
    told(options).unwrap_or_else(|| format!("json:{}", in_line(&as_options(options))))
}

fn told(options: &BlockdevOptions) -> Option<String> {
    let children = options.driver.children();
    let below = children.first().and_then(|child| match child.node {
        BlockdevRef::Inline(options) => told(options),
        BlockdevRef::Name(_) => None,
    });
    let described = options.driver.describe(below.as_deref());
    // That the images behind are left closed is no property of the image.
    described.filename.or_else(|| match options.driver.layer() {
        Layer::Window | Layer::Format if described.options.is_empty() => below,
        Layer::Storage | Layer::Window | Layer::Filter | Layer::Format => None,
    })
}

/// The options that open the same image.
fn as_options(options: &BlockdevOptions) -> Value {
    let driver = &options.driver;
    let kind = ("driver".to_owned(), Value::from(driver.kind().name));
    let own = driver.describe(None).options.into_iter();
    let below = driver.children().into_iter().filter_map(|child| match child.node {
        BlockdevRef::Inline(options) => Some((child.role.to_owned(), as_options(options))),
        BlockdevRef::Name(_) => None,
    });
    // That the images behind are left closed is no property of the image.
    let own = own.filter(|(name, _)| name != "backing");
    Value::Object(own.chain([kind]).chain(below).collect())
}

/// The path of a backing file, seen from the working directory.
fn full_name(image: &str, named: &BackingName) -> Option<String> {
    let name = &named.filename;
    if name.starts_with("json:") || path_of(name).is_none() {
        return Some(name.clone());
    }
    let path = as_path(name);
    let folder = path_of(image).and_then(Path::parent);
    match folder {
        _ if Path::new(path).is_absolute() => Some(path.to_owned()),
        Some(folder) => Some(folder.join(path).display().to_string()),
        None => None,
    }
}

/// A name in a header as the name of a file.
fn as_file(name: &str) -> String {
    match name.starts_with("json:") || name.contains(':') {
        true => format!("file:{}", as_path(name)),
        false => name.to_owned(),
    }
}

fn as_path(name: &str) -> &str {
    ["file:", "host_device:"].iter().find_map(|of| name.strip_prefix(of)).unwrap_or(name)
}

impl ImageInfo {
    /// Returns the description as `qemu-img info --output=json` prints it.
    pub fn to_json(&self) -> Value {
        let child = |(role, info): &(&'static str, ImageInfo)| {
            object(vec![("name", (*role).into()), ("info", info.to_json())])
        };
        let mut told = vec![
            ("children", Value::List(self.children.iter().map(child).collect())),
            ("virtual-size", self.virtual_size.into()),
            ("filename", self.filename.as_str().into()),
            ("format", self.format.as_str().into()),
            ("dirty-flag", self.is_dirty.into()),
        ];
        if let Some(BackingName { filename, format }) = &self.backing {
            told.push(("backing-filename", filename.as_str().into()));
            let format = format.as_deref().map(|format| ("backing-filename-format", format.into()));
            let full = self.full_backing.as_deref();
            told.extend(format);
            told.extend(full.map(|name| ("full-backing-filename", name.into())));
        }
        if !self.snapshots.is_empty() {
            let snapshots = self.snapshots.iter().map(snapshot).collect();
            told.push(("snapshots", Value::List(snapshots)));
        }
        told.extend(self.cluster_size.map(|bytes| ("cluster-size", bytes.into())));
        told.extend(self.actual_size.map(|bytes| ("actual-size", bytes.into())));
        if self.is_encrypted {
            told.push(("encrypted", true.into()));
        }
        let specific = self.specific.clone();
        told.extend(specific.map(|data| ("format-specific", Value::Object(data))));
        object(told)
    }
}

fn object(members: Vec<(&str, Value)>) -> Value {
    Value::Object(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

/// QAPI's `SnapshotInfo`.
fn snapshot(of: &InternalSnapshot) -> Value {
    let mut told: Vec<(&str, Value)> = vec![
        ("id", of.id.as_str().into()),
        ("name", of.name.as_str().into()),
        ("vm-state-size", of.vm_state_size.into()),
        ("date-sec", of.date.as_secs().into()),
        ("date-nsec", of.date.subsec_nanos().into()),
        ("vm-clock-sec", of.vm_clock.as_secs().into()),
        ("vm-clock-nsec", of.vm_clock.subsec_nanos().into()),
    ];
    told.extend(of.icount.map(|count| ("icount", count.into())));
    object(told)
}
