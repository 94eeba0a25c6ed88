//! `rbd`: an image of a Ceph cluster, by Ceph's own library.
//!
//! | Module | What it does |
//! |---|---|
//! | `options` | the options |
//! | `encrypt` | the options of encryption |
//! | `driver` | what a node is to the rest of the daemon |
//! | `connections` | a connection per configuration and user; opens and creates images |
//! | `jobs` | threads for calls that block |
//! | `node` | an open image: size, resize, closing |
//! | `channel` | requests of one loop |
//! | `extents` | block status |

mod channel;
mod connections;
mod create;
mod driver;
pub(crate) mod encrypt;
mod extents;
mod jobs;
mod node;
pub(crate) mod options;
