//! [`imago`]'s storage over a node of ours: its requests go down the channels of the loop that the task
//! runs on.
//!
//! Only metadata goes this way, and what is written of it is [kept](super::metadata) first. The guest's data goes from the guest's memory to the node below, by
//! where the image maps it ([`access`](super::access)).

// The trait's methods are `unsafe`: whoever calls them keeps to alignments and to turns. Here they need
// neither, and nothing below is unsafe.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{AlignedBuf, IoBufs};
use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::PreallocateMode;
use imago::storage::drivers::CommonStorageHelper;
use nix::errno::Errno;

use super::context::{Channels, Transfer};
use super::marker::{set_corrupt, set_dirty};
use super::metadata::Metadata;
use super::steps::SECTOR;
use super::writes::{Ticket, Writes};
use crate::node::Channel;
use crate::request::Op;

/// Of the memory of requests, bytes: what `O_DIRECT` wants at most.
const MEMORY: usize = 4096;

/// Which of the nodes below a storage is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    File,
    DataFile,
}

/// What the storages of an image have in common.
#[derive(Debug)]
pub(super) struct Shared {
    /// All writes to the files.
    writes: Arc<Writes>,
    /// What is written to the file of an image that is being used. Of one that is being created or only
    /// read, nothing is kept.
    pub(super) metadata: Option<Metadata>,
}

impl Shared {
    pub(super) fn new(metadata: Option<Metadata>) -> Arc<Shared> {
        Arc::new(Shared { writes: Arc::default(), metadata })
    }

    /// Takes note of a write to one of the files that begins.
    pub(super) fn begin_write(&self) -> Ticket {
        self.writes.begin()
    }
}

/// Flushes the nodes that are written to.
pub(super) async fn sync(channels: &Channels) -> Result<(), Errno> {
    let flush = |channel| Transfer::start(channel, Op::Flush, 0, 0, IoBufs::new());
    let file = flush(&channels.file);
    let data_file = channels.data_file.as_ref().map(flush);
    let file = file.await.0;
    let data_file = match data_file {
        Some(transfer) => transfer.await.0,
        None => Ok(()),
    };
    file.and(data_file)
}

/// A node below the image, as [`imago`] sees it.
pub(super) struct NodeStorage {
    role: Role,
    name: String,
    shared: Arc<Shared>,
    helper: CommonStorageHelper,
}

impl NodeStorage {
    /// The node called `name`.
    pub(super) fn new(role: Role, name: &str, shared: Arc<Shared>) -> NodeStorage {
        NodeStorage { role, name: name.to_owned(), shared, helper: CommonStorageHelper::default() }
    }

    fn channels(&self) -> io::Result<Rc<Channels>> {
        // All that is asked of an image is asked by a task of ours.
        Channels::current().ok_or_else(|| io::Error::other("no task of this image is running"))
    }

    fn channel<'a>(&self, channels: &'a Channels) -> &'a Rc<dyn Channel> {
        match self.role {
            Role::File => &channels.file,
            Role::DataFile => channels.data(),
        }
    }

    /// What is kept of what is written here.
    fn metadata(&self) -> Option<&Metadata> {
        self.shared.metadata.as_ref().filter(|_| self.role == Role::File)
    }

    async fn change(&self, op: Op, offset: u64, len: u64, bufs: IoBufs) -> io::Result<()> {
        let channels = self.channels()?;
        let ticket = self.shared.begin_write();
        let channel = self.channel(&channels);
        let (result, _) = Transfer::start_write(channel, op, offset, len, bufs, ticket).await;
        Ok(result?)
    }
}

/// Fresh memory for a request.
fn memory(len: u64) -> io::Result<IoBufs> {
    let bufs = usize::try_from(len).ok().and_then(|len| AlignedBuf::io_bufs(len, MEMORY));
    Ok(bufs.ok_or(Errno::ENOMEM)?)
}

impl Storage for NodeStorage {
    fn req_align(&self) -> usize {
        // Whatever the node below would take.
        SECTOR
    }

    fn size(&self) -> io::Result<u64> {
        // It becomes as long as it has to. Only who creates an image asks, and wants to find nothing.
        Ok(0)
    }

    async unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let channels = self.channels()?;
        let len = bufv.len();
        let kept = self.metadata().map(|kept| kept.kept(offset..offset + len));
        let transfer =
            Transfer::start(self.channel(&channels), Op::Read, offset, len, memory(len)?);
        let (result, mut bufs) = transfer.await;
        result?;
        for (at, sector) in kept.into_iter().flatten() {
            // Both begin with a sector, and end with one.
            bufs.copy_in((at - offset) as usize, &sector);
        }
        if self.role == Role::File && offset == 0 {
            // Hides the dirty and corrupt bits from `imago`, which would refuse the image.
            let mut header = [0; SECTOR];
            bufs.copy_out(0, &mut header);
            set_dirty(&mut header, false);
            set_corrupt(&mut header, false);
            bufs.copy_in(0, &header);
        }
        let mut at = 0;
        for mut slice in bufv.into_inner() {
            at += bufs.copy_out(at, &mut slice);
        }
        Ok(())
    }

    async unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        let len = bufv.len();
        if let Some(metadata) = self.metadata() {
            let mut bytes = vec![0; len as usize];
            bufv.copy_into_slice(&mut bytes);
            metadata.write(offset, &bytes);
            return Ok(());
        }
        let mut bufs = memory(len)?;
        let mut at = 0;
        for slice in bufv.into_inner() {
            at += bufs.copy_in(at, &slice);
        }
        self.change(Op::Write { fua: false }, offset, len, bufs).await
    }

    async unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        if self.metadata().is_some() {
            // Around data that does not fill its cluster: whoever writes it fills all of it.
            return Ok(());
        }
        let op = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
        self.change(op, offset, length, IoBufs::new()).await
    }

    async unsafe fn pure_write_allocated_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        let op = Op::WriteZeroes { may_unmap: false, no_fallback: false, fua: false };
        self.change(op, offset, len, IoBufs::new()).await
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    async fn sync(&self) -> io::Result<()> {
        Ok(sync(&*self.channels()?).await?)
    }

    async fn settle_writes(&self) -> io::Result<()> {
        self.shared.writes.settle().await;
        Ok(())
    }

    async unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }

    async fn resize(&self, _new_size: u64, _prealloc_mode: PreallocateMode) -> io::Result<()> {
        // It becomes longer by being written to.
        Ok(())
    }
}

impl fmt::Debug for NodeStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeStorage({:?}, {})", self.role, self.name)
    }
}

impl fmt::Display for NodeStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
