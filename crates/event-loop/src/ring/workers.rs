//! The kernel's own threads behind a ring (io-wq): they do what would block, such as every fsync(2), every
//! fallocate(2), and the I/O of files and devices that cannot do without.
//!
//! Left alone there are up to four per CPU for files, and for all else as many as the user may have
//! processes; and, before Linux 6.2, they run on CPUs that the ring's thread keeps off.

#![allow(unsafe_code)]

use std::mem;

use io_uring::IoUring;

/// Lets `ring`, which was created by the calling thread, have at most `most` threads of each of the two
/// kinds, on the CPUs of the calling thread. A kernel that cannot do that (before 5.15, or 5.14 for
/// the CPUs) or may not goes on as it is: it has bounds of its own.
///
/// For a ring that is not restricted yet.
pub(super) fn limit(ring: &IoUring, most: u32) {
    let ring = ring.submitter();
    // Zeroes ask without changing anything. A kernel that makes the pool when it is first needed
    // answers with zeroes too, and takes the limit for later.
    let mut now = [0, 0];
    if ring.register_iowq_max_workers(&mut now).is_ok() {
        let mut limits = now.map(|now| if now == 0 { most } else { now.min(most) }.max(1));
        let _ = ring.register_iowq_max_workers(&mut limits);
    }
    // Where the thread may run anywhere, so may they, on CPUs that come later as well.
    if let Some(cpus) = own_cpus() {
        let _ = ring.register_iowq_aff(&cpus);
    }
}

/// The CPUs of the calling thread; `None`: all that are there.
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
        // On a thread of its own: the pool is the thread's, not the ring's.
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
