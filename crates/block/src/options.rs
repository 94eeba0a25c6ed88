//! What a block node is opened with: QSD's `--blockdev` options, parsed.
//!
//! Plain data. The text forms (`key=value,…` and JSON) are the `control` crate's.

use std::path::PathBuf;

/// One `--blockdev`: a node's name, the options every driver has, and the driver's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockdevOptions {
    /// `node-name`; nested nodes may leave it out.
    pub node_name: Option<String>,
    /// `read-only`: nobody may write through this node.
    pub read_only: bool,
    /// `auto-read-only`: fall back to read-only when the image cannot be opened for writing.
    pub auto_read_only: bool,
    /// `discard`: what becomes of discard requests.
    pub discard: Discard,
    /// `detect-zeroes`: whether written zeroes become write-zeroes requests.
    pub detect_zeroes: DetectZeroes,
    /// `cache.*`.
    pub cache: Cache,
    /// `driver` and what belongs to it.
    pub driver: Driver,
}

/// `cache.direct` and `cache.no-flush`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cache {
    /// Open with `O_DIRECT`, past the host's page cache.
    pub direct: bool,
    /// Answer flushes without flushing: fast, and unsafe when the host dies.
    pub no_flush: bool,
}

/// `discard=ignore|unmap`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Discard {
    /// Answer discards, do nothing. `off` is a synonym.
    #[default]
    Ignore,
    /// Give the space back. `on` is a synonym.
    Unmap,
}

/// `detect-zeroes=off|on|unmap`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DetectZeroes {
    /// Writes are written.
    #[default]
    Off,
    /// Zeroes become write-zeroes requests.
    On,
    /// Zeroes become write-zeroes requests that may unmap.
    Unmap,
}

/// A driver with its own options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Driver {
    /// `file`: a regular file.
    File(FileOptions),
    /// `host_device`: a block device.
    HostDevice(FileOptions),
    /// `raw`: a part of, or all of, another node.
    Raw(RawOptions),
    /// `null-co`: answers at once.
    NullCo(NullOptions),
    /// `null-aio`: answers from the loop, after `latency-ns`.
    NullAio(NullOptions),
}

impl Driver {
    /// The nodes below, each with what it is to this one, as QEMU names it: `file`, `backing`, ….
    pub fn children(&self) -> Vec<(&'static str, &BlockdevRef)> {
        match self {
            Driver::File(_) | Driver::HostDevice(_) | Driver::NullCo(_) | Driver::NullAio(_) => {
                Vec::new()
            }
            Driver::Raw(raw) => vec![("file", &raw.file)],
        }
    }
}

/// Options of `file` and `host_device`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileOptions {
    /// `filename`.
    pub filename: PathBuf,
    /// `aio`; `None` means io_uring where the loop has it, else threads.
    pub aio: Option<Aio>,
    /// `locking`.
    pub locking: Locking,
}

/// `aio=threads|io_uring|native`: who carries out reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    /// A thread pool with blocking system calls.
    Threads,
    /// The loop's ring.
    IoUring,
    /// Linux AIO; with `cache.direct` only.
    Native,
}

/// `locking=auto|on|off`: whether the image is locked against other programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Locking {
    /// Lock where the file system can (open file description locks).
    #[default]
    Auto,
    /// Lock, or fail.
    On,
    /// Do not lock.
    Off,
}

/// Options of `raw`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawOptions {
    /// `file`: the node below, named or nested.
    pub file: BlockdevRef,
    /// `offset` of the first byte used, in bytes.
    pub offset: u64,
    /// `size` in bytes; `None` means up to the end of the node below.
    pub size: Option<u64>,
}

/// A node, by name or defined in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockdevRef {
    /// The `node-name` of a node defined before.
    Name(String),
    /// A nested definition.
    Inline(Box<BlockdevOptions>),
}

/// Options of `null-co` and `null-aio`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NullOptions {
    /// `size` in bytes. QSD's default is 1 GiB.
    pub size: u64,
    /// `latency-ns`: how long each request takes, nanoseconds.
    pub latency_ns: u64,
    /// `read-zeroes`: whether reads clear their buffers. Off, they leave them as they are.
    pub read_zeroes: bool,
}
