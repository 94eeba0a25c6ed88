//! Images that are open together: their nodes, and the loop that does their I/O.

use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::driver::Look;
use block::node::{BlockNode, Channel};
use block::options::{BlockdevOptions, BlockdevRef, Inherited, read_ref, write_ref};
use block::request::Op;
use block::submit;
use block::{Credentials, Format, LEFT_LOCKED, NodeRegistry, OpenError};
use event_loop::{AlignedBuf, EventLoop, LoopConfig};
use nix::errno::Errno;
use options::table::{Context, look};
use options::value::Dialect;
use options::{Object, Value};

use crate::error::Error;
use crate::source::{Given, Source};

/// How often an image is tried that a killed process has left locked.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Bytes at an image's ends that have the signatures of formats.
const SIGNATURE: usize = 512;
/// Alignment that any disk takes, bytes.
const ALIGN: u64 = 4096;

/// What an image is opened for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Access {
    /// Writing, and reading. Otherwise reading alone.
    pub write: bool,
    /// Others may write to the image meanwhile. For reading.
    pub force_share: bool,
    /// The images behind are left closed: what they have reads as zeroes.
    pub alone: bool,
    /// Past the host's page cache.
    pub direct: bool,
    /// Flushes are ignored.
    pub no_flush: bool,
    /// Zeroes and discards give space back.
    pub unmap: bool,
    /// Writes are stored compressed, by a format that can do so.
    pub compress: bool,
}

impl Access {
    /// Reading.
    pub const READ: Access = Access {
        write: false,
        force_share: false,
        alone: false,
        direct: false,
        no_flush: false,
        unmap: false,
        compress: false,
    };
    /// Reading and writing.
    pub const WRITE: Access = Access { write: true, unmap: true, ..Access::READ };
}

/// Images that are open together.
///
/// Dropping it closes them: qcow2 images are complete then. Blocks while it works.
pub struct Images {
    pub(crate) event_loop: EventLoop,
    pub(crate) nodes: NodeRegistry,
    opened: u32,
}

/// An open image.
#[derive(Clone)]
pub struct Image {
    /// The name of its node.
    pub(crate) node_name: String,
    pub(crate) node: Arc<dyn BlockNode>,
    pub(crate) options: BlockdevOptions,
    /// Nobody has told the format, and there is no header of one.
    pub(crate) is_guessed_raw: bool,
}

impl Image {
    /// Returns the number of bytes of the disk.
    pub fn size(&self) -> u64 {
        self.node.geometry().size
    }

    /// Returns the node of the block layer, for exports and for other loops. The image is complete on disk when it was flushed
    /// and the last user of its node is gone.
    pub fn node(&self) -> Arc<dyn BlockNode> {
        self.node.clone()
    }

    /// Returns the name of the format.
    pub fn format(&self) -> &'static str {
        self.options.driver.kind().name
    }

    /// Returns whether the format was neither given nor found: the bytes may be a format's that a guest has written.
    pub fn is_guessed_raw(&self) -> bool {
        self.is_guessed_raw
    }
}

impl Images {
    /// Returns a set without images, with a loop of its own.
    ///
    /// # Errors
    ///
    /// There can be no loop.
    pub fn new() -> Result<Images, Error> {
        let config = LoopConfig { name: "img".into(), ..LoopConfig::default() };
        let event_loop = EventLoop::new(config)
            .map_err(|error| Error::new(format!("cannot make an event loop: {error}")))?;
        Ok(Images { event_loop, nodes: NodeRegistry::new(), opened: 0 })
    }

    /// Uses the journals in a folder, which belong to qcow2 images that a killed daemon had open. `user` owns the folder.
    ///
    /// # Errors
    ///
    /// Other users may access the folder.
    pub fn with_journals(self, folder: &Path, user: u32) -> Result<Images, Error> {
        let nodes = self.nodes.with_journals_of(folder, user);
        let nodes = nodes
            .map_err(|error| Error::io(format!("Could not use '{}'", folder.display()), &error))?;
        Ok(Images { nodes, ..self })
    }

    /// Returns the secrets and TLS credentials that images opened from now on can use.
    pub fn credentials(&mut self) -> &mut Credentials {
        self.nodes.credentials()
    }

    /// Opens an image, and what its header names unless `access` says otherwise.
    ///
    /// # Errors
    ///
    /// In `qemu-img`'s words: the image is missing, locked, damaged, encrypted, or in a format that is not read.
    pub fn open(&mut self, source: &Source, access: &Access) -> Result<Image, Error> {
        self.open_above(source, access, None)
    }

