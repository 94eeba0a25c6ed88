//! The kernel's own threads for a ring (io-wq). They carry out operations that block: every fsync(2) and
//! fallocate(2), and the I/O of files and devices without asynchronous support.
//!
//! By default the kernel starts up to four per CPU for files, and for everything else as many as the user
//! may have processes. Before Linux 6.2 they also run on CPUs outside of the ring thread's affinity.

#![allow(unsafe_code)]

use std::mem;

use io_uring::IoUring;

/// Limits the threads of `ring`, which the calling thread has created, to `most` of each of the two kinds,
/// and to the CPUs of the calling thread. Kernels that cannot do this (before 5.15, or 5.14 for the CPUs)
/// keep their own limits.
///
/// Call this before the ring is restricted.
pub(super) fn limit(ring: &IoUring, most: u32) {
    let ring = ring.submitter();
    // Zeroes query the limits without a change. A kernel that creates the pool on demand also answers with
    // zeroes, and stores the limit for later.
    let mut now = [0, 0];
    if ring.register_iowq_max_workers(&mut now).is_ok() {
        let mut limits = now.map(|now| if now == 0 { most } else { now.min(most) }.max(1));
        let _ = ring.register_iowq_max_workers(&mut limits);
    }
    // If the thread may run on all CPUs, so may the workers, on CPUs added later too.
    if let Some(cpus) = own_cpus() {
        let _ = ring.register_iowq_aff(&cpus);
    }
}

/// The CPUs of the calling thread; `None` for all CPUs.
fn own_cpus() -> Option<libc::cpu_set_t> {
    // SAFETY: the set is plain old data, for which all zeroes mean no CPU. sched_getaffinity(2)
    // writes no more than the size it is given; 0 is the calling thread.
    let (got, cpus) = unsafe {
        let mut cpus: libc::cpu_set_t = mem::zeroed();
        (libc::sched_getaffinity(0, size_of_val(&cpus), &raw mut cpus), cpus)
    };
    // SAFETY: these only read the set, and a number.
    let (own, online) =
        unsafe { (libc::CPU_COUNT(&cpus), libc::sysconf(libc::_SC_NPROCESSORS_ONLN)) };
    (got == 0 && i64::from(own) < online).then_some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_lowered_and_never_raised() {
        let ring = || IoUring::new(256).unwrap();
        let limits = |ring: &IoUring| {
            let mut limits = [0, 0];
            ring.submitter().register_iowq_max_workers(&mut limits).unwrap();
            limits
        };
        // On a new thread, as the pool belongs to the thread, not to the ring.
        let on_a_thread = |most| {
            std::thread::spawn(move || {
                let ring = ring();
                let before = limits(&ring);
                limit(&ring, most);
                (before, limits(&ring))
            })
            .join()
            .unwrap()
        };
        let (_, after) = on_a_thread(3);
        assert_eq!(after, [3, 3]);
        let (_, after) = on_a_thread(0);
        assert_eq!(after, [1, 1], "at least one");
        let (before, after) = on_a_thread(u32::MAX);
        assert_eq!(before, after);
    }
}
