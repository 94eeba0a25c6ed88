//! A disk with a simulated power cut, for tests of devices and exports: data that they report as durable must
//! survive a cut at that moment.
//!
//! The image lies on storage with a volatile write cache ([`event_loop::ring::sim::Storage`]). A cut discards
//! everything that no flush has made durable.
//!
//! Panics on any error, because it is for tests.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use event_loop::ring::sim::{Faults, Sim, Storage};
use event_loop::{AlignedBuf, EventLoop, LoopConfig, PollParams};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::node::BlockNode;
use crate::options::{
    Backing, BlockdevOptions, BlockdevRef, Discard, Driver, FileOptions, Locking, Qcow2Options,
    RawOptions,
};
use crate::request::Op;
use crate::{CreateQcow2, NodeRegistry, create_qcow2, submit};

/// What the image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The disk as it is.
    Raw,
    /// With clusters of 4 KiB.
    Qcow2,
}

impl Format {
    /// All there are.
    pub const ALL: [Format; 2] = [Format::Raw, Format::Qcow2];
}

/// A disk, all zeroes at first.
pub struct VolatileDisk {
    storage: Storage,
    fd: Arc<OwnedFd>,
    format: Format,
    node: Arc<dyn BlockNode>,
}

fn sim(storage: Storage) -> Sim {
    // An operation is done when the loop turns next: what is answered too early is answered before.
    let faults = Faults { latency_ns: (0, 0), ..Faults::default() };
    Sim::with_storage(1, faults, storage)
}

fn path_of(fd: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

fn open(mut nodes: NodeRegistry, fd: &OwnedFd, format: Format) -> Arc<dyn BlockNode> {
    let blockdev = |node_name: &str, driver| BlockdevOptions {
        discard: Discard::Unmap,
        ..BlockdevOptions::new(Some(node_name), driver)
    };
    let file = FileOptions { filename: path_of(fd), aio: None, locking: Locking::Off };
    let file = BlockdevRef::Inline(Box::new(blockdev("file", Driver::file(file))));
    let driver = match format {
        Format::Raw => Driver::from(RawOptions { file, offset: 0, size: None, keep_raw: false }),
        Format::Qcow2 => {
            Driver::from(Qcow2Options { file, backing: Backing::None, ..Qcow2Options::default() })
        }
    };
    nodes.open(&blockdev("disk", driver)).expect("an image that can be opened")
}

impl VolatileDisk {
    /// Returns a disk of `size` bytes, whole sectors.
    pub fn new(format: Format, size: u64) -> VolatileDisk {
        let file = File::from(memfd_create("disk", MFdFlags::MFD_CLOEXEC).expect("a memfd"));
        match format {
            Format::Raw => file.set_len(size).expect("a larger file"),
            Format::Qcow2 => {
                let create = CreateQcow2 { cluster_size: 4096, ..CreateQcow2::new(size) };
                create_qcow2(&path_of(&file), &create).expect("an image");
            }
        }
        let (storage, fd) = (Storage::new(), Arc::new(OwnedFd::from(file)));
        storage.add(&fd).expect("a file to keep track of");
        // As in the daemon: nothing is flushed unless a client asks.
        let journals = format!("/dev/shm/ringmill-test-journals-{}", nix::unistd::geteuid());
        let nodes =
            NodeRegistry::new().with_journals(journals.as_ref()).expect("a folder in memory");
        let node = open(nodes, &fd, format);
        VolatileDisk { storage, fd, format, node }
    }

    /// Returns the disk.
    pub fn node(&self) -> &Arc<dyn BlockNode> {
        &self.node
    }

    /// Returns a loop over that storage. It does not poll.
    pub fn event_loop(&self) -> EventLoop {
        event_loop(self.storage.clone())
    }

    /// Returns the `len` bytes at `offset` that a power cut now would leave.
    pub fn after_cut(&self, offset: u64, len: usize) -> Vec<u8> {
        let left = self.storage.stable(&self.fd).expect("it is kept track of");
        let sim = sim(Storage::new());
        let fd = sim.file(&left).expect("a memfd");
        // Journals have gone with the power.
        let node = open(NodeRegistry::new(), &fd, self.format);
        let event_loop = event_loop(sim.storage());
        let channel = node.open_channel(&event_loop).expect("a channel");
        let bufs = AlignedBuf::io_bufs(len, 4096).expect("memory");
        let read = async move { submit(&channel, Op::Read, offset, len as u64, bufs).await };
        let (result, bufs) = event_loop.block_on(read).expect("a loop that turns");
        result.expect("it can be read");
        let mut bytes = vec![0; len];
        bufs.copy_out(0, &mut bytes);
        event_loop.shut_down().expect("nothing is under way");
        bytes
    }
}

fn event_loop(storage: Storage) -> EventLoop {
    let poll = PollParams::OFF;
    let config = LoopConfig { poll, ..LoopConfig::default() };
    sim(storage).event_loop(config).expect("a loop")
}
