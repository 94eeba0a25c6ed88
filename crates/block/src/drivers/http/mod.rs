//! `http` and `https`: an image on a web server, for reading, in ranges.
//!
//! [`options`] names the image, [`thread`] is the one thread that talks to servers for all nodes of a process.
//! On that thread, [`image`] repeats and reads ahead, [`source`] sends one question, and [`answer`] judges what comes
//! back. [`node`] has the channels of the loops.

mod ahead;
mod answer;
mod client;
mod driver;
mod image;
mod node;
pub(crate) mod options;
pub(crate) mod probe;
mod remedy;
mod source;
mod thread;
