//! Which image of a chain stores each part of a disk, and where.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use block::driver::Layer;
use block::node::{BlockNode, StoredAt};
use block::options::{BlockdevOptions, BlockdevRef};
use block::status::ExtentState;
use options::Value;
use options::table::look;

use crate::copy::extents;
use crate::error::Error;
use crate::images::{Image, Images};
use crate::info::filename;

/// A part of a disk that is stored in one way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapped {
    /// Its first byte on the disk.
    pub start: u64,
    /// Its bytes.
    pub len: u64,
    /// The image: 0 is the topmost.
    pub depth: u32,
    /// An image stores it, be it as zeroes.
    pub is_present: bool,
    /// It reads as zeroes.
    pub is_zero: bool,
    /// It is data.
    pub is_data: bool,
    /// It is compressed.
    pub is_compressed: bool,
    /// Where it is in the file. `None`: it is nowhere, compressed, or encrypted.
    pub offset: Option<u64>,
    /// The file.
    pub file: Option<String>,
}

impl Mapped {
    /// Whether `next` continues this part.
    fn continues(&self, next: &Mapped) -> bool {
        let how = |part: &Mapped| {
            let Mapped { depth, is_present, is_zero, is_data, is_compressed, .. } = *part;
            (depth, is_present, is_zero, is_data, is_compressed)
        };
        let offset = self.offset.map(|offset| offset + self.len);
        how(self) == how(next) && self.file == next.file && offset == next.offset
    }
}

/// An image of a chain.
struct Link {
    node: Arc<dyn BlockNode>,
    size: u64,
    /// The file that has its data.
    file: String,
    /// Where the disk begins in that file. `None`: its bytes are not those of the file.
    window: Option<u64>,
}

impl Images {
    /// Tells where a range of an image's disk is stored. `tell` receives the parts, in order, until it breaks off.
    ///
    /// # Errors
    ///
    /// The tables of an image cannot be read.
    pub fn map(
        &self,
        image: &Image,
        range: Range<u64>,
        mut tell: impl FnMut(&Mapped) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        let chain = self.chain(&image.node_name);
        let mut last: Option<Mapped> = None;
        let mut at = range.start;
        let end = range.end.min(image.size());
        while at < end {
            for part in self.parts(&chain, 0, at..end)? {
                at += part.len;
                match &mut last {
                    Some(last) if last.continues(&part) => last.len += part.len,
                    last => {
                        if let Some(last) = last.replace(part)
                            && tell(&last).is_break()
                        {
                            return Ok(());
                        }
                    }
                }
            }
        }
        let _ = last.as_ref().map(tell);
        Ok(())
    }

    /// The images of a chain, the topmost first.
    fn chain(&self, name: &str) -> Vec<Link> {
        let mut chain = Vec::new();
        let mut next = Some(name.to_owned());
        while let Some(info) = next.take().and_then(|name| self.nodes.info(&name)) {
            let options = info.options;
            // A filter shows its child as it is.
            if options.driver.layer() == Layer::Filter {
                next = info.children.first().map(|child| child.edge.node().name().to_owned());
                continue;
            }
            let child = |role: &str| info.children.iter().find(|child| child.role == role);
            let of_data = child("data-file").or_else(|| child("file"));
            let below = of_data.and_then(|child| self.nodes.info(child.edge.node().name()));
            let file = below.map_or_else(|| filename(options), |below| filename(below.options));
            let size = info.node.geometry().size;
            chain.push(Link { node: info.node.clone(), size, file, window: window(options) });
            next = child("backing").map(|child| child.edge.node().name().to_owned());
        }
        chain
    }

    /// The first parts of a range, as the images from one of a chain on have them.
    fn parts(&self, chain: &[Link], depth: usize, range: Range<u64>) -> Result<Vec<Mapped>, Error> {
        let Some(link) = chain.get(depth) else { return Ok(Vec::new()) };
        let nowhere = |start, len| Mapped {
            start,
            len,
            depth: u32::try_from(depth).unwrap_or(u32::MAX),
            is_present: false,
            is_zero: true,
            is_data: false,
            is_compressed: false,
            offset: None,
            file: None,
        };
        let failed = |errno| Error::os("Failed to read image metadata", errno);
        let image = link.node.clone().image();
        let places = image.and_then(|image| image.places(range.clone(), &self.event_loop));
        let Some(places) = places else {
            let (channel, asked) = (self.channel(&link.node)?, range.clone());
            let found = self.block_on(async move { extents(&channel, asked).await })?;
            let mut at = range.start;
            let found = found.map_err(failed)?.into_iter().map(|extent| {
                let start = at;
                at += extent.len;
                let is_data = extent.state == ExtentState::Data;
                Mapped {
                    is_present: true,
                    is_zero: !is_data,
                    is_data,
                    offset: link.window.map(|window| window + start),
                    file: link.window.map(|_| link.file.clone()),
                    ..nowhere(start, extent.len)
                }
            });
            return Ok(found.collect());
        };
        let mut parts = Vec::new();
        let mut at = range.start;
        for (len, place) in self.block_on(places)?.map_err(failed)? {
            let part = nowhere(at, len);
            let data = Mapped { is_present: true, is_zero: false, is_data: true, ..part.clone() };
            let end = at + len;
            match place {
                StoredAt::Data(offset) => {
                    let file = offset.map(|_| link.file.clone());
                    parts.push(Mapped { offset, file, ..data });
                }
                StoredAt::Compressed => parts.push(Mapped { is_compressed: true, ..data }),
                StoredAt::Zeroes => parts.push(Mapped { is_present: true, ..part }),
                StoredAt::Behind => {
                    let behind = chain.get(depth + 1).map_or(0, |behind| behind.size);
                    while at < end.min(behind) {
                        let found = self.parts(chain, depth + 1, at..end.min(behind))?;
                        at += found.iter().map(|part| part.len).sum::<u64>();
                        parts.extend(found);
                    }
                    if at < end {
                        parts.push(nowhere(at, end - at));
                    }
                }
            }
            at = end;
        }
        Ok(parts)
    }
}

/// Where a disk begins in the file with its bytes.
fn window(options: &BlockdevOptions) -> Option<u64> {
    let driver = &options.driver;
    match driver.layer() {
        Layer::Storage => Some(0),
        Layer::Filter | Layer::Format => None,
        // Of one that encrypts, the bytes are others.
        Layer::Window if driver.describe(Some("x")).filename.is_none() => {
            let offset = look(&driver.write(), "offset").cloned();
            match offset {
                Some(Value::Integer(offset)) => Some(offset.unsigned_abs()),
                _ => None,
            }
        }
        Layer::Window => {
            let below = driver.children().into_iter().next()?;
            match below.node {
                BlockdevRef::Inline(below) => window(below),
                BlockdevRef::Name(_) => Some(0),
            }
        }
    }
}
