//! Rows that more than one table has, and what rows of nodes read into.

use std::ops::{Deref, DerefMut};

use ::options::place::{OneOf, Place};
use ::options::shape::Shape;
use ::options::table::{self, Context, Field, Row, Set};
use ::options::{Object, OptionError, Value};

use super::{
    Aio, BlockdevRef, Discard, Driver, Inherited, Locking, read_ref, ref_shape, write_ref,
};
use crate::driver::BlockDriver;

/// A driver's options while they are read.
pub struct Draft<O> {
    /// What a node that is defined in place inherits.
    pub inherited: Inherited,
    /// The options.
    pub options: O,
}

impl<O> Deref for Draft<O> {
    type Target = O;

    fn deref(&self) -> &O {
        &self.options
    }
}

impl<O> DerefMut for Draft<O> {
    fn deref_mut(&mut self) -> &mut O {
        &mut self.options
    }
}

impl<O: BlockDriver> Draft<O> {
    /// Makes the driver, for tables whose options go together in any case.
    ///
    /// # Errors
    ///
    /// None.
    pub fn build(self) -> Result<Driver, OptionError> {
        Ok(self.options.into())
    }
}

impl<O: Default> Draft<O> {
    /// Returns a draft in which nothing is given yet.
    pub fn new(inherited: Inherited) -> Self {
        Draft { inherited, options: O::default() }
    }
}

/// Writes a driver's options, as its table reads them.
pub fn write_options<O: Clone>(fields: &[Field<Draft<O>>], options: &O) -> Object {
    let inherited = Inherited::default();
    table::write(fields, &mut Draft { inherited, options: options.clone() })
}

/// A node below, as options may name it.
pub trait ChildValue: Sized {
    /// Reads it.
    ///
    /// # Errors
    ///
    /// In QSD's words.
    fn read(value: Value, inherited: Inherited, at: &Context) -> Result<Self, OptionError>;

    /// Returns it as options give it. `None`: no option is given.
    fn write(&self) -> Option<Value>;
}

impl ChildValue for BlockdevRef {
    fn read(value: Value, inherited: Inherited, at: &Context) -> Result<Self, OptionError> {
        read_ref(value, inherited, at)
    }

    fn write(&self) -> Option<Value> {
        Some(write_ref(self))
    }
}

impl ChildValue for Option<BlockdevRef> {
    fn read(value: Value, inherited: Inherited, at: &Context) -> Result<Self, OptionError> {
        read_ref(value, inherited, at).map(Some)
    }

    fn write(&self) -> Option<Value> {
        self.as_ref().map(write_ref)
    }
}

/// The place of a node below.
pub struct Child<O: 'static, V: 'static>(pub fn(&mut O) -> &mut V);

impl<O, V: ChildValue> Place<Draft<O>> for Child<O, V> {
    fn shape(&self) -> Shape {
        ref_shape()
    }

    fn read(&self, into: &mut Draft<O>, value: Value, name: &str, at: &Context) -> Set {
        *(self.0)(&mut into.options) = V::read(value, into.inherited, &at.below(name))?;
        Ok(())
    }

    fn write(&self, from: &mut Draft<O>) -> Option<Value> {
        (self.0)(&mut from.options).write()
    }
}

/// Returns the row of `file`: the node below.
pub const fn file_row<O>(place: &'static dyn Place<Draft<O>>) -> Field<Draft<O>> {
    Row::required("file", "the node below: by name, or defined in place").at(place)
}

/// The type that an image's options are read into.
pub trait ImageDraft: Sized + 'static {
    /// Returns where `aio` goes.
    fn aio(&mut self) -> &mut Option<Aio>;
    /// Returns where `locking` goes.
    fn locking(&mut self) -> &mut Locking;

    /// `aio`.
    const AIO: Field<Self> = Row::optional(
        "aio",
        "io_uring where the kernel offers it, else threads",
        "engine of reads and writes",
    )
    .at(&OneOf {
        at: |image: &mut Self| image.aio(),
        words: &[
            ("io_uring", Aio::IoUring, "the event loop's ring"),
            ("threads", Aio::Threads, "a pool of threads with blocking system calls"),
            ("native", Aio::Native, "Linux AIO; not through the host's page cache"),
        ],
    });

    /// `locking`.
    const LOCKING: Field<Self> =
        Row::default("locking", "auto", "lock the image against other programs, as QEMU does").at(
            &OneOf {
                at: |image: &mut Self| image.locking(),
                words: &[
                    ("auto", Locking::Auto, "lock where the file system can"),
                    ("on", Locking::On, "lock, or fail"),
                    ("off", Locking::Off, "do not lock"),
                ],
            },
        );
}

/// The type that a node's options are read into.
pub trait NodeDraft: Sized + 'static {
    /// The type of `discard`.
    type Discard: From<Discard> + PartialEq + 'static;

    /// Returns where `discard` goes.
    fn discard(&mut self) -> &mut Self::Discard;

    /// `discard`.
    const DISCARD: Field<Self> = Row::default(
        "discard",
        "ignore",
        "what happens to discard requests; nested nodes pass them on by default",
    )
    .at(&OneOf {
        at: |node: &mut Self| node.discard(),
        words: &[
            ("ignore", Discard::Ignore, "answer discards, do nothing"),
            ("unmap", Discard::Unmap, "give the space back"),
        ],
    });
}
