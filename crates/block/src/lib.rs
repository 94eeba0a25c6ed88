//! The block layer: requests, nodes, drivers.
//!
//! The control plane opens nodes by their options through a [`NodeRegistry`]; each loop opens a
//! [`Channel`](node::Channel) to a node, and [`Request`](request::Request)s go down it, each to be
//! answered exactly once, on the same loop.

mod amend;
mod connections;
mod create;
pub mod driver;
pub mod drivers;
mod error;
pub mod flush;
mod format;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod graph;
mod image_place;
mod inherited;
pub mod job;
mod listeners;
pub mod node;
pub mod options;
mod own_mounts;
pub mod permissions;
pub mod policy;
mod registry;
pub mod request;
mod resize;
mod services;
pub mod status;
mod submit;
#[cfg(feature = "test-util")]
pub mod test_util;
pub mod track;
mod watched;

pub use amend::{AmendContext, AmendKind, Amending, Amendment};
pub use connections::{ConnectContext, Connections, Credentials};
pub use create::{Blocking, CreateContext, CreateKind, Creating, NewImage, OnThread};
pub use drivers::KeySlots;
pub use drivers::qcow2::{
    CheckFailure, Checked, CreateQcow2, Damage, DirtyImage, JournalState, LeftJournal, OverlayFile,
    Repair, check_qcow2, create_qcow2, create_qcow2_beside, left_journals, private_folder,
    remove_left_journal,
};
pub use drivers::throttle;
pub use drivers::web::probe::{ProbedUrl, ToldBy, probe_url};
pub use error::{LEFT_LOCKED, OpenError};
pub use format::Format;
pub use image_place::ImagePlace;
pub use inherited::OpenImage;
pub use own_mounts::{OwnMount, OwnMounts};
pub use registry::{
    BitmapsAbove, Child, GeneratedNames, JobFilter, MAX_CHAIN, NodeInfo, NodeRegistry, OpenedApart,
    Opening, Threads,
};
pub use services::DriverServices;
pub use submit::submit;
