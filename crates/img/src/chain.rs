//! Changes of what lies behind an image: commit and rebase.

use std::ops::Range;
use std::rc::Rc;

use block::node::{BackingName, Channel, cluster_size};
use block::request::Op;
use block::status::ExtentState;
use block::submit;
use event_loop::IoBufs;
use nix::errno::Errno;

use crate::copy::{CopyOptions, extents, flush, memory, part, read, reading};
use crate::error::Error;
use crate::images::{Access, Image, Images};
use crate::info::ImageInfo;
use crate::source::Source;

/// Bytes that are compared at once, at most.
const CHUNK: u64 = 1 << 20;

/// The image behind an image, for a rebase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewBacking {
    /// The name, as the header will have it.
    pub name: String,
    /// The format. Without one, a guest that writes a format's header to a raw image would choose it.
    pub format: String,
}

impl Images {
    /// Writes what an image and those behind it, above `base`, have stored into `base`. `None`: the image behind.
    ///
    /// The images above keep what they have, and show the same contents as before.
    ///
    /// # Errors
    ///
    /// There is no such image behind, or one cannot be opened, read or written.
    pub fn commit(
        &mut self,
        source: &Source,
        base: Option<&str>,
        access: &Access,
        progress: impl FnMut(u64) + 'static,
    ) -> Result<(), Error> {
        let chain = self.chain_info(source, &Access { force_share: true, ..Access::READ })?;
        let place = match base {
            None if chain.len() > 1 => 1,
            None => return Err(Error::new("Image does not have a backing file")),
            Some(name) => {
                let is_it = |info: &ImageInfo| info.filename == name;
                let named = chain.iter().zip(chain.iter().skip(1)).position(|(above, info)| {
                    let header = above.backing.as_ref().map(|backing| backing.filename.as_str());
                    is_it(info) || header == Some(name)
                });
                match named {
                    Some(above) => above + 1,
                    None => {
                        let top = &source.name;
                        let why = format!("Did not find '{name}' in the backing chain of '{top}'");
                        return Err(Error::new(why));
                    }
                }
            }
        };
        let (above, behind) = chain.split_at(place);
        let Some(of_base) = behind.first() else {
            return Err(Error::new("There is no such image"));
        };
        let of = |info: &ImageInfo| Source::with_format(info.filename.clone(), info.format.clone());
        let write = Access { no_flush: access.no_flush, direct: access.direct, ..Access::WRITE };
        let target = self.open(&of(of_base), &write)?;
        let mut opened = vec![target.clone()];
        for (index, info) in above.iter().enumerate().rev() {
            let of_image = if index == 0 { source.clone() } else { of(info) };
            let backing = opened.last().cloned();
            // No other process may write to the topmost image meanwhile: it is not opened with `force_share`.
            opened.push(self.open_above(&of_image, &Access::READ, backing.as_ref())?);
        }
        let Some(top) = opened.last().cloned() else { return Ok(()) };
        if target.size() < top.size() {
            self.resize(&target, top.size())?;
        }
        let depth = u32::try_from(place).unwrap_or(u32::MAX).saturating_add(1);
        let how = CopyOptions { above: Some(depth), ..CopyOptions::default() };
        let copied = self.copy(std::slice::from_ref(&top), &target, &how, progress);
        drop((top, target));
        let closed = opened.into_iter().rev().map(|image| self.close(image)).reduce(Result::and);
        copied.and(closed.unwrap_or(Ok(())))
    }

    /// Changes the name of the backing file in the header of an image. `None`: it has none any more. The contents change unless
    /// both files have the same.
    ///
    /// # Errors
    ///
    /// The format has no such name, or it is too long.
    pub fn rename_backing(
        &mut self,
        image: &Image,
        backing: Option<&NewBacking>,
    ) -> Result<(), Error> {
        let node = self.nodes.node(&image.node_name)?;
        let new = backing.map(|backing| BackingName {
            filename: backing.name.clone(),
            format: Some(backing.format.clone()),
        });
        let renamed = self.block_on(node.set_backing_name(new, &self.event_loop))?;
        renamed.map_err(|errno| match errno {
            Errno::ENOTSUP => Error::new("Operation not supported"),
            errno => Error::os("Could not change the backing file", errno),
        })
    }

