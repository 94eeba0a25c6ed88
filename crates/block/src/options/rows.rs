//! Rows that more than one table has.

use ::options::table::{Choice, Field, Kind, Need, put};

use super::{Aio, BlockdevRef, Discard, Inherited, Locking, read_ref, ref_shape};

/// The type that an image's options are read into.
pub trait ImageDraft: Sized + 'static {
    /// Where `aio` goes.
    fn aio(&mut self) -> &mut Option<Aio>;
    /// Where `locking` goes.
    fn locking(&mut self) -> &mut Locking;

    /// `aio`.
    const AIO: Field<Self> = Field {
        name: "aio",
        kind: Kind::Choice(&[
            Choice {
                name: "io_uring",
                help: "the event loop's ring",
                set: |image| put(image.aio(), Some(Aio::IoUring)),
            },
            Choice {
                name: "threads",
                help: "a pool of threads with blocking system calls",
                set: |image| put(image.aio(), Some(Aio::Threads)),
            },
            Choice {
                name: "native",
                help: "Linux AIO; not through the host's page cache",
                set: |image| put(image.aio(), Some(Aio::Native)),
            },
        ]),
        need: Need::Optional("io_uring where the kernel offers it, else threads"),
        help: "engine of reads and writes",
    };

    /// `locking`.
    const LOCKING: Field<Self> = Field {
        name: "locking",
        kind: Kind::Choice(&[
            Choice {
                name: "auto",
                help: "lock where the file system can",
                set: |image| put(image.locking(), Locking::Auto),
            },
            Choice {
                name: "on",
                help: "lock, or fail",
                set: |image| put(image.locking(), Locking::On),
            },
            Choice {
                name: "off",
                help: "do not lock",
                set: |image| put(image.locking(), Locking::Off),
            },
        ]),
        need: Need::Default("auto"),
        help: "lock the image against other programs, as QEMU does",
    };
}

/// The type that the options of a node on top of another one are read into.
pub trait ParentDraft: Sized + 'static {
    /// Returns what a node that is defined in place inherits.
    fn inherited(&self) -> Inherited;
    /// Where the child goes.
    fn child(&mut self) -> &mut Option<BlockdevRef>;

    /// `file`: the child.
    const FILE: Field<Self> = Field {
        name: "file",
        kind: Kind::Nested {
            shape: ref_shape,
            read: |node, value, at| {
                let child = read_ref(value, node.inherited(), at)?;
                put(node.child(), Some(child))
            },
        },
        need: Need::Required,
        help: "the node below: by name, or defined in place",
    };
}

/// The type that a node's options are read into.
pub trait NodeDraft: Sized + 'static {
    /// Where `discard` goes.
    fn set_discard(&mut self, discard: Discard);

    /// `discard`.
    const DISCARD: Field<Self> = Field {
        name: "discard",
        kind: Kind::Choice(&[
            Choice {
                name: "ignore",
                help: "answer discards, do nothing",
                set: |node| {
                    node.set_discard(Discard::Ignore);
                    Ok(())
                },
            },
            Choice {
                name: "unmap",
                help: "give the space back",
                set: |node| {
                    node.set_discard(Discard::Unmap);
                    Ok(())
                },
            },
        ]),
        need: Need::Default("ignore"),
        help: "what happens to discard requests; nested nodes pass them on by default",
    };
}
