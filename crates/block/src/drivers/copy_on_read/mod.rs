//! `copy-on-read`: what is read from the images behind an image comes to be in the image.

mod driver;
mod node;
mod options;

pub(super) use self::options::COPY_ON_READ;
