//! `compress`: what is written is stored compressed in the image below.

mod driver;
mod node;
mod options;

pub(crate) use self::node::Compressing;
pub(super) use self::options::COMPRESS;
