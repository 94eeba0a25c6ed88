//! `copy-before-write`: what is about to be overwritten is copied first, so that the node also knows the disk as it was
//! when the node was opened. [`snapshot-access`](super::snapshot_access) shows that.

mod driver;
mod node;
mod options;
mod saved;
mod view;

pub(super) use self::options::COPY_BEFORE_WRITE;
