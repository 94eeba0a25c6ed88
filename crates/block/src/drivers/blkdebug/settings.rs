//! Options of `blkdebug`: which requests fail, and how.

use std::path::PathBuf;

use nix::errno::Errno;

use crate::options::BlockdevRef;

/// Options of `blkdebug`.
///
/// The limits are bytes; 0 stands for no limit beyond that of the node below.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlkdebugOptions {
    /// `image`: the node below, named or nested.
    pub image: BlockdevRef,
    /// `config`: a file with more rules, in QEMU's format.
    pub config: Option<PathBuf>,
    /// `align`: requests to the node below are multiples of this, in bytes, a power of two.
    pub align: u64,
    /// `max-transfer`: reads and writes to the node below have at most so many bytes.
    pub max_transfer: u64,
    /// `opt-write-zero`: zeroes of fewer bytes, or that do not begin at a multiple, are written as
    /// data.
    pub opt_write_zero: u64,
    /// `max-write-zero`: write-zeroes requests to the node below have at most so many bytes.
    pub max_write_zero: u64,
    /// `opt-discard`: discards of fewer bytes, or that do not begin at a multiple, are not carried
    /// out.
    pub opt_discard: u64,
    /// `max-discard`: discards to the node below have at most so many bytes.
    pub max_discard: u64,
    /// `inject-error`.
    pub inject_error: Vec<InjectError>,
    /// `set-state`.
    pub set_state: Vec<SetState>,
    /// `seed` of the random numbers: any value.
    pub seed: u64,
}

impl BlkdebugOptions {
    /// Returns the options of a node on top of `image`, without a rule or limit.
    pub fn new(image: BlockdevRef) -> Self {
        BlkdebugOptions { image, ..BlkdebugOptions::default() }
    }
}

/// One of `inject-error`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectError {
    /// `event`: the request or event that the rule applies to.
    pub event: Event,
    /// `state` in which the event has to come; 0: any.
    pub state: u32,
    /// `iotype`: requests that it concerns; `None`: all but block-status.
    pub iotype: Option<IoType>,
    /// `sector` that a request has to touch, and how many from there on, in units of 512 bytes;
    /// `None`: any request.
    pub sectors: Option<(u64, u64)>,
    /// `once`: the rule is over when it has struck.
    pub once: bool,
    /// `immediately`: the answer is given before the submission returns.
    pub immediately: bool,
    /// `delay-ns`: how long the request is held first, nanoseconds.
    pub delay_ns: u64,
    /// `count`: the rule is over when it has struck so often; 0: never.
    pub count: u64,
    /// `probability-ppm`: how many of a million matching requests the rule applies to, at most
    /// [`MILLION`].
    pub probability_ppm: u32,
    /// `effect`.
    pub effect: Effect,
    /// `errno`: the answer; `None`: success.
    pub errno: Option<Errno>,
}

impl InjectError {
    /// Returns the rule that answers all requests with `EIO` from the event on.
    pub fn new(event: Event) -> Self {
        InjectError {
            event,
            state: 0,
            iotype: None,
            sectors: None,
            once: false,
            immediately: false,
            delay_ns: 0,
            count: 0,
            probability_ppm: MILLION,
            effect: Effect::Error,
            errno: Some(Errno::EIO),
        }
    }
}

/// The `probability-ppm` of a rule that always applies, in millionths.
pub const MILLION: u32 = 1_000_000;

/// One of `set-state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetState {
    /// `event`.
    pub event: Event,
    /// `state` in which the event has to come; 0: any.
    pub state: u32,
    /// `new_state`: the state from then on, a number from 0.
    pub new_state: u32,
}

/// The effect of a rule on a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It fails and is not carried out; without an errno, it is carried out as if there were no rule.
    Error,
    /// It is not carried out at all, and answered with success, or the errno.
    Lost,
    /// Only its first sectors are carried out, maybe none, never all.
    Short,
    /// Some of its sectors are carried out, anywhere in it, maybe none, never all.
    Torn,
}

impl Effect {
    /// Returns the answer where the options do not say.
    pub fn default_errno(self) -> Option<Errno> {
        match self {
            Effect::Error | Effect::Short | Effect::Torn => Some(Errno::EIO),
            Effect::Lost => None,
        }
    }
}

/// An enumeration whose values have names in options.
macro_rules! named {
    ($(#[$doc:meta])* $type:ident { $($(#[$value_doc:meta])* $value:ident = $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $type { $($(#[$value_doc])* $value,)* }

        impl $type {
            /// All there are.
            pub const ALL: &[$type] = &[$($type::$value,)*];

            /// Returns the name that options use.
            pub fn name(self) -> &'static str {
                match self { $($type::$value => $name,)* }
            }

            /// Returns the one of that name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.name() == name)
            }
        }
    };
}

named! {
    /// An event at the node that rules can refer to.
    ///
    /// Accesses of a qcow2 image above to its metadata have events of their own. Metadata is written when the image is
    /// flushed or closed. QEMU's format drivers also report steps that are no requests, which ringmill does not have.
    Event {
        /// The node is opened: once, before everything else.
        None = "none",
        /// A read of data comes in.
        ReadAio = "read_aio",
        /// A read of a compressed cluster comes in.
        ReadCompressed = "read_compressed",
        /// A write of data comes in.
        WriteAio = "write_aio",
        /// A write of compressed clusters comes in.
        WriteCompressed = "write_compressed",
        /// A write to the L1 table comes in.
        L1Update = "l1_update",
        /// A read of an L2 table comes in.
        L2Load = "l2_load",
        /// A write to L2 tables comes in.
        L2Update = "l2_update",
        /// A read of the refcount table comes in.
        ReftableLoad = "reftable_load",
        /// A write to the refcount table comes in.
        ReftableUpdate = "reftable_update",
        /// A read of a refcount block comes in.
        RefblockLoad = "refblock_load",
        /// A write to refcount blocks comes in.
        RefblockUpdatePart = "refblock_update_part",
        /// A flush comes in.
        FlushToOs = "flush_to_os",
        /// The flush is submitted to the node below.
        FlushToDisk = "flush_to_disk",
        /// The write is submitted to the node below.
        Pwritev = "pwritev",
        /// A write-zeroes request comes in.
        PwritevZero = "pwritev_zero",
        /// A write, or a write-zeroes request, is done.
        PwritevDone = "pwritev_done",
    }
}

named! {
    /// Kinds of requests.
    IoType {
        /// Reads.
        Read = "read",
        /// Writes.
        Write = "write",
        /// Write-zeroes requests.
        WriteZeroes = "write-zeroes",
        /// Discards.
        Discard = "discard",
        /// Flushes.
        Flush = "flush",
        /// Questions for what is stored where.
        BlockStatus = "block-status",
    }
}

/// Returns the errno with this number; `None` for 0, success.
///
/// # Errors
///
/// No errno has this number.
pub fn errno_from_number(number: i64) -> Result<Option<Errno>, String> {
    match i32::try_from(number).map(Errno::from_raw) {
        Ok(_) if number == 0 => Ok(None),
        Ok(Errno::UnknownErrno) | Err(_) => Err(format!("There is no errno {number}")),
        Ok(errno) => Ok(Some(errno)),
    }
}
