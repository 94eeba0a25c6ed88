//! The block graph: who uses which node, and how that changes while requests go on.
//!
//! Nodes do not change. What changes is where an [`Edge`] leads, from a user of a node (an export, a
//! node on top, a job) to the node it uses:
//!
//! ```text
//!  export ── Edge ──► overlay ── Edge ──► image        control plane: one edge per user
//!              │                   │
//!            Port                Port                  each loop: one port per channel
//! ```
//!
//! A loop's channel through an edge is a [`Port`](port::Port). It passes requests on, and, told by the
//! control plane, holds them, so that the edge can lead elsewhere on all loops at once
//! ([`drain`], [`Drained::point_to`]).

mod behind;
mod edge;
mod port;

pub use behind::Behind;
pub use edge::{Drained, Edge, EdgeBusy, Held, drain, hold};
