//! VDUSE: a node as a vDPA device, which the host's own virtio-blk driver (`virtio_vdpa`) or a guest's (`vhost_vdpa`) uses.
//!
//! [`wire`]: the layouts of `linux/vduse.h`. `commands`: ioctl(2). `iotlb`: the driver's memory. `record`: the requests in
//! flight, which outlive the process. `session`: the kernel's messages, which start and stop the queues. `export`: the
//! control plane's side. The device and its queues are those of [`vhost_user`](crate::vhost_user).

#![deny(unsafe_code)]

mod commands;
mod export;
mod iotlb;
mod record;
mod session;
pub mod wire;

pub use export::{VduseConfig, VduseError, VduseExport};
pub use record::record_folder;
