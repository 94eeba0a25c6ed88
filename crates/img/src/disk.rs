//! Reading and writing the bytes of an open image.

use std::rc::Rc;

use block::node::{Channel, Geometry};
use block::request::Op;
use block::submit;
use event_loop::{EventLoop, IoBufs};
use nix::errno::Errno;

use crate::copy::{fill, flush, memory};
use crate::error::Error;
use crate::images::{Image, Images, block_on};

/// Bytes that one request reads or writes, at most.
const PIECE: usize = 1 << 20;

/// The bytes of an open image. Each call blocks until it is done.
///
/// Offsets and lengths are in bytes, of any alignment. What lies within an image's blocks is read, changed and written back
/// where the storage wants whole blocks.
///
/// ```
/// use img::{Access, Images, NewImage, Source};
///
/// # let folder = std::env::temp_dir().join(format!("img-disk-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// let name = folder.join("disk.qcow2").display().to_string();
/// let mut images = Images::new()?;
/// let size = Some(1 << 30);
/// images.create(&NewImage { name: name.clone(), format: "qcow2".into(), size, ..NewImage::default() })?;
///
/// let image = images.open(&Source::new(name), &Access::WRITE)?;
/// let disk = images.disk(&image)?;
/// disk.write_at(b"ringmill", 1 << 29)?;
/// disk.flush()?;
/// let mut bytes = [0; 10];
/// disk.read_at(&mut bytes, (1 << 29) - 1)?;
/// assert_eq!(&bytes, b"\0ringmill\0");
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A program that has an event loop takes [`Image::node`] instead, and [`block::submit`] on a channel of that loop.
pub struct Disk {
    name: String,
    event_loop: EventLoop,
    channel: Rc<dyn Channel>,
    geometry: Geometry,
}

impl Images {
    /// Returns the bytes of an open image. Drop them before the image is [closed](Images::close).
    ///
    /// # Errors
    ///
    /// The image cannot be used from this thread: no descriptors, no memory.
    pub fn disk(&self, image: &Image) -> Result<Disk, Error> {
        Ok(Disk {
            name: image.node_name.clone(),
            event_loop: self.event_loop.clone(),
            channel: self.channel(&image.node)?,
            geometry: image.node.geometry(),
        })
    }
}

impl Disk {
    /// Returns the number of bytes.
    pub fn size(&self) -> u64 {
        self.geometry.size
    }

    /// Fills `bytes` with what is stored from `offset` on.
    ///
    /// # Errors
    ///
    /// The range is not within the disk, or a read failed: the message has the range and the reason.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), Error> {
        self.check("read", offset, bytes.len() as u64)?;
        for (piece, at) in bytes.chunks_mut(PIECE).zip((offset..).step_by(PIECE)) {
            let (channel, len) = (self.channel.clone(), piece.len() as u64);
            let bufs = memory(len, "read")?;
            let read = self.run("read", at, len, async move { fill(&channel, at, bufs).await })?;
            read.copy_out(0, piece);
        }
        Ok(())
    }

    /// Stores `bytes` from `offset` on. They are on stable storage after a [`flush`](Self::flush).
    ///
    /// # Errors
    ///
    /// The range is not within the disk, the image was opened for reading, or a write failed. Bytes before the failure may be
    /// stored.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        self.check_write(offset, bytes.len() as u64)?;
        for (piece, at) in bytes.chunks(PIECE).zip((offset..).step_by(PIECE)) {
            let mut bufs = memory(piece.len() as u64, "write")?;
            bufs.copy_in(0, piece);
            self.write(Op::Write { fua: false }, at, piece.len() as u64, bufs)?;
        }
        Ok(())
    }

    /// Makes a range read as zeroes, without writing them where the storage can do so. It may give the space back if the image
    /// was opened with [`Access::unmap`](crate::Access::unmap).
    ///
    /// # Errors
    ///
    /// As of [`write_at`](Self::write_at).
    pub fn write_zeroes_at(&self, offset: u64, len: u64) -> Result<(), Error> {
        self.check_write(offset, len)?;
        let zeroes = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
        self.write(zeroes, offset, len, IoBufs::new())
    }

    /// Waits until all that was written is on stable storage.
    ///
    /// # Errors
    ///
    /// The storage says that it may not be.
    pub fn flush(&self) -> Result<(), Error> {
        let channel = self.channel.clone();
        block_on(&self.event_loop, async move { flush(&channel).await })?
    }

    fn check(&self, what: &str, offset: u64, len: u64) -> Result<(), Error> {
        match offset.checked_add(len) {
            Some(end) if end <= self.geometry.size => Ok(()),
            _ => {
                let size = self.geometry.size;
                let what = format!("{what} of {len} bytes at {offset}");
                Err(Error::new(format!("{what}: the disk '{}' has {size} bytes", self.name)))
            }
        }
    }

    fn check_write(&self, offset: u64, len: u64) -> Result<(), Error> {
        if self.geometry.read_only {
            let hint = "Access::WRITE opens an image for writing";
            return Err(
                Error::os(format!("write to '{}'", self.name), Errno::EROFS).with_hint(hint)
            );
        }
        self.check("write", offset, len)
    }

    fn write(&self, op: Op, at: u64, len: u64, bufs: IoBufs) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        let channel = self.channel.clone();
        self.run("write", at, len, async move { submit(&channel, op, at, len, bufs).await.0 })
    }

    /// Runs a request on the loop.
    fn run<T: 'static>(
        &self,
        what: &str,
        at: u64,
        len: u64,
        request: impl Future<Output = Result<T, Errno>> + 'static,
    ) -> Result<T, Error> {
        block_on(&self.event_loop, request)?.map_err(|errno| {
            Error::os(format!("{what} of {len} bytes at {at} of '{}'", self.name), errno)
        })
    }
}
