//! A virtqueue of the client, with the memory of its requests.
//!
//! The load generator's only unsafe code is here: it passes buffers that the server writes to `virtio-driver`.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use nix::sys::memfd::{MFdFlags, memfd_create};
use virtio_driver::{EventFd, QueueNotifier, VirtioBlkQueue, VirtioBlkTransport};
use vm_memory::FileOffset;
use vm_memory::mmap::MmapRegion;

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    /// Read a block.
    Read,
    /// Write a block.
    Write,
}

/// Memory shared with the server: one buffer per request slot of every queue.
#[derive(Debug)]
pub(crate) struct Buffers {
    region: MmapRegion,
    file: File,
    block_size: usize,
}

impl Buffers {
    /// Makes `count` buffers of `block_size` bytes with random data, without zeroes to detect or redundancy to compress.
    pub(crate) fn new(count: usize, block_size: usize) -> Result<Self> {
        let size = count.checked_mul(block_size).context("too many buffers")?;
        let file = File::from(
            memfd_create("bench-buffers", MFdFlags::MFD_CLOEXEC).context("memfd_create")?,
        );
        file.set_len(size as u64).context("sizing the request buffers")?;
        let mapped = FileOffset::new(file.try_clone()?, 0);
        let region = MmapRegion::from_file(mapped, size).context("mapping the request buffers")?;
        let mut random = Rng::with_seed(1);
        let data: Vec<u8> =
            (0..size.div_ceil(8)).flat_map(|_| random.u64(..).to_ne_bytes()).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &data[..size], 0)
            .context("filling the request buffers")?;
        Ok(Self { region, file, block_size })
    }

    /// Shares the memory with the server.
    pub(crate) fn share(&self, transport: &mut VirtioBlkTransport) -> Result<()> {
        let address = self.region.as_ptr() as usize;
        transport
            .map_mem_region(address, self.region.size(), self.file.as_raw_fd(), 0)
            .context("handing the request buffers to the server")?;
        Ok(())
    }
}

/// A queue and the buffers of its requests.
pub(crate) struct Queue {
    queue: VirtioBlkQueue<'static, u16>,
    notifier: Box<dyn QueueNotifier>,
    completion_fd: Arc<EventFd>,
    signals_wanted: bool,
    buffers: Arc<Buffers>,
    first_buffer: usize,
    // The rings are in memory that the transport owns, so it has to outlive `queue`.
    _transport: Arc<VirtioBlkTransport>,
}

impl Queue {
    /// Makes queue `index` of `transport`, whose slot 0 uses buffer `first_buffer`.
    pub(crate) fn new(
        queue: VirtioBlkQueue<'static, u16>,
        index: usize,
        transport: &Arc<VirtioBlkTransport>,
        buffers: &Arc<Buffers>,
        first_buffer: usize,
    ) -> Self {
        Self {
            queue,
            notifier: transport.get_submission_notifier(index),
            completion_fd: transport.get_completion_fd(index),
            signals_wanted: false,
            buffers: Arc::clone(buffers),
            first_buffer,
            _transport: Arc::clone(transport),
        }
    }

    fn has_completed(&mut self) -> bool {
        self.queue.completions().has_next()
    }

    /// Makes ready a request of one block, which goes with the next [`kick`](Self::kick). `slot` comes
    /// back when it is done; it must not be in flight.
    pub(crate) fn submit(&mut self, op: Op, offset: u64, slot: u16) -> Result<()> {
        let length = self.buffers.block_size;
        let start = (self.first_buffer + usize::from(slot)) * length;
        ensure!(start + length <= self.buffers.region.size(), "slot {slot} has no buffer");
        let buffer = self.buffers.region.as_ptr().wrapping_add(start);
        // SAFETY: `buffer..buffer + length` is inside the mapping, which `self.buffers` keeps as long as the queue. No
        // Rust reference to it exists, so the server may write to it at any time.
        unsafe {
            match op {
                Op::Read => self.queue.read_raw(offset, buffer, length, slot),
                Op::Write => self.queue.write_raw(offset, buffer, length, slot),
            }
        }
        .context("queueing a request")
    }

    /// Lets the server have what was submitted since the last call.
    pub(crate) fn kick(&mut self) -> Result<()> {
        if self.queue.avail_notif_needed() {
            self.notifier.notify().context("kicking a queue")?;
        }
        Ok(())
    }

    /// Takes one completed request: its slot, and 0 or a negative errno.
    pub(crate) fn completed(&mut self) -> Result<Option<(u16, i32)>> {
        if self.signals_wanted && self.has_completed() {
            // As a guest's driver: no more signals until all answers are taken.
            self.queue.set_used_notif_enabled(false);
            self.signals_wanted = false;
        }
        Ok(self.queue.completions().next().map(|done| (done.context, done.ret)))
    }

    /// Asks for a signal on [`Self::signal_fd`] at the next completion. Returns whether there is
    /// one already: then there may be no signal.
    pub(crate) fn want_signal(&mut self) -> bool {
        if !self.signals_wanted {
            self.queue.set_used_notif_enabled(true);
            self.signals_wanted = true;
        }
        self.has_completed()
    }

    /// Readable after a signal.
    pub(crate) fn signal_fd(&self) -> BorrowedFd<'_> {
        self.completion_fd.as_fd()
    }

    /// Takes a signal that has come.
    pub(crate) fn take_signal(&self) -> Result<()> {
        self.completion_fd.read().context("reading a call eventfd")?;
        Ok(())
    }
}
