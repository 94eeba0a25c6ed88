//! `s3`: an image that is an object of an S3 store, for reading, in ranges.
//!
//! The work is that of [`web`](super::web). [`place`] finds the object's URL, [`keys`] the credentials, and [`store`]
//! signs each question and explains what the store says.

mod driver;
mod keys;
pub(crate) mod options;
mod place;
mod said;
mod store;