    /// Opens an image above another open one, instead of what its header names.
    ///
    /// # Errors
    ///
    /// As of [`open`](Self::open); and the format has no backing images.
    pub fn open_above(
        &mut self,
        source: &Source,
        access: &Access,
        backing: Option<&Image>,
    ) -> Result<Image, Error> {
        let failed = |error: Error| error.of(format!("Could not open '{}'", source.name));
        let (mut options, is_guessed_raw) = self.resolve(source, access).map_err(failed)?;
        if let Some(backing) = backing {
            let name = BlockdevRef::Name(backing.node_name.clone());
            if !options.driver.set_child("backing", name) {
                return Err(failed(Error::new("The format has no backing files")));
            }
        } else if access.alone {
            // A driver that cannot be looked at has nothing behind.
            let _ = options.driver.look(Look::Geometry);
        }
        if access.compress {
            options = compressing(options).map_err(failed)?;
        }
        self.open_resolved(options, is_guessed_raw).map_err(failed)
    }

    /// Opens an image for reading, as the disk was at an internal snapshot with that id.
    ///
    /// # Errors
    ///
    /// As of [`open`](Self::open); and there is no such snapshot, or the format has none.
    pub fn open_snapshot(
        &mut self,
        source: &Source,
        access: &Access,
        id: &str,
    ) -> Result<Image, Error> {
        let access = Access { write: false, ..*access };
        let failed = |error: Error| error.of(format!("Could not open '{}'", source.name));
        let (options, is_guessed_raw) = self.resolve(source, &access).map_err(failed)?;
        self.open_resolved(at_snapshot(options, id)?, is_guessed_raw).map_err(failed)
    }

    fn open_resolved(
        &mut self,
        mut options: BlockdevOptions,
        is_guessed_raw: bool,
    ) -> Result<Image, Error> {
        let node_name = self.next_name(&options);
        options.node_name = Some(node_name.clone());
        let node = self.patiently(|images| {
            images.nodes.open(&options).inspect_err(|_| drop(images.nodes.remove(&node_name)))
        });
        Ok(Image { node_name, node: node?, options, is_guessed_raw })
    }

    /// Closes an image. What was written is on stable storage on return.
    ///
    /// # Errors
    ///
    /// A flush failed. The image is closed.
    pub fn close(&mut self, image: Image) -> Result<(), Error> {
        let flushed = match image.node.geometry().read_only {
            true => Ok(()),
            false => self.disk(&image).and_then(|disk| disk.flush()),
        };
        let Image { node, node_name, .. } = image;
        drop(node);
        self.nodes.remove(&node_name)?;
        flushed
    }

    /// Tries again while a killed process keeps an image locked.
    pub(crate) fn patiently<T>(
        &mut self,
        mut open: impl FnMut(&mut Images) -> Result<T, OpenError>,
    ) -> Result<T, OpenError> {
        let begun = Instant::now();
        loop {
            match open(self) {
                // No event announces the end of the lock.
                Err(error) if error.is_left_locked() && begun.elapsed() < LEFT_LOCKED => {
                    std::thread::sleep(LOOK_AGAIN);
                }
                opened => return opened,
            }
        }
    }

    pub(crate) fn next_name(&mut self, options: &BlockdevOptions) -> String {
        let n = self.opened;
        self.opened += 1;
        options.node_name.clone().unwrap_or_else(|| format!("img{n}"))
    }

    /// Returns the options of an image, with its format, and whether that is raw for want of a header.
    pub(crate) fn resolve(
        &mut self,
        source: &Source,
        access: &Access,
    ) -> Result<(BlockdevOptions, bool), Error> {
        let mut given = source.options()?;
        let is_told = look(&given.object, "driver").is_some();
        let mut is_guessed_raw = false;
        if !is_told {
            let format = self.detect(&given, access)?;
            is_guessed_raw = format.is_none();
            let format = format.map_or("raw", Format::name);
            given.object.insert(0, ("driver".to_owned(), format.into()));
        }
        let at = Context::new(given.dialect);
        common(&mut given.object, access);
        // The node may lack a name.
        match read_ref(Value::Object(given.object), Inherited::default(), &at)? {
            BlockdevRef::Inline(options) => Ok((*options, is_guessed_raw)),
            BlockdevRef::Name(name) => Err(Error::new(format!("Cannot find node '{name}'"))),
        }
    }

    /// Detects the format of the bytes in the node `file`.
    fn detect(&mut self, given: &Given, access: &Access) -> Result<Option<Format>, Error> {
        let Some(file) = look(&given.object, "file") else {
            return Err(Error::new("Must specify either driver or file"));
        };
        let Value::Object(file) = file else {
            return Err(Error::new("The format of a node by name is not known: add driver=…"));
        };
        let mut file = file.clone();
        let access = Access { write: false, ..*access };
        common(&mut file, &access);
        let at = Context::new(given.dialect);
        let options = match read_ref(Value::Object(file), Inherited::default(), &at)? {
            BlockdevRef::Inline(options) => *options,
            BlockdevRef::Name(_) => return Ok(None),
        };
        let node_name = self.next_name(&BlockdevOptions { node_name: None, ..options.clone() });
        let options = BlockdevOptions { node_name: Some(node_name.clone()), ..options };
        let node = self.patiently(|images| {
            images.nodes.open(&options).inspect_err(|_| drop(images.nodes.remove(&node_name)))
        })?;
        let format = self.signature(&node);
        drop(node);
        self.nodes.remove(&node_name)?;
        format
    }

