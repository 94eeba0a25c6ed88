//! `http` and `https`: an image on a web server, for reading, in ranges. The work is that of [`web`](super::web).

mod driver;
pub(crate) mod options;
