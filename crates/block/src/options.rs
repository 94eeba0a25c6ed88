//! What a block node is opened with: QSD's `--blockdev` options, as text and parsed.

mod elsewhere;
mod read;
mod rows;
mod url;
mod write;

pub(crate) use self::read::common_names;
pub use self::read::{
    Inherited, node_options, node_shape, read_blockdev, read_blockdevs, read_ref, ref_shape,
};
pub use self::rows::{Child, ChildValue, Draft, ImageDraft, NodeDraft, file_row, write_options};
pub use self::url::{UrlOptions, is_url};
pub use self::write::{blockdev_option, write_ref};
pub use crate::driver::Driver;
pub use crate::drivers::blkdebug::settings::{
    BlkdebugOptions, Effect, Event, InjectError, IoType, MILLION, SetState, errno_from_number,
};
pub use crate::drivers::file::options::{Aio, FileOptions, Locking};
pub use crate::drivers::http::options::{HttpOptions, Scheme};
pub use crate::drivers::nbd::options::{NbdOptions, NbdServerAddr};
pub use crate::drivers::null::NullOptions;
pub use crate::drivers::qcow2::caches::CacheSizes;
pub use crate::drivers::qcow2::encrypt::Encrypt;
pub use crate::drivers::qcow2::options::{Backing, Qcow2Options};
pub use crate::drivers::raw::options::RawOptions;
pub use crate::drivers::rbd::options::{AuthMode, RbdOptions};
pub use crate::drivers::s3::options::{AddressingStyle, S3Options};
pub use crate::drivers::throttle::options::ThrottleOptions;
pub use crate::drivers::web::WebOptions;

/// One `--blockdev`: name, options of all drivers, and the driver's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockdevOptions {
    /// `node-name`; nested nodes may leave it out.
    pub node_name: Option<String>,
    /// `read-only`: this node refuses writes.
    pub read_only: bool,
    /// `read-only=on` was given for this node, and not for the one that it is defined in: it stays read-only if that one
    /// does not.
    pub stays_read_only: bool,
    /// `auto-read-only`: fall back to read-only when the image cannot be opened for writing.
    pub auto_read_only: bool,
    /// `force-share`: others may write to the image meanwhile. Only for reading.
    pub force_share: bool,
    /// `discard`: whether discard requests are passed on.
    pub discard: Discard,
    /// `detect-zeroes`: whether written zeroes become write-zeroes requests.
    pub detect_zeroes: DetectZeroes,
    /// `active`: open the image. An inactive node is registered and can be exported while another process has
    /// the image open.
    pub active: bool,
    /// `cache.*`.
    pub cache: Cache,
    /// `driver` and its options.
    pub driver: Driver,
}

impl BlockdevOptions {
    /// Returns the options of an active, writable node, with QSD's defaults.
    pub fn new(node_name: Option<&str>, driver: Driver) -> BlockdevOptions {
        BlockdevOptions {
            node_name: node_name.map(str::to_owned),
            read_only: false,
            stays_read_only: false,
            auto_read_only: false,
            force_share: false,
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

/// A node, by name or defined in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockdevRef {
    /// The `node-name` of a node defined before.
    Name(String),
    /// A nested definition.
    Inline(Box<BlockdevOptions>),
}

impl BlockdevRef {
    /// Returns the node's name, or an empty one if it has none yet.
    pub fn name(&self) -> &str {
        match self {
            BlockdevRef::Name(name) => name,
            BlockdevRef::Inline(options) => options.node_name.as_deref().unwrap_or_default(),
        }
    }
}

/// No node has this name. A draft has it until its required row is read.
impl Default for BlockdevRef {
    fn default() -> Self {
        BlockdevRef::Name(String::new())
    }
}
