//! An NVMe controller behind its vfio-user export, and the driver's side of a queue pair.
//!
//! The driver has shadow doorbells (Doorbell Buffer Config), polls for completions, and writes a register only if the event
//! index asks for the write. A register write is a message to the export's control thread.

mod driver;
mod export;

pub use driver::{ENTRIES, NvmeArea, NvmeDriver};
pub use export::NvmeExport;
