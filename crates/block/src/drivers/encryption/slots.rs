//! The LUKS header of an image that is open.

use std::sync::{Arc, Mutex, MutexGuard};

use crypto::luks::Header;
use event_loop::sync::lock;

/// The LUKS header of an open image, with the slots of its passwords.
pub struct KeySlots {
    header: Mutex<Header>,
    /// Where the header is in its node: bytes.
    start: u64,
    /// Held while slots change.
    changes: Mutex<()>,
}

impl KeySlots {
    pub(in crate::drivers) fn new(header: Header, start: u64) -> Arc<KeySlots> {
        Arc::new(KeySlots { header: Mutex::new(header), start, changes: Mutex::new(()) })
    }

    /// Returns the header as it was last read.
    pub(in crate::drivers) fn header(&self) -> Header {
        lock(&self.header).clone()
    }

    pub(super) fn set_header(&self, header: Header) {
        *lock(&self.header) = header;
    }

    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// Waits until no other thread changes slots. Blocks: for threads of their own only.
    pub(super) fn begin_change(&self) -> MutexGuard<'_, ()> {
        lock(&self.changes)
    }
}
