//! Preparation for pinning: limits, populating the memory, warnings.

#![forbid(unsafe_code)]

use std::fmt;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use event_loop::{oneshot, sync::lock};
use guest_memory::{GuestMemory, MappedRegion};
use nix::errno::Errno;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

/// Bytes populated at once. Bounds the time that an unmapping has to wait.
const CHUNK: u64 = 64 << 20;

/// State of pinning that the threads of an export share.
pub(crate) struct Pinning {
    export: String,
    /// No limit applies. Read at creation, since an I/O thread may not open the file.
    has_ipc_lock: bool,
    /// A failure was logged.
    failed: AtomicBool,
    populating: Mutex<Populating>,
}

/// Memory to populate, and the receivers that wait for it.
struct Work {
    regions: Vec<Weak<MappedRegion>>,
    done: Vec<oneshot::Sender<()>>,
}

/// The requests of a front end are handled by one thread, however many there are.
#[derive(Default)]
struct Populating {
    has_thread: bool,
    next: Option<Work>,
}

impl Pinning {
    /// For an export. Called on the control thread.
    pub(crate) fn new(export: String) -> Arc<Self> {
        let (failed, populating) = Default::default();
        Arc::new(Pinning { export, has_ipc_lock: has_ipc_lock(), failed, populating })
    }

    /// For a new front end: its failures are logged again.
    pub(crate) fn forget_failure(&self) {
        self.failed.store(false, Ordering::Relaxed);
    }

    /// Populates all pages of `memory` on a thread that keeps no reference to it. Each receiver is informed at
    /// the end, or when populating has failed and registration has to do it, which delays the I/O thread. A
    /// receiver whose sender is dropped learns that the memory has changed meanwhile.
    ///
    /// `None`: the memory is larger than the limit, and that was logged.
    pub(crate) fn populate(
        self: &Arc<Self>,
        memory: &GuestMemory,
        listeners: usize,
    ) -> Option<Vec<oneshot::Receiver<()>>> {
        let size = memory.regions().iter().map(|region| region.size()).sum();
        if self.memlock_limit().is_some_and(|limit| size > limit) {
            self.warn(format_args!("pinning all {} of it", MiB(size)), &Errno::ENOMEM.into());
            return None;
        }
        let regions = memory.regions().iter().map(Arc::downgrade).collect();
        let (done, receivers) = (0..listeners).map(|_| oneshot::channel()).unzip();
        let superseded = {
            let mut state = lock(&self.populating);
            let superseded = state.next.replace(Work { regions, done });
            if state.has_thread {
                return Some(receivers);
            }
            state.has_thread = true;
            superseded
        };
        drop(superseded);
        let me = self.clone();
        let thread = std::thread::Builder::new().name("populate".into());
        if thread.spawn(move || me.populate_all(true)).is_err() {
            self.populate_all(false);
        }
        Some(receivers)
    }

    /// Populates the waiting memory, or only drops it.
    fn populate_all(&self, for_real: bool) {
        loop {
            let work = {
                let mut state = lock(&self.populating);
                let work = state.next.take();
                state.has_thread = work.is_some();
                work
            };
            let Some(Work { regions, done }) = work else { return };
            if for_real {
                regions.iter().for_each(populate_region);
            }
            done.into_iter().for_each(|done| done.send(()));
        }
    }

    /// Logs the first failure, with its reason.
    pub(crate) fn warn(&self, what: impl fmt::Display, error: &io::Error) {
        if !self.failed.swap(true, Ordering::Relaxed) {
            let (id, advice) = (&self.export, advice(error, self.memlock_limit()));
            log::warn!(
                "export {id}: guest memory is not pinned, requests go on without: {what} failed: \
                 {error}: {advice}"
            );
        }
    }

    /// The same for the registration of a region on an I/O thread.
    pub(crate) fn warn_of(&self, region: &MappedRegion, io_thread: &str, error: &io::Error) {
        let (size, addr) = (MiB(region.size()), region.guest_addr());
        self.warn(
            format_args!(
                "io_uring_register of {size} at guest address {addr:#x} on I/O thread {io_thread}"
            ),
            error,
        );
    }

