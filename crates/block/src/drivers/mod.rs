//! How images are read and written: one module per `driver`.

pub(crate) mod align;
pub(crate) mod blkdebug;
pub(crate) mod common;
pub(crate) mod detect_zeroes;
pub(crate) mod file;
pub(crate) mod inactive;
pub(crate) mod nbd;
pub(crate) mod null;
pub(crate) mod qcow2;
pub(crate) mod raw;
pub(crate) mod serialise;
pub mod throttle;
