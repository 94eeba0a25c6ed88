//! Images on servers that speak HTTP, for reading, in ranges: what drivers `http`, `https` and `s3` share.
//!
//! [`thread`] is the one thread that talks to servers for all nodes of a process. On that thread, [`image`] repeats
//! and reads ahead, [`source`] sends one question, and [`answer`] judges what comes back. [`service`] is the seam for
//! what a kind of server wants beside HTTP. [`node`] has the channels of the loops, and [`driver`] what the nodes of
//! all these drivers are to the rest of the daemon.

mod ahead;
mod answer;
mod client;
mod driver;
mod image;
mod node;
mod options;
pub(crate) mod probe;
mod remedy;
mod service;
mod source;
mod thread;

pub(in crate::drivers) use self::answer::Failure;
pub(crate) use self::client::Access;
pub(in crate::drivers) use self::client::hidden;
pub(crate) use self::driver::WebImage;
pub use self::options::WebOptions;
pub(crate) use self::options::is_of;
pub(in crate::drivers) use self::options::{OnWeb, more_members, read_more, server, shown};
pub(in crate::drivers) use self::service::{Refusal, Service};
