//! What a VMM does for a device over vfio-user, whatever the device is: its socket, memory, interrupts and resets.

mod line;
mod link;
mod memory;
mod reply;

pub(crate) use self::line::{Gone, Line};
pub(crate) use self::link::{Device, Link};
pub(crate) use self::memory::Memory;
