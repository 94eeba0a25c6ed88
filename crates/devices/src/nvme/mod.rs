//! An NVMe controller with namespaces: what a driver without virtio talks to (NVM Express 1.4).
//!
//! [`Controller`] is on the control loop: registers, the admin queue, features, logs, events. A `Worker` is on each I/O
//! thread: it has some of the I/O queues, sends requests down the channels of the namespaces, and answers. What they share
//! is in `shared`: doorbells, memory, counters. The controller gives a worker orders, one after the other.
//!
//! A doorbell is a register write on the control loop, which stores the value and wakes the worker if it sleeps. A
//! driver with shadow doorbells (Doorbell Buffer Config, section 5.7) writes the value to memory, where the worker's
//! loop finds it while it polls. Before the loop sleeps, the worker arms the event index: the driver then writes the
//! register as well. With [`DoorbellMode::Mapped`] the registers are a page that the driver has mapped, which the workers
//! read without end while the controller is enabled: `doorbell_page`.

mod admin;
mod bits;
mod command;
mod controller;
mod data;
mod deallocate;
mod doorbell_page;
mod events;
mod features;
mod identify;
mod logs;
mod namespace;
mod probes;
mod queue;
mod queues;
mod requests;
mod saved;
mod shared;
mod status;
mod worker;

pub use bits::{BAR_SIZE, MAX_IO_QUEUES, MSIX_PENDING_AT, MSIX_TABLE_AT};
pub use controller::Controller;
pub use doorbell_page::DoorbellPage;
pub use identify::{SUBSYSTEM_VENDOR, VENDOR};
pub use namespace::{ControllerConfig, DoorbellMode, NamespaceConfig};
pub use saved::Restored;
pub use shared::Messages;
pub use worker::Attachment;
