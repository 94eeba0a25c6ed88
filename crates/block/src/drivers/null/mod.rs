//! `null-co` and `null-aio`: a disk without a disk, for measuring what lies above it.

mod node;

use std::path::Path;
use std::sync::Arc;

use ::options::Object;
use ::options::place::Of;
use ::options::table::{self, Field, Row};
use nix::errno::Errno;

use self::node::{Answer, NullNode};
use crate::driver::{
    BlockDriver, Description, DriverKind, HandOver, Layer, Look, Needs, NeverInactive, NotReopened,
    OpenContext, OptionTable,
};
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::{Driver, Inherited};

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;
/// The size of a null node when none is given, as in QSD.
const SIZE: u64 = 1 << 30;
/// The largest size that QSD takes, in bytes.
const MOST: u64 = i64::MAX.unsigned_abs() & !((1 << 30) - 1);

pub(super) static NULL_CO: DriverKind = DriverKind {
    name: "null-co",
    help: "a null device that answers at once, for measurements",
    example: "null-co,node-name=n,size=8589934592",
    options: &OptionTable { fields: FIELDS, start: new, build: |null| Ok(Driver::null_co(null)) },
    create: None,
    amend: None,
    library: None,
};

pub(super) static NULL_AIO: DriverKind = DriverKind {
    name: "null-aio",
    help: "the same, answered from the event loop",
    example: "null-aio,node-name=n,size=8589934592,latency-ns=100000",
    options: &OptionTable { fields: FIELDS, start: new, build: |null| Ok(Driver::null_aio(null)) },
    create: None,
    amend: None,
    library: None,
};

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

fn new(_: Inherited) -> NullOptions {
    NullOptions { size: SIZE, latency_ns: 0, read_zeroes: false }
}

static FIELDS: &[Field<NullOptions>] = &[
    Row::default("size", "1073741824", "size of the disk, in bytes")
        .at(&Of(|node: &mut NullOptions| &mut node.size)),
    Row::default("latency-ns", "0", "how long each request takes, in nanoseconds")
        .at(&Of(|node: &mut NullOptions| &mut node.latency_ns)),
    Row::default("read-zeroes", "off", "clear the buffers of reads; off leaves them as they are")
        .at(&Of(|node: &mut NullOptions| &mut node.read_zeroes)),
];

impl Driver {
    /// Returns the driver `null-co`, which answers within the submission.
    pub fn null_co(options: NullOptions) -> Driver {
        Driver::from(Null { answer: Answer::Inline, options })
    }

    /// Returns the driver `null-aio`, which answers from the loop after `latency-ns`.
    pub fn null_aio(options: NullOptions) -> Driver {
        Driver::from(Null { answer: Answer::FromLoop, options })
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Null {
    answer: Answer,
    options: NullOptions,
}

impl BlockDriver for Null {
    fn kind(&self) -> &'static DriverKind {
        match self.answer {
            Answer::Inline => &NULL_CO,
            Answer::FromLoop => &NULL_AIO,
        }
    }

    fn write(&self) -> Object {
        table::write(FIELDS, &mut { self.options })
    }

    crate::children!();

    fn layer(&self) -> Layer {
        Layer::Storage
    }

    fn objects(&self) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    fn needs(&self) -> Needs<'_> {
        Needs::NONE
    }

    fn hand_over(&self) -> HandOver {
        HandOver::AtOnce
    }

    fn look(&mut self, _look: Look) -> Result<(), NeverInactive> {
        Ok(())
    }

    fn describe(&self, _child: Option<&str>) -> Description {
        let NullOptions { size, read_zeroes, latency_ns: _ } = self.options;
        let (has_size, name) = (size != SIZE, self.kind().name);
        let size = has_size.then(|| ("size".to_owned(), size.into()));
        let zeroes = read_zeroes.then(|| ("read-zeroes".to_owned(), true.into()));
        Description {
            filename: (!has_size && !read_zeroes).then(|| format!("{name}://")),
            options: size.into_iter().chain(zeroes).collect(),
            specific: None,
        }
    }

    fn local_file(&self) -> Option<&Path> {
        None
    }

    fn open(&self, node: &mut OpenContext<'_>) -> Result<Arc<dyn BlockNode>, OpenError> {
        let Null { answer, options: null } = *self;
        if null.size > MOST {
            return Err(OpenError::os("Could not refresh total sector count", Errno::EFBIG));
        }
        // As QEMU does: what is no multiple is rounded up.
        let null = NullOptions { size: null.size.next_multiple_of(SECTOR), ..null };
        let read_only = node.options().read_only;
        Ok(Arc::new(NullNode::new(node.name().to_owned(), answer, null, read_only)))
    }

    fn check_reopen(&self, before: &dyn BlockDriver) -> Result<(), NotReopened> {
        let Some(before) = before.as_any().downcast_ref::<Self>().map(|before| before.options)
        else {
            return Err(NotReopened::Unsupported);
        };
        NotReopened::unless_same(&[
            ("size", before.size != self.options.size),
            ("latency-ns", before.latency_ns != self.options.latency_ns),
            ("read-zeroes", before.read_zeroes != self.options.read_zeroes),
        ])
    }
}