    /// Bytes that this user may pin; `None`: no limit.
    fn memlock_limit(&self) -> Option<u64> {
        let (soft, _) = getrlimit(Resource::RLIMIT_MEMLOCK).ok()?;
        (soft != RLIM_INFINITY && !self.has_ipc_lock).then_some(soft)
    }

    /// `id` of the export.
    pub(crate) fn export(&self) -> &str {
        &self.export
    }
}

fn populate_region(region: &Weak<MappedRegion>) {
    let mut offset = 0;
    while let Some(region) = region.upgrade()
        && offset < region.size()
        && region.populate(offset, CHUNK).is_ok()
    {
        offset += CHUNK;
    }
}

/// Whether the calling thread has `CAP_IPC_LOCK` in the initial user namespace, which the kernel requires:
/// capabilities(7), user_namespaces(7).
fn has_ipc_lock() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let read = |file| fs::read_to_string(file).unwrap_or_default();
    let status = read("/proc/thread-self/status");
    let bits = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    let map = read("/proc/self/uid_map");
    bits & 1 << CAP_IPC_LOCK != 0 && map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// A number of bytes in log messages.
struct MiB(u64);

impl fmt::Display for MiB {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0.div_ceil(1 << 20))
    }
}

/// Advice for a failure under `limit`.
fn advice(error: &io::Error, limit: Option<u64>) -> String {
    match error.raw_os_error().map(Errno::from_raw) {
        None => "needs io_uring, see ringmill probe".into(),
        Some(Errno::ENOMEM) => {
            let limit = limit.map_or("not in force".into(), |limit| MiB(limit).to_string());
            format!(
                "RLIMIT_MEMLOCK is {limit}; the memory of all guests of this user counts, times the \
                 I/O threads of their exports: raise it (systemd: LimitMEMLOCK=), or leave \
                 pin-memory off"
            )
        }
        Some(Errno::EFAULT | Errno::EOPNOTSUPP) => {
            "the guest's memory must be a memfd, or a file on tmpfs or hugetlbfs".into()
        }
        Some(Errno::EINVAL) => "needs Linux 5.19".into(),
        Some(_) => "leave pin-memory off".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_memory::test_util::memfd_memory;

    #[test]
    fn each_failure_has_its_advice() {
        let of = |errno: Errno| advice(&errno.into(), None);
        assert!(of(Errno::ENOMEM).contains("LimitMEMLOCK="));
        assert!(of(Errno::EFAULT).contains("memfd"));
        assert!(of(Errno::EINVAL).contains("5.19"));
        assert!(advice(&io::ErrorKind::Unsupported.into(), None).contains("probe"));
    }

    /// One thread populates all changes of memory, up to the last one.
    #[test]
    fn one_thread_populates_and_reports_the_last_memory() {
        let pinning = Pinning::new("e".into());
        let threads = || {
            let tasks = fs::read_dir("/proc/self/task").unwrap();
            let comm = |task: io::Result<fs::DirEntry>| {
                fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default()
            };
            tasks.map(comm).filter(|comm| comm.trim() == "populate").count()
        };
        let memories: Vec<_> =
            (0..100).map(|_| memfd_memory(&[(0, 4 << 20), (8 << 20, 4096)]).unwrap()).collect();
        let mut heard = Vec::new();
        for memory in &memories {
            heard.extend(pinning.populate(memory, 2).unwrap());
            // A few more may be on their way out, for as long as others have the processors.
            assert!(threads() <= 10);
        }
        let event_loop = event_loop::EventLoop::new(event_loop::LoopConfig::default()).unwrap();
        let wait = |receiver| event_loop.block_on(receiver).unwrap();
        let last = heard.split_off(heard.len() - 2);
        for receiver in last {
            assert_eq!(wait(receiver), Ok(()));
        }
        // All others have heard something.
        for receiver in heard {
            let _ = wait(receiver);
        }
    }
}
