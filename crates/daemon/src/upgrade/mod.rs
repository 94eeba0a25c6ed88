//! Live upgrade: a daemon hands everything that it serves over to a process of another program, which
//! may be another version of this one.
//!
//! ```text
//!   the old process                          the new process
//!   starts it          ── by the spawner ──▶
//!   hears no more from front ends
//!   says what there is ── Graph ──────────▶  makes it all, rings and queues but for
//!                      ◀────────── Ready ──
//!   stops all queues
//!   says where they are ── Queues ────────▶
//!                      ◀─────────── Have ──  this was the last that could go wrong
//!   leaves             ── Go ─────────────▶  starts all queues
//! ```
//!
//! Until `Go` is sent the old process is the one that serves: if anything goes wrong, or takes too long,
//! it ends the new one and goes on. The new one touches no queue before it has received `Go`. So at no
//! time do both.

mod bitmaps;
mod definitions;
pub mod document;
mod hand_over;
pub mod packets;
mod take_over;

pub use definitions::Definitions;
pub(super) use definitions::words;
pub(super) use hand_over::HandedOver;
pub(super) use take_over::TakenExport;
pub use take_over::{TakenOver, receive};