    /// Reads a node's first and last bytes.
    fn signature(&self, node: &Arc<dyn BlockNode>) -> Result<Option<Format>, Error> {
        let size = node.geometry().size;
        let channel = self.channel(node)?;
        let (start, end) = self
            .block_on(async move {
                let first = size.min(ALIGN);
                let start = read(&channel, 0, first).await?;
                let last = size.min(ALIGN);
                let at = (size - last) - (size - last) % ALIGN;
                let end = read(&channel, at, size - at).await?;
                Ok::<_, Errno>((start, end))
            })?
            .map_err(|errno| Error::os("Could not read image for determining its format", errno))?;
        let start = start.get(..SIGNATURE).unwrap_or(&start);
        let end = end.get(end.len().saturating_sub(SIGNATURE)..).unwrap_or(&end);
        Ok(Format::probe(start, end))
    }

    /// Opens this loop's way to a node.
    pub(crate) fn channel(&self, node: &Arc<dyn BlockNode>) -> Result<Rc<dyn Channel>, Error> {
        let channel = node.clone().open_channel(&self.event_loop);
        channel.map_err(|error| Error::io(format!("Could not use node '{}'", node.name()), &error))
    }

    /// Runs the loop until the future is done.
    pub(crate) fn block_on<T: 'static>(
        &self,
        future: impl Future<Output = T> + 'static,
    ) -> Result<T, Error> {
        block_on(&self.event_loop, future)
    }
}

/// Runs a loop until the future is done.
pub(crate) fn block_on<T: 'static>(
    event_loop: &EventLoop,
    future: impl Future<Output = T> + 'static,
) -> Result<T, Error> {
    event_loop.block_on(future).map_err(|error| Error::io("the event loop failed", &error))
}

/// A node that stores compressed what is written to one.
fn compressing(options: BlockdevOptions) -> Result<BlockdevOptions, Error> {
    let file = write_ref(&BlockdevRef::Inline(Box::new(options)));
    let object = [("driver", "compress".into()), ("discard", "unmap".into()), ("file", file)];
    parsed(object.map(|(name, value): (_, Value)| (name.to_owned(), value)).to_vec())
}

/// The same image, at an internal snapshot.
fn at_snapshot(options: BlockdevOptions, id: &str) -> Result<BlockdevOptions, Error> {
    let format = options.driver.kind().name;
    match write_ref(&BlockdevRef::Inline(Box::new(options))) {
        Value::Object(mut object) if format == "qcow2" => {
            object.push(("snapshot".to_owned(), id.into()));
            parsed(object)
        }
        _ => Err(Error::new(format!(
            "Block format '{format}' used by device '' does not support temporarily loading internal snapshots"
        ))),
    }
}

fn parsed(object: Object) -> Result<BlockdevOptions, Error> {
    let at = Context::new(Dialect::Json);
    match read_ref(Value::Object(object), Inherited::default(), &at)? {
        BlockdevRef::Inline(options) => Ok(*options),
        BlockdevRef::Name(name) => Err(Error::new(format!("Cannot find node '{name}'"))),
    }
}

/// Adds what `access` says to options that do not say it themselves.
fn common(object: &mut Object, access: &Access) {
    let mut add = |name: &str, value: Value| {
        if look(object, name).is_none() {
            object.push((name.to_owned(), value));
        }
    };
    if !access.write {
        add("read-only", on(true));
    }
    if access.force_share {
        add("force-share", on(true));
    }
    if access.unmap {
        add("discard", "unmap".into());
    }
    let cache = [("direct", access.direct), ("no-flush", access.no_flush)];
    let cache: Object = cache
        .into_iter()
        .filter(|(_, is_on)| *is_on)
        .map(|(name, _)| (name.to_owned(), on(true)))
        .collect();
    if !cache.is_empty() {
        add("cache", Value::Object(cache));
    }
}

/// `on` in either dialect: text stands for it in `key=value` only.
fn on(is_on: bool) -> Value {
    Value::Bool(is_on)
}

/// Reads a part of a node.
pub(crate) async fn read(channel: &Rc<dyn Channel>, at: u64, len: u64) -> Result<Vec<u8>, Errno> {
    if len == 0 {
        return Ok(Vec::new());
    }
    let bufs = AlignedBuf::io_bufs(len as usize, ALIGN as usize).ok_or(Errno::ENOMEM)?;
    let (result, bufs) = submit(channel, Op::Read, at, len, bufs).await;
    result?;
    let mut bytes = vec![0; len as usize];
    bufs.copy_out(0, &mut bytes);
    Ok(bytes)
}
