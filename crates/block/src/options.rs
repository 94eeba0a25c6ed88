//! What a block node is opened with: QSD's `--blockdev` options, as text and parsed.

mod elsewhere;
mod read;
mod rows;
mod write;

use std::path::PathBuf;

use event_loop::EventLoop;

pub(crate) use self::read::common_names;
pub use self::read::{
    Inherited, node_options, node_shape, read_blockdev, read_blockdevs, read_ref, ref_shape,
};
pub use self::rows::{ImageDraft, NodeDraft};
pub use self::write::{blockdev_option, write_object, write_path, write_ref};
pub use crate::drivers::blkdebug::settings::{
    BlkdebugOptions, Effect, Event, InjectError, IoType, MILLION, SetState, errno_from_number,
};
pub use crate::drivers::nbd::options::{NbdOptions, NbdServerAddr};
pub use crate::drivers::null::NullOptions;
pub use crate::drivers::raw::options::RawOptions;
pub use crate::drivers::throttle::options::ThrottleOptions;

use crate::driver::{AnyDriver, BlockDriver, ChildOption, Connecting};
use crate::permissions::ChildUse;

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
    /// `active`: open it. An inactive node is known, and can be exported, while somebody else has the
    /// image.
    pub active: bool,
    /// `cache.*`.
    pub cache: Cache,
    /// `driver` and what belongs to it.
    pub driver: Driver,
}

impl BlockdevOptions {
    /// An active node, written to as well, with what QSD has by default.
    pub fn new(node_name: Option<&str>, driver: Driver) -> BlockdevOptions {
        BlockdevOptions {
            node_name: node_name.map(str::to_owned),
            read_only: false,
            auto_read_only: false,
            discard: Discard::Ignore,
            detect_zeroes: DetectZeroes::Off,
            active: true,
            cache: Cache::default(),
            driver,
        }
    }
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
    /// `qcow2`: QEMU's image format.
    Qcow2(Qcow2Options),
    /// A driver that says by itself what it does.
    Any(AnyDriver),
}

impl<T: BlockDriver> From<T> for Driver {
    fn from(driver: T) -> Driver {
        Driver::Any(AnyDriver::new(driver))
    }
}

impl Driver {
    /// Returns the driver's options, if they are a `T`.
    pub fn downcast_ref<T: BlockDriver>(&self) -> Option<&T> {
        match self {
            Driver::Any(driver) => driver.as_any().downcast_ref(),
            Driver::File(_) | Driver::HostDevice(_) | Driver::Qcow2(_) => None,
        }
    }

    /// Returns the same, mutable.
    pub fn downcast_mut<T: BlockDriver>(&mut self) -> Option<&mut T> {
        match self {
            Driver::Any(driver) => driver.as_any_mut().downcast_mut(),
            Driver::File(_) | Driver::HostDevice(_) | Driver::Qcow2(_) => None,
        }
    }

    /// The nodes below that the options tell, each with what it is to this one, as QEMU names it: `file`,
    /// `backing`, …. An image may name more.
    pub fn children(&self) -> Vec<(&'static str, &BlockdevRef)> {
        match self {
            Driver::File(_) | Driver::HostDevice(_) => Vec::new(),
            Driver::Qcow2(qcow2) => {
                let data_file = qcow2.data_file.iter().map(|node| ("data-file", node));
                let backing = match &qcow2.backing {
                    Backing::Node(node) => Some(("backing", node)),
                    Backing::Implicit | Backing::None => None,
                };
                [("file", &qcow2.file)].into_iter().chain(data_file).chain(backing).collect()
            }
            Driver::Any(driver) => {
                let child = |ChildOption { role, node, .. }| (role, node);
                driver.children().into_iter().map(child).collect()
            }
        }
    }

    /// See [`BlockDriver::connect`].
    pub(crate) fn connect(&self, event_loop: &EventLoop) -> Option<Connecting> {
        match self {
            Driver::Any(driver) => driver.connect(event_loop),
            Driver::File(_) | Driver::HostDevice(_) | Driver::Qcow2(_) => None,
        }
    }

    /// Returns what a node of this driver uses the child with that role for.
    pub fn child_use(&self, role: &str) -> ChildUse {
        match self {
            Driver::Qcow2(_) => match role {
                "backing" => ChildUse::Backing,
                "data-file" => ChildUse::Data,
                _ => ChildUse::Metadata,
            },
            Driver::Any(driver) => {
                let child = driver.children().into_iter().find(|child| child.role == role);
                child.map_or(ChildUse::Filtered, |child| child.used_as)
            }
            // These drivers have no children.
            Driver::File(_) | Driver::HostDevice(_) => ChildUse::Filtered,
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

/// Options of `qcow2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qcow2Options {
    /// `file`: the node that the image lies in.
    pub file: BlockdevRef,
    /// `data-file`: the node that the guest's data lies in, of an image made so. `None` means the file
    /// that the image names, if it needs one.
    pub data_file: Option<BlockdevRef>,
    /// `backing`: what lies behind the image.
    pub backing: Backing,
    /// `pass-discard-request`: whether the node below gets discards of what the guest discards. `None`
    /// means if the image itself takes them, `discard=unmap`.
    pub pass_discard_request: Option<bool>,
    /// `discard-no-unref`: clusters without data keep their place in the image.
    pub discard_no_unref: bool,
}

/// What lies behind an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backing {
    /// The file that the image names, if it names one.
    Implicit,
    /// Nothing, whatever the image says: `backing` is null, or the empty string.
    None,
    /// That node.
    Node(BlockdevRef),
}

/// A node, by name or defined in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockdevRef {
    /// The `node-name` of a node defined before.
    Name(String),
    /// A nested definition.
    Inline(Box<BlockdevOptions>),
}
