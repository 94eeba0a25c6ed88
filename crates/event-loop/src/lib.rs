//! An event loop built around io_uring, in the lineage of QEMU's AioContext and IOThread.
//!
//! Knows nothing of disks.

mod buf;

pub use buf::{AlignedBuf, IoBufs};
