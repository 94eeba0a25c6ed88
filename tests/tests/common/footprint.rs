//! What a daemon takes up: as much after its last client as before its first.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use integration::{Server, eventually};

/// Its private memory may have grown by this, KiB: what the first clients touch of stacks, heap and code, and what the
/// allocator keeps.
const MARGIN_KIB: u64 = 3072;

/// What a daemon has.
#[derive(Debug, PartialEq, Eq)]
pub struct Footprint {
    files: usize,
    threads: usize,
    guest_mappings: usize,
    pinned_kib: u64,
}

impl Footprint {
    pub fn of(server: &Server) -> Self {
        Footprint {
            files: server.open_files(),
            threads: server.threads(),
            guest_mappings: server.guest_mappings(),
            pinned_kib: server.pinned_kib(),
        }
    }
}

/// A daemon without clients, as it was before the first.
#[derive(Debug)]
pub struct Alone {
    footprint: Footprint,
    private_kib: u64,
}

impl Alone {
    pub fn of(server: &Server) -> Self {
        Alone { footprint: Footprint::of(server), private_kib: server.private_kib() }
    }

    /// Waits until the daemon has as many files, threads, mappings of guests' memory and as much that is pinned as then.
    ///
    /// # Panics
    ///
    /// When it does not, or when its memory has grown by more than the margin.
    pub fn again(&self, server: &Server) {
        let again = || (Footprint::of(server) == self.footprint).then_some(());
        let what = "files, threads and mappings as before the first client";
        if let Err(unchanged) = catch_unwind(AssertUnwindSafe(|| eventually(what, again))) {
            println!("{self:?}, then {:?}\n{}", Footprint::of(server), server.what_is_open());
            resume_unwind(unchanged);
        }
        // AddressSanitizer keeps what is freed, for a while.
        if std::env::var_os("ASAN_OPTIONS").is_none() {
            let (before, after) = (self.private_kib, server.private_kib());
            assert!(after <= before + MARGIN_KIB, "{before} KiB became {after} KiB");
        }
    }
}
