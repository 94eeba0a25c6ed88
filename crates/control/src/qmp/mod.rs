//! QMP, the protocol by which programs control the daemon: JSON objects, one to a line.
//!
//! ```text
//! bytes ── lexer ── parser ── request ── command ── (the daemon)
//!                                session ◄── Result ◄──┘
//! ```
//!
//! [`Session`] is one client's conversation. It is pure: the owner of the socket passes received text to it and sends
//! what it returns. Input is bounded in length and depth, and any input gets an answer.

pub(crate) mod command;
mod error;
pub mod events;
mod lexer;
mod negotiation;
mod parser;
mod print;
mod reply;
mod request;
mod schema;
mod session;
mod version;

pub use command::{AddError, QmpCommand, add, commands};
pub use error::{ErrorClass, QmpError};
pub(crate) use events::EVENTS;
pub use negotiation::Capabilities;
pub use parser::{MAX_DEPTH, MAX_VALUE, Parser};
pub use reply::{Member, Reply, Returns};
pub use schema::schema;
pub use session::{Event, Received, Session, Ticket};
pub use version::version;
