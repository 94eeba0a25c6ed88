//! Live upgrade: a daemon hands its exports over to a new process, usually of another version.
//!
//! ```text
//!   the old process                          the new process
//!   starts it          ── by the spawner ──▶
//!   pauses front ends
//!   sends the inventory    ── Inventory ──────────▶  makes everything but rings and queues
//!                      ◀────────── Ready ──
//!   stops all queues
//!   sends their state  ── Queues ─────────▶
//!                      ◀─────────── Have ──  last step that can fail
//!   waits              ── Go ─────────────▶  starts all queues
//!                                            writes the pid file
//!   answers, exits     ◀── end of the socket
//! ```
//!
//! The old process serves until it sends `Go`: if a step fails or takes too long, it ends the new process
//! and resumes. The new process touches no queue before `Go`. The two never serve at the same time.

mod bitmaps;
mod contents;
pub mod document;
mod hand_over;
pub mod packets;
mod take_over;

pub(super) use document::{Part, TakenPart, part};
pub(super) use hand_over::HandedOver;
pub(super) use take_over::TakenListener;
pub use take_over::{TakenOver, receive, receive_from};
