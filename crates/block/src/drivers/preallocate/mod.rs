//! `preallocate`: a file that is made longer ahead of the writes of the format above it.

mod driver;
mod node;
mod options;

pub(super) use self::options::PREALLOCATE;
