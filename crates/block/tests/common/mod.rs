//! A loop, requests and answers for the tests.
#![allow(unreachable_pub, reason = "modules of one program")]

pub mod nbd;
pub mod web;
pub mod zram;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use block::node::Channel;
use block::options::*;
use block::request::{Op, Request, RequestOwner};
use block::status::{EXTENT_LEN, Extent, extent};
use event_loop::{AlignedBuf, EventLoop, IoBufs, LoopConfig};
use nix::errno::Errno;

/// A file that is gone with its value.
pub struct TempFile(pub PathBuf);

impl TempFile {
    /// A file of `len` bytes, all of them written, in `dir`.
    pub fn new(dir: &Path, name: &str, len: usize) -> TempFile {
        let path = dir.join(format!("ringmill-{}-{name}", std::process::id()));
        std::fs::write(&path, pattern(len)).unwrap();
        TempFile(path)
    }

    pub fn contents(&self) -> Vec<u8> {
        std::fs::read(&self.0).unwrap()
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A directory on a disk, with direct I/O.
pub fn disk() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_TMPDIR").map(PathBuf::from);
    target.unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")))
}

/// A directory in memory.
pub fn tmpfs() -> PathBuf {
    PathBuf::from("/dev/shm")
}

/// Bytes of which no two neighbouring sectors are the same.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 9).wrapping_mul(7)) as u8 | 1).collect()
}

pub fn blockdev(name: &str, driver: Driver) -> BlockdevOptions {
    BlockdevOptions::new(Some(name), driver)
}

pub fn file(path: &Path, aio: Option<Aio>) -> Driver {
    Driver::file(file_options(path, aio))
}

pub fn file_options(path: &Path, aio: Option<Aio>) -> FileOptions {
    FileOptions { filename: path.to_owned(), aio, locking: Locking::Auto }
}

/// `len` bytes of memory that begins `lead` bytes after a page does.
pub fn memory(len: usize, lead: usize) -> IoBufs {
    let all = AlignedBuf::io_bufs(len + lead, 4096).unwrap();
    let mut bufs = IoBufs::new();
    assert_eq!(bufs.set_part(&all, lead, len, 1), len);
    bufs
}

pub fn filled(data: &[u8], lead: usize) -> IoBufs {
    let mut bufs = memory(data.len(), lead);
    assert_eq!(bufs.copy_in(0, data), data.len());
    bufs
}

pub fn bytes(bufs: &IoBufs) -> Vec<u8> {
    let mut data = vec![0; bufs.len()];
    assert_eq!(bufs.copy_out(0, &mut data), data.len());
    data
}

/// Memory of one owner, as a guest's is.
pub struct Arena {
    all: IoBufs,
    used: usize,
}

impl Arena {
    pub fn new(len: usize) -> Arena {
        Arena { all: AlignedBuf::io_bufs(len, 4096).unwrap(), used: 0 }
    }

    /// `len` fresh bytes that begin `lead` bytes after a page does.
    pub fn take(&mut self, len: usize, lead: usize) -> IoBufs {
        let at = self.used.next_multiple_of(4096) + lead;
        self.used = at + len;
        let mut bufs = IoBufs::new();
        assert_eq!(bufs.set_part(&self.all, at, len, 1), len);
        bufs
    }

    /// The same, with `data` in it.
    pub fn filled(&mut self, data: &[u8], lead: usize) -> IoBufs {
        let mut bufs = self.take(data.len(), lead);
        assert_eq!(bufs.copy_in(0, data), data.len());
        bufs
    }
}

/// What a request was answered with.
pub type Answer = (Result<(), Errno>, IoBufs);

/// Stands for the answer of a request that was given up.
pub const GIVEN_UP: Errno = Errno::ERESTART;

/// Collects answers.
#[derive(Default)]
pub struct Answers(pub RefCell<BTreeMap<u32, Answer>>);

impl RequestOwner for Answers {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let before = self.0.borrow_mut().insert(tag, (result, bufs));
        assert!(before.is_none(), "request {tag} was answered twice");
    }

    fn given_up(&self, tag: u32, bufs: IoBufs) {
        self.complete(tag, Err(GIVEN_UP), bufs);
    }
}

/// A channel with a loop of its own.
pub struct Rig {
    pub event_loop: EventLoop,
    pub channel: Rc<dyn Channel>,
    answers: Rc<Answers>,
    to: Rc<dyn RequestOwner>,
    next: u32,
}

impl Rig {
    pub fn new(node: std::sync::Arc<dyn block::node::BlockNode>) -> Rig {
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        Rig::on(event_loop, node)
    }

    pub fn on(event_loop: EventLoop, node: std::sync::Arc<dyn block::node::BlockNode>) -> Rig {
        let channel = node.open_channel(&event_loop).unwrap();
        let answers = Rc::<Answers>::default();
        Rig { event_loop, channel, to: answers.clone(), answers, next: 0 }
    }

    /// Submits and returns the tag.
    pub fn submit(&mut self, op: Op, offset: u64, len: u64, bufs: IoBufs) -> u32 {
        let tag = self.next;
        self.next += 1;
        self.channel.submit(Request::new(op, offset, len, bufs, &self.to, tag));
        tag
    }

    /// The answer, if it has come.
    pub fn answer(&self, tag: u32) -> Option<Answer> {
        self.answers.0.borrow_mut().remove(&tag)
    }

    /// Whether there are answers that the test has not taken.
    pub fn has_answers(&self) -> bool {
        !self.answers.0.borrow().is_empty()
    }

    /// Turns the loop until the answer has come.
    pub fn wait(&self, tag: u32) -> Answer {
        loop {
            if let Some(answer) = self.answer(tag) {
                return answer;
            }
            self.event_loop.run_once(true).unwrap();
        }
    }

    /// The block status of a range.
    pub fn extents(&mut self, offset: u64, len: u64) -> Vec<Extent> {
        let tag = self.submit(Op::BlockStatus, offset, len, memory(64 * EXTENT_LEN, 0));
        let (result, bufs) = self.wait(tag);
        assert_eq!(result, Ok(()));
        (0..).map_while(|index| extent(&bufs, index)).collect()
    }

    pub fn op(&mut self, op: Op, offset: u64, len: u64) -> Result<(), Errno> {
        let tag = self.submit(op, offset, len, IoBufs::new());
        self.wait(tag).0
    }

    pub fn read(&mut self, offset: u64, len: usize, lead: usize) -> Result<Vec<u8>, Errno> {
        let tag = self.submit(Op::Read, offset, len as u64, memory(len, lead));
        let (result, bufs) = self.wait(tag);
        result.map(|()| bytes(&bufs))
    }

    pub fn write(&mut self, offset: u64, data: &[u8], lead: usize) -> Result<(), Errno> {
        self.write_op(Op::Write { fua: false }, offset, data, lead)
    }

    pub fn write_op(&mut self, op: Op, offset: u64, data: &[u8], lead: usize) -> Result<(), Errno> {
        let tag = self.submit(op, offset, data.len() as u64, filled(data, lead));
        let (result, bufs) = self.wait(tag);
        assert_eq!(bufs.len(), data.len(), "all of the memory comes back");
        result
    }
}