    /// Gives an image another backing file, or none, and leaves its contents as they are: what the old file has and the new one
    /// has not goes into the image.
    ///
    /// # Errors
    ///
    /// An image cannot be opened, read or written. The image has its old backing file then.
    pub fn rebase(
        &mut self,
        source: &Source,
        backing: Option<&NewBacking>,
        access: &Access,
        progress: impl FnMut(u64) + 'static,
    ) -> Result<(), Error> {
        let top_info = self.info(source, &Access { force_share: true, ..Access::READ })?;
        let read = Access { direct: access.direct, ..Access::READ };
        let old = match (&top_info.full_backing, &top_info.backing) {
            (Some(name), Some(named)) => {
                let of_old =
                    Source { name: name.clone(), format: named.format.clone(), is_options: false };
                let old = self.open(&of_old, &read);
                Some(old.map_err(|error| error.of("Could not open old backing file"))?)
            }
            (None, Some(named)) => {
                let why = format!("The place of the backing file '{}' is unknown", named.filename);
                return Err(Error::new(why));
            }
            (_, None) => None,
        };
        let new = match backing {
            None => None,
            Some(NewBacking { name, format }) => {
                let of_new = Source::beside(&source.name, name, Some(format.clone()));
                let new = self.open(&of_new, &read);
                let opened = format!("Could not open new backing file '{name}'");
                Some(new.map_err(|error| error.of(opened))?)
            }
        };
        let write = Access { no_flush: access.no_flush, direct: access.direct, ..Access::WRITE };
        let alone = Access { alone: true, ..write };
        let top = match &old {
            Some(old) => self.open_above(source, &write, Some(old))?,
            None => self.open(source, &alone)?,
        };
        let unit = cluster_size(&top.node).unwrap_or(65536);
        let sides = Sides {
            top: self.channel(&top.node)?,
            size: top.size(),
            new: match &new {
                Some(new) => Some((self.channel(&new.node)?, new.size())),
                None => None,
            },
            unit,
        };
        let compared = self.block_on(sides.keep_contents(progress));
        compared??;
        self.rename_backing(&top, backing)?;
        self.close(top)?;
        [old, new].into_iter().flatten().try_for_each(|image| self.close(image))
    }
}

/// An image above its old backing file, and the new one.
struct Sides {
    top: Rc<dyn Channel>,
    size: u64,
    new: Option<(Rc<dyn Channel>, u64)>,
    /// Bytes that are stored as a whole.
    unit: u64,
}

impl Sides {
    /// Stores in the image what it would not show above the new file.
    async fn keep_contents(self, mut progress: impl FnMut(u64)) -> Result<(), Error> {
        let chunk = CHUNK.max(self.unit);
        let (old, new) = (memory(chunk, "compare")?, memory(chunk, "compare")?);
        let mut at = 0;
        while at < self.size {
            let found =
                extents(&self.top, at..self.size).await.map_err(|errno| reading(at, errno))?;
            for extent in found {
                let end = at + extent.len;
                if extent.depth != 1 {
                    let is_zero = extent.state != ExtentState::Data;
                    self.keep(at..end, is_zero, &old, &new, chunk).await?;
                }
                at = end;
                progress(at);
            }
        }
        flush(&self.top).await
    }

    async fn keep(
        &self,
        range: Range<u64>,
        is_zero: bool,
        old: &IoBufs,
        new: &IoBufs,
        chunk: u64,
    ) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            let end = ((at / chunk + 1) * chunk).min(range.end);
            if is_zero {
                // Zeroes of both need not be read.
                let zero = self.new_zeroes(at..range.end).await?;
                if zero > 0 {
                    at += zero;
                    continue;
                }
            }
            let len = end - at;
            let before = read(&self.top, at, part(old, 0, len)).await?;
            let mut after = part(new, 0, len);
            after.zero(0, len as usize);
            if let Some((channel, size)) = &self.new {
                let there = size.saturating_sub(at).min(len);
                if there > 0 {
                    read(channel, at, part(new, 0, there)).await?;
                }
            }
            self.store(at, &before, &after).await?;
            at = end;
        }
        Ok(())
    }

    /// Bytes from the beginning of a range on that read as zeroes above the new file.
    async fn new_zeroes(&self, range: Range<u64>) -> Result<u64, Error> {
        let Some((channel, size)) = &self.new else { return Ok(range.end - range.start) };
        if range.start >= *size {
            return Ok(range.end - range.start);
        }
        let end = range.end.min(*size);
        let found = extents(channel, range.start..end).await;
        let found = found.map_err(|errno| reading(range.start, errno))?;
        let first = found.first().filter(|extent| extent.state != ExtentState::Data);
        Ok(first.map_or(0, |extent| extent.len))
    }

    /// Stores the units that differ.
    async fn store(&self, at: u64, before: &IoBufs, after: &IoBufs) -> Result<(), Error> {
        let len = before.len() as u64;
        let (mut left, mut right) = (vec![0; len as usize], vec![0; len as usize]);
        before.copy_out(0, &mut left);
        after.copy_out(0, &mut right);
        let mut from = 0;
        while from < len {
            let to = (((at + from) / self.unit + 1) * self.unit - at).min(len);
            let unit = from as usize..to as usize;
            if left.get(unit.clone()) != right.get(unit) {
                let bufs = part(before, from, to - from);
                let (op, bufs) = match bufs.is_zero() {
                    true => {
                        let zeroes =
                            Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
                        (zeroes, IoBufs::new())
                    }
                    false => (Op::Write { fua: false }, bufs),
                };
                let (result, _) = submit(&self.top, op, at + from, to - from, bufs).await;
                result.map_err(|errno| {
                    Error::os(format!("error while writing at byte {}", at + from), errno)
                })?;
            }
            from = to;
        }
        Ok(())
    }
}
