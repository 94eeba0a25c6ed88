//! The block graph: which user has which node, and how that changes while requests are in flight.
//!
//! Nodes do not change. An [`Edge`] leads from a user of a node (an export, a node on top, a job) to
//! the node, and its target can change:
//!
//! ```text
//!  export ── Edge ──► overlay ── Edge ──► image        control plane: one edge per user
//!              │                   │
//!         EdgeChannel         EdgeChannel                each loop: one per channel
//! ```
//!
//! A loop's channel through an edge is an `EdgeChannel` (`graph/edge_channel.rs`). It passes requests on. On a command of the
//! control plane it holds them, so that the target of the edge can change on all loops at once
//! ([`drain`], [`Drained::point_to`]).

mod behind;
mod edge;
mod edge_channel;

pub use behind::Behind;
pub use edge::{Drained, Edge, EdgeBusy, HeldEdges, drain, hold};
